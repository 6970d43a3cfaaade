"""The command line of a broker, and the files that it reads."""

import itertools
import os
import stat
from pathlib import Path

import pytest

from rollstream.infra.broker.java_runtime import Jars, JavaRuntime
from rollstream.infra.broker.launch_commands import cluster_id, prepare
from rollstream.infra.broker.providers import DockerKafka, JavaKafka
from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError
from tests.support.machine import Machine, script


def prepared(
    machine: Machine, docker: Path, config: BrokerConfig | None = None
) -> tuple[list[str], tuple[str, ...], BrokerLayout]:
    layout = BrokerLayout(root=machine.root / "broker")
    launch = prepare(DockerKafka(str(docker)), config or BrokerConfig(), layout, port=9092, controller_port=9093)
    return list(launch.command), launch.kill_command, layout


def option(command: list[str], name: str) -> list[str]:
    return [value for flag, value in itertools.pairwise(command) if flag == name]


def test_a_container_serves_on_loopback_and_keeps_its_data_with_us(machine: Machine) -> None:
    command, kill, layout = prepared(machine, machine.docker())
    assert command[-1] == BrokerConfig().image
    assert option(command, "--publish") == ["127.0.0.1:9092:9092"]
    assert option(command, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert f"{layout.data}:/var/lib/kafka/data" in option(command, "--volume")
    environment = dict(entry.split("=", 1) for entry in option(command, "--env"))
    assert environment["KAFKA_LISTENERS"].startswith("PLAINTEXT://0.0.0.0:9092,")
    assert environment["KAFKA_ADVERTISED_LISTENERS"] == "PLAINTEXT://127.0.0.1:9092"
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"
    assert environment["KAFKA_LOG_DIRS"] == "/var/lib/kafka/data"
    assert kill[1:] == ("kill", *option(command, "--name"))


SECRET = BrokerConfig(properties={"ssl.keystore.password": "env:KEYSTORE_PASSWORD", "ssl.client.auth": "required"})
"""Settings with a reference to the variable of the test below."""


@pytest.fixture
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTORE_PASSWORD", "canary")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("_secret")
def test_a_container_gets_secrets_by_a_private_file_and_not_by_its_command(machine: Machine) -> None:
    command, _kill, layout = prepared(machine, machine.docker(), SECRET)
    assert "canary" not in " ".join(command)
    assert "KAFKA_SSL_CLIENT_AUTH=required" in option(command, "--env")
    [file] = option(command, "--env-file")
    assert Path(file).read_text() == "KAFKA_SSL_KEYSTORE_PASSWORD=canary\n"
    assert [mode(path) for path in (Path(file), layout.properties, layout.image_settings)] == [0o600, 0o600, 0o700]


@pytest.mark.usefixtures("_secret")
def test_a_broker_reads_its_secrets_from_a_file_of_its_owner(tmp_path: Path) -> None:
    layout = BrokerLayout(root=tmp_path)
    layout.data.mkdir()
    (layout.data / "meta.properties").write_text("cluster.id=abcdefghijklmnopqrstuv\n")
    layout.properties.write_text("# readable by all\n")
    layout.properties.chmod(0o644)
    kafka = JavaKafka(JavaRuntime(Path("/usr/bin/java"), 17, "PATH"), Jars(tmp_path, "4.2.1", "KAFKA_HOME"))
    launch = prepare(kafka, SECRET, layout, port=9092, controller_port=9093)
    assert "canary" not in " ".join(launch.command)
    assert "\nssl.keystore.password=canary\n" in layout.properties.read_text()
    assert mode(layout.properties) == 0o600


def test_a_secret_that_is_not_there_is_named_with_its_setting(machine: Machine) -> None:
    says = r"broker\.properties\.ssl\.keystore\.password is env:KEYSTORE_PASSWORD, .*export KEYSTORE_PASSWORD"
    with pytest.raises(ConfigurationError, match=says):
        prepared(machine, machine.docker(), SECRET)


def test_each_start_of_a_container_has_a_name_of_its_own(machine: Machine) -> None:
    docker = machine.docker()
    first, second = (option(prepared(machine, docker)[0], "--name") for _ in range(2))
    assert first != second


def test_an_image_that_cannot_be_had_is_one_line_with_its_reason(machine: Machine) -> None:
    docker = script(machine.bin / "docker", "echo 'Using default' >&2; echo 'manifest unknown' >&2; exit 1")
    with pytest.raises(BrokerUnavailable, match=r"^the image .* cannot be pulled: manifest unknown; .*$"):
        prepared(machine, docker)


def test_formatted_storage_keeps_its_cluster_id(tmp_path: Path) -> None:
    layout = BrokerLayout(root=tmp_path)
    assert cluster_id(layout) != cluster_id(layout)
    layout.data.mkdir()
    (layout.data / "meta.properties").write_text("#comment\ncluster.id=abcdefghijklmnopqrstuv\nversion=1\n")
    assert cluster_id(layout) == "abcdefghijklmnopqrstuv"


def test_a_new_cluster_id_is_sixteen_bytes_and_no_option(tmp_path: Path) -> None:
    for _ in range(200):
        name = cluster_id(BrokerLayout(root=tmp_path))
        assert len(name) == 22
        assert not name.startswith("-")

"""A local broker: ready when started, its data kept through stop and kill, nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic

from rollstream.infra.broker.broker import ExternalBroker, LocalBroker, open_broker
from rollstream.infra.broker.java_runtime import (
    REPOSITORY_VARIABLE,
    cache_dir,
    find_jars,
    find_java,
    locked_jars,
    packaged_java,
)
from rollstream.infra.broker.process_identity import ProcessIdentity, identify, is_running, send
from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from tests.support.repository import artifact_path, serving
from tests.support.waiting import eventually


def command(*arguments: str, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """`rollstream broker ...`, in an environment that names no broker."""
    environment = {key: value for key, value in environment.items() if key != "KAFKA_BOOTSTRAP_SERVERS"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "rollstream", "broker", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment,
    )


def identity(broker: LocalBroker) -> ProcessIdentity:
    process = identify(broker.pid)
    assert process is not None
    return process


def create(broker: LocalBroker, topic: str) -> None:
    client = clients.admin(KafkaConfig(bootstrap_servers=broker.bootstrap_servers))
    client.create_topics([NewTopic(topic, 1, 1)])[topic].result(300)


def produce(broker: LocalBroker, topic: str, value: bytes) -> None:
    producer = clients.producer(KafkaConfig(bootstrap_servers=broker.bootstrap_servers))
    producer.produce(topic, value=value)
    assert producer.flush(120) == 0


def values(broker: LocalBroker, topic: str) -> list[bytes | None]:
    config = KafkaConfig(bootstrap_servers=broker.bootstrap_servers)
    return [message.value for message in read_to_end(config, topic)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """One broker for the tests that leave it running, in a folder as users name theirs."""
    with LocalBroker.start(tmp_path_factory.mktemp("Übung 東京"), bound_to_parent=True) as broker:
        assert BrokerLayout(root=broker.data_dir).formatted, "the broker keeps its data elsewhere"
        yield broker


def test_a_started_broker_takes_and_gives_records(running: LocalBroker, run_name: str) -> None:
    create(running, run_name)
    produce(running, run_name, b"first")
    produce(running, run_name, b"second")
    assert values(running, run_name) == [b"first", b"second"]


def test_topics_are_not_created_by_a_mistyped_name(running: LocalBroker, run_name: str) -> None:
    client = clients.admin(KafkaConfig(bootstrap_servers=running.bootstrap_servers))
    assert client.list_topics(run_name, timeout=300).topics[run_name].error is not None
    assert run_name not in client.list_topics(timeout=300).topics


@pytest.mark.long
def test_a_kill_and_a_stop_keep_the_data_and_the_port(tmp_path: Path, run_name: str) -> None:
    with LocalBroker.start(tmp_path, bound_to_parent=True) as broker:
        address = broker.bootstrap_servers
        create(broker, run_name)
        produce(broker, run_name, b"before the kill")
        killed = identity(broker)
        broker.kill()
        assert not is_running(killed)
        assert not broker.answers()

        broker.restart()
        assert broker.bootstrap_servers == address
        produce(broker, run_name, b"before the stop")
        stopped = identity(broker)
        broker.stop()
        assert not is_running(stopped)
        broker.stop()

    with LocalBroker.start(tmp_path, bound_to_parent=True) as broker:
        assert broker.bootstrap_servers == address
        assert values(broker, run_name) == [b"before the kill", b"before the stop"]


@pytest.mark.long  # In the short form, test files run in parallel, each on a broker of its own.
def test_two_brokers_run_side_by_side(running: LocalBroker, tmp_path: Path, run_name: str) -> None:
    with LocalBroker.start(tmp_path, bound_to_parent=True) as other:
        assert other.bootstrap_servers != running.bootstrap_servers
        create(running, run_name)
        create(other, run_name)
        produce(running, run_name, b"here")
        produce(other, run_name, b"there")
        assert values(running, run_name) == [b"here"]
        assert values(other, run_name) == [b"there"]


@pytest.mark.long  # In the short form, another test runs this Java where there is nothing but Python.
def test_the_packaged_java_runs_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = packaged_java()
    assert java is not None
    monkeypatch.setenv("JAVA_HOME", str(java.parent.parent))
    with LocalBroker.start(tmp_path, bound_to_parent=True) as broker:
        assert broker.answers()


def bare_environment(home: Path, **more: str) -> dict[str, str]:
    """Environment of a machine that has Python alone: no java, mvn or docker, and nothing cached."""
    nothing = home / "bin"
    nothing.mkdir()
    kept = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "https_proxy")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": os.fspath(nothing),
        "HOME": os.fspath(home),
        **more,
    }


def assert_starts(data: Path, environment: dict[str, str]) -> None:
    arguments = ("--port", "0", "--json", "--data", os.fspath(data))
    started = command("start", *arguments, environment=environment)
    try:
        assert started.returncode == 0, started.stderr
        fields = json.loads(started.stdout)
        assert fields["provider"] == "java"
    finally:
        command("stop", "--data", os.fspath(data), environment=environment)
    assert {path.name for path in cache_dir(environment).glob("*.jar")} == {jar.name for jar in locked_jars()}


@pytest.mark.long
def test_a_broker_starts_where_there_is_nothing_but_python(tmp_path: Path) -> None:
    java = find_java(os.environ, packaged_java()).runtime
    assert java is not None
    jars = find_jars({key: value for key, value in os.environ.items() if key != "KAFKA_HOME"}, java).jars
    assert jars is not None
    for jar in locked_jars():
        kept = tmp_path / "repository" / artifact_path(jar)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.symlink_to(jars.directory / jar.name)
    with serving(tmp_path / "repository") as address:
        assert_starts(tmp_path / "data", bare_environment(tmp_path, **{REPOSITORY_VARIABLE: address}))


@pytest.mark.long
def test_a_broker_starts_where_there_is_nothing_but_python_and_the_internet(tmp_path: Path) -> None:
    assert_starts(tmp_path / "data", bare_environment(tmp_path))


def test_a_port_in_use_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnavailable) as refusal:
            LocalBroker.start(tmp_path, port)
    message = str(refusal.value)
    assert f"port {port} on 127.0.0.1 is in use" in message
    assert "--port" in message
    assert "\n" not in message


def test_a_second_broker_on_the_same_data_is_refused(running: LocalBroker) -> None:
    with pytest.raises(BrokerUnavailable, match=f"already runs on .*{running.bootstrap_servers} .*--data"):
        LocalBroker.start(running.data_dir)


def test_a_broker_that_does_not_start_shows_the_end_of_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    config = BrokerConfig(data_dir=tmp_path, properties={"num.io.threads": "0"})
    with pytest.raises(BrokerUnavailable) as failure:
        LocalBroker.start(config=config, bound_to_parent=True)
    assert "num.io.threads" in str(failure.value)
    assert str(tmp_path / "broker.log") in str(failure.value)
    assert LocalBroker.find(tmp_path) is None


def test_a_broker_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    config = BrokerConfig(data_dir=tmp_path, start_timeout_s=0.3)
    with pytest.raises(BrokerUnavailable, match=r"did not answer within 0.3 s; the end of .*broker\.log"):
        LocalBroker.start(config=config, bound_to_parent=True)
    commands = subprocess.run(["ps", "-A", "-o", "command="], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in commands


def test_a_data_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BrokerUnavailable, match=r"cannot be used .*--data"):
        LocalBroker.start(tmp_path / "file" / "broker")
    with pytest.raises(BrokerUnavailable, match=r"comma .*--data"):
        LocalBroker.start(tmp_path / "a,b")


def test_a_state_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text("{}")
    with pytest.raises(BrokerUnavailable, match=r"broker\.json is not a broker's state"):
        LocalBroker.find(tmp_path)


STARTER = """
import signal
import sys
from rollstream.infra.broker.broker import LocalBroker
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
broker = LocalBroker.start(sys.argv[1], bound_to_parent=True)
print(broker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_bound_broker_ends_with_its_parent_however_that_ends(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", STARTER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        broker = identify(int(parent.stdout.readline()))
        assert broker is not None
        parent.send_signal(number)
        assert parent.wait(300) != 0
    eventually(lambda: not is_running(broker), 60, "the broker ended after its parent")


@pytest.mark.long
def test_a_broker_started_by_command_outlives_it_and_is_found_by_its_data(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "d"))
    assert command("status", *data).returncode == 1

    started = command("start", "--port", "0", "--json", *data)
    assert started.returncode == 0, started.stderr
    fields = json.loads(started.stdout)
    process = identify(fields["pid"])
    assert process is not None
    try:
        status = command("status", "--json", *data)
        assert status.returncode == 0
        assert json.loads(status.stdout) == fields
        assert fields["state"] == "running"

        again = command("start", "--port", "0", *data)
        assert again.returncode == 2
        assert fields["bootstrap_servers"] in again.stderr
        assert "Traceback" not in again.stderr

        stopped = command("stop", *data)
        assert stopped.returncode == 0
        assert not is_running(process)
        assert command("status", *data).returncode == 1
        assert "no broker runs" in command("stop", *data).stdout
    finally:
        send(process, signal.SIGKILL)


@pytest.mark.long
def test_a_broker_that_crashed_is_not_found(tmp_path: Path) -> None:
    broker = LocalBroker.start(tmp_path)
    process = identity(broker)
    assert send(process, signal.SIGKILL)
    eventually(lambda: not is_running(process), 60, "the broker ended")
    assert LocalBroker.find(tmp_path) is None
    broker.stop()


def test_an_address_in_the_environment_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "kafka.example:9092")
    with open_broker(BrokerConfig(data_dir=tmp_path / "d")) as broker:
        assert isinstance(broker, ExternalBroker)
        assert broker.bootstrap_servers == "kafka.example:9092"
    assert not (tmp_path / "d").exists()


@pytest.mark.long
def test_a_look_at_a_missing_topic_does_not_create_it_where_brokers_create_topics(tmp_path: Path) -> None:
    config = BrokerConfig(data_dir=tmp_path, properties={"auto.create.topics.enable": "true"})
    with LocalBroker.start(config=config, bound_to_parent=True) as broker:
        kafka = KafkaConfig(bootstrap_servers=broker.bootstrap_servers)
        for _look in range(2):
            with pytest.raises(TopicError, match=r"main\.rollouts is missing"):
                topic_admin.partitions_of(kafka, "main.rollouts")
        assert "main.rollouts" not in topic_admin.topic_names(kafka)

"""The compose file of a run: what it names exists, and each of its containers has the settings that belong together."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from rollstream.infra.config import BrokerConfig
from rollstream.pipeline.command_line.cli import build_parser
from rollstream.pipeline.config import RunConfig, load
from rollstream.pipeline.deployment.compose import CODE, CONFIG, ComposeOptions
from rollstream.pipeline.deployment.container_settings import HOME
from rollstream.pipeline.deployment.description import counts, process_name, role_of
from rollstream.topics.errors import ConfigurationError
from tests.support.run_files import MUCH

DIRECTORIES = (
    "learner.checkpoint.directory",
    "learner.compile_cache",
    "tracker.directory",
    "fill.directory",
    "serving.directory",
    "learner.weights.url",
)
"""Settings of directories to which roles write."""


def rendered(folder: Path, text: str = MUCH, *flags: str) -> dict[str, Any]:
    """The compose file that the command writes, as YAML reads it."""
    (folder / "run.toml").write_text(text)
    output = folder / "deploy" / "compose.yaml"
    output.parent.mkdir(exist_ok=True)
    args = build_parser().parse_args(["deploy", "compose", str(folder / "run.toml"), "-o", str(output), *flags])
    assert args.run(args) == 0
    document = yaml.safe_load(output.read_text())
    assert isinstance(document, dict)
    return document


def settings_of(service: dict[str, Any], folder: Path) -> RunConfig:
    """The settings that a process of this service has: those of its file, overridden by its variables."""
    environment = {name: value for name, value in service["environment"].items() if value is not None}
    assert all(isinstance(value, str) for value in environment.values())
    return load(folder / "run.toml", environment=environment)


def roles_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: s for name, s in document["services"].items() if s.get("entrypoint") == ["rollstream"]}


def test_the_file_is_valid_by_the_compose_specification(tmp_path: Path) -> None:
    rendered(tmp_path, MUCH, "--brokers=3", "--code", str(tmp_path))
    checking = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    answer = subprocess.run(
        [*checking, str(tmp_path / "deploy" / "compose.yaml")], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_process_of_the_run_is_a_service_whose_command_its_role_takes(tmp_path: Path) -> None:
    document = rendered(tmp_path)
    config = load(tmp_path / "run.toml")
    processes = {process_name(role_of(name), n): name for name, count in counts(config).items() for n in range(count)}
    assert {"learn-1", "infer-1", "group-0", "label-0", "env-1", "gateway", "eval"} < processes.keys()
    services = roles_of(document)
    assert services.keys() == {*processes, "topics", "archive", "tools"}
    numbers = set()
    for name, service in services.items():
        args = build_parser().parse_args(service["command"]) if name != "tools" else None
        if name in processes:
            assert args is not None
            assert (args.command, str(args.config)) == (processes[name], CONFIG)
            numbers.add((args.command, getattr(args, "ordinal", getattr(args, "process", 0))))
    assert len(numbers) == len(processes), "no two processes of a role have one number"


def test_all_processes_agree_on_addresses_and_each_host_is_a_service_that_listens_there(tmp_path: Path) -> None:
    document = rendered(tmp_path, MUCH, "--brokers=3")
    services = roles_of(document)
    configs = {name: settings_of(service, tmp_path) for name, service in services.items()}
    config = configs["env-0"]
    assert all(other == config for other in configs.values())
    assert config.run == "arithmetic"
    assert config.data_dir == Path(HOME)

    brokers = dict(address.split(":") for address in config.kafka.bootstrap_servers.split(","))
    assert brokers == {f"broker-{n}": "9092" for n in (1, 2, 3)}
    for host, port in brokers.items():
        variables = document["services"][host]["environment"]
        assert variables["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://{host}:{port}"
        assert f"PLAINTEXT://0.0.0.0:{port}" in variables["KAFKA_LISTENERS"]
        assert f"{variables['KAFKA_NODE_ID']}@{host}:9093" in variables["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
    assert len({document["services"][host]["environment"]["CLUSTER_ID"] for host in brokers}) == 1
    assert (config.topics.replication_factor, config.topics.min_insync_replicas) == (3, 2)

    assert len(config.worker.inference_urls) == config.inference.replicas == 2
    for url in config.worker.inference_urls:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port
        number = int(services[host]["command"][services[host]["command"].index("--ordinal") + 1])
        assert configs[host].inference.replica(number).port == port
        assert configs[host].inference.host == "0.0.0.0"
    assert config.learner.coordinator.split(":")[0] == "learn"
    assert services["gateway"]["ports"] == ["127.0.0.1:8100:8100"]
    assert (config.gateway.host, config.gateway.port) == ("0.0.0.0", 8100)


def test_probes_ask_the_service_port_and_producers_start_once_consumers_are_ready(tmp_path: Path) -> None:
    document = rendered(tmp_path)
    services = roles_of(document)
    for name, service in services.items():
        if name in ("topics", "archive", "tools"):
            continue
        config = settings_of(service, tmp_path)
        [url] = re.findall(r"'(http:[^']+)'", " ".join(service["healthcheck"]["test"]))
        assert urlsplit(url).port == config.service.port
        assert config.service.host == "0.0.0.0"
        waits = {other for other, how in service["depends_on"].items() if how["condition"] == "service_healthy"}
        role = role_of(service["command"][1])
        after = {n for n in services if n.rpartition("-")[0] in role.after} | set(role.after) & services.keys()
        assert waits == after
        for other in waits:
            assert "/readyz" in " ".join(services[other]["healthcheck"]["test"])
        assert service["depends_on"]["topics"] == {"condition": "service_completed_successfully"}
        assert service["healthcheck"]["start_period"] == "1800s"
        assert config.supervisor.ready_timeout_s == 1800, "a server waits for a version as long as it may be starting"
    assert "/livez" in " ".join(services["env-0"]["healthcheck"]["test"])
    targets = json.loads(document["services"]["prometheus"]["environment"]["SCRAPE"])["scrape_configs"][0]
    assert {target.split(":")[0] for target in targets["static_configs"][0]["targets"]} == {
        name for name, service in services.items() if "healthcheck" in service
    }


@pytest.mark.parametrize(("timeout_s", "seconds"), [("7200", 7200), ("1800.5", 1801), ("10", 1800)])
def test_a_container_may_start_as_long_as_its_process_waits(timeout_s: str, seconds: int, tmp_path: Path) -> None:
    learn = rendered(tmp_path, MUCH, f"--set=supervisor.ready_timeout_s={timeout_s}")["services"]["learn"]
    assert learn["healthcheck"]["start_period"] == f"{seconds}s"
    assert seconds - 1 < settings_of(learn, tmp_path).supervisor.ready_timeout_s <= seconds


def test_containers_have_no_root_write_to_few_places_and_listen_on_this_machine_alone(tmp_path: Path) -> None:
    document = rendered(tmp_path, MUCH, "--code", str(tmp_path))
    volumes = document["volumes"].keys()
    for name, service in document["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service.get("user") == "1000:1000" or name in ("prometheus", "grafana")
        for volume in service["volumes"]:
            source, _target, *mode = volume.split(":")
            assert source in volumes or mode == ["ro"], volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert {name for name, s in document["services"].items() if s.get("profiles") == ["monitoring"]} == {
        "prometheus",
        "grafana",
    }
    assert "/tmp:exec" in document["services"]["broker"]["tmpfs"], "Kafka loads the library of zstd from there"
    learn = document["services"]["learn"]
    assert learn["restart"] == "on-failure", "a learner that has made its last step is not started again"
    assert learn["stop_grace_period"] == "20s"
    assert settings_of(learn, tmp_path).learner.checkpoint.directory.startswith(str(HOME))
    assert f"run:{HOME}" in learn["volumes"]
    assert (learn["working_dir"], learn["environment"]["PYTHONPATH"]) == (CODE, CODE)
    assert "..:/code:ro" in learn["volumes"]
    assert f"../run.toml:{CONFIG}:ro" in learn["volumes"]


@pytest.mark.parametrize(
    ("variable", "flags"),
    [
        ("ROLLSTREAM_KAFKA__CLIENT__SASL_PASSWORD", ["-X", "sasl.password=env:SASL"]),
        ("ROLLSTREAM_KAFKA__CLIENT__SSL_KEY_PEM", ["-X", "ssl.key.pem=env:SASL"]),
        ("ROLLSTREAM_GATEWAY__API_KEY", ["--set=gateway.api_key="]),
    ],
)
def test_a_secret_in_a_variable_that_a_flag_overrides_is_written_nowhere(
    variable: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SASL", "another")
    monkeypatch.setenv(variable, "canary")
    rendered(tmp_path, MUCH, *flags)
    assert "canary" not in (tmp_path / "deploy" / "compose.yaml").read_text()


def test_secrets_are_handed_on_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLSTREAM_LABELING__JUDGE__API_KEY", "canary in a variable")
    monkeypatch.setenv("MODEL_KEY", "canary")
    document = rendered(tmp_path, MUCH, "-X", "sasl.password=env:SASL", "--brokers=0", "-b", "kafka:9092")
    text = (tmp_path / "deploy" / "compose.yaml").read_text()
    assert "canary" not in text
    env = document["services"]["env-0"]
    judge = "ROLLSTREAM_LABELING__JUDGE__API_KEY"
    for service, secrets in {"env-0": {"MODEL_KEY"}, "label-0": {judge}, "learn": set(), "topics": set()}.items():
        variables = document["services"][service]["environment"]
        assert {name for name, value in variables.items() if value is None} == {"SASL"} | secrets
    everything = {name for name, value in document["services"]["tools"]["environment"].items() if value is None}
    assert everything == {"SASL", "MODEL_KEY", judge}
    config = settings_of(env, tmp_path)
    assert config.kafka.client["sasl.password"] == "env:SASL"
    assert config.gateway.api_key == "file:/run/secrets/gateway-api-key"
    assert document["secrets"] == {"gateway-api-key": {"file": str(tmp_path / "keys" / "gateway")}}
    having = {name for name, service in document["services"].items() if "secrets" in service}
    assert having == {"gateway", "tools"}
    assert config.kafka.bootstrap_servers == "kafka:9092"
    assert not any(name.startswith("broker") for name in document["services"])
    assert "depends_on" not in document["services"]["topics"] or document["services"]["topics"]["depends_on"] == {}


NESTED_SECRETS = """
[[environments]]
name = "judged"
use = "verifiers"
options.OpenAI_api_key = "env:OPENAI"
options.env = { judges = [ { model = "m", api_key = "env:JUDGE" } ] }
options.grader = { api_key = "env:GRADER" }
"""


def test_options_that_hold_references_to_variables_are_the_same_in_containers(tmp_path: Path) -> None:
    env = rendered(tmp_path, NESTED_SECRETS, "--set=environments.0.options.grader.api_key=env:OTHER")["services"][
        "env-0"
    ]
    [entry] = load(tmp_path / "run.toml").environments
    [contained] = settings_of(env, tmp_path).environments
    assert contained == replace(entry, options={**entry.options, "grader": {"api_key": "env:OTHER"}})
    assert {name for name, value in env["environment"].items() if value is None} == {"OPENAI", "JUDGE", "OTHER"}


@pytest.mark.parametrize(
    ("key", "options"),
    [("judges.0.api_key", '{ judges = [ { api_key = "file:k" } ] }'), ("My_api_key", '{ My_api_key = "file:k" }')],
)
def test_files_of_secrets_that_no_variable_can_name_are_refused(key: str, options: str, tmp_path: Path) -> None:
    text = f'[[environments]]\nname = "judged"\nuse = "verifiers"\noptions = {options}\n'
    with pytest.raises(ConfigurationError, match=rf"environments\.0\.options\.{key} is file:.*; refer to .*env:NAME"):
        rendered(tmp_path, text)


def test_certificates_of_this_machine_are_where_the_settings_name_them(tmp_path: Path) -> None:
    client, registry = tmp_path / "client.crt", tmp_path / "registry.crt"
    for file in (client, registry):
        file.write_text("a certificate")
    flags = [f"--set=kafka.registry.ca={registry}", "-X", "security.protocol=SSL", "--brokers=0", "-b", "kafka:9093"]
    flags += ["-X", f"ssl.certificate.location={client}", "-X", "ssl.ca.location=/no/file/of/this/machine.crt"]
    for service in roles_of(rendered(tmp_path, "", *flags)).values():
        assert settings_of(service, tmp_path).kafka.client["ssl.certificate.location"] == str(client)
        mounted = [volume for volume in service["volumes"] if ".crt" in volume]
        assert mounted == [f"{file}:{file}:ro" for file in (client, registry)]


GATEWAY_KEY = "ROLLSTREAM_GATEWAY__API_KEY"


@pytest.mark.parametrize(
    ("value", "flags", "setting", "passed"),
    [
        ("canary", [], f"env:{GATEWAY_KEY}", {GATEWAY_KEY}),
        ("env:OTHER", [], "env:OTHER", {"OTHER"}),
        ("file:key", [], "file:/run/secrets/gateway-api-key", set()),
        ("canary", ["--set=gateway.api_key=env:OTHER"], "env:OTHER", {"OTHER"}),
        ("canary", ["--set=gateway.api_key=file:key"], "file:/run/secrets/gateway-api-key", set()),
        ("canary", ["--set=gateway.api_key="], "", set()),
    ],
)
def test_secrets_given_by_flags_and_variables_reach_their_roles(
    value: str, flags: list[str], setting: str, passed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATEWAY_KEY, value)
    document = rendered(tmp_path, '[gateway]\nport = 8100\napi_key = "env:OF_FILE"\n', *flags)
    gateway = document["services"]["gateway"]
    variables = gateway["environment"]
    assert {name for name, text in variables.items() if text is None} == passed
    config = settings_of({"environment": variables | dict.fromkeys(passed, "a secret")}, tmp_path)
    assert config.gateway.api_key == setting
    assert ("secrets" in gateway) == setting.startswith("file:")


def test_what_flags_and_variables_set_beside_the_file_is_set_in_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTREAM_LEARNER__MAX_STEPS", "7")
    flags = ["--set=grouping.batch_rollouts=32", "--run=other", "-X", "linger.ms=3", "--set=learner.wait$=1"][:4]
    document = rendered(tmp_path, 'task = "add"\n', *flags, '--set=worker.model=a$b"c')
    config = settings_of(document["services"]["group-0"], tmp_path)
    assert (config.run, config.grouping.batch_rollouts, config.learner.max_steps) == ("other", 32, 7)
    assert config.kafka.client == {"linger.ms": "3"}
    # Compose reads two dollar signs as one.
    assert config.worker.model == 'a$$b"c'
    with pytest.raises(ConfigurationError, match=r"environments\.0\.options\.Most has upper-case letters"):
        rendered(tmp_path, 'task = "add"\n', "--set=environments.0.use=add", "--set=environments.0.options.Most=1")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=serving.python=python"], "serving.python names a Python of this machine"),
        (['--set=worker.inference_urls=["http://127.0.0.1:8000/v1"]'], "worker.inference_urls has http://127.0.0.1"),
        (["--set=labeling.judge.url=http://localhost:1/v1"], "labeling.judge.url has http://localhost:1/v1"),
        (["--set=kafka.registry.url=http://127.0.0.1:8081"], "kafka.registry.url has http://127.0.0.1:8081"),
        (["--set=gateway.port=8081"], "gateway.port makes a server listen on port 8081, at which every container"),
        (
            ["--set=inference.port=8080", "--set=inference.replicas=2"],
            "inference.port makes a server listen on port 8081",
        ),
        (["--set=service.port=8000"], "inference.port makes a server listen on port 8000"),
        (["--brokers=0"], "kafka.bootstrap_servers has 127.0.0.1:9092, which inside a container is the container"),
        (["-X", "security.protocol=SASL_SSL"], "the brokers of the compose file are plaintext"),
        (["--set=topics.replication_factor=3"], "there is one broker; give --brokers 3"),
        (
            ["--set=broker.properties.ssl.keystore.password=env:STORE"],
            "broker.properties.ssl.keystore.password refers to a secret, which brokers in containers do not get",
        ),
        *(
            ([f"--set={key}=/data/c"], f"{key} is /data/c, but containers keep files only below data_dir")
            for key in DIRECTORIES
        ),
    ],
)
def test_what_no_container_can_have_is_refused_with_the_remedy(flags: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        rendered(tmp_path, "", *flags)
    assert says in str(refused.value)


def test_workers_have_an_image_of_their_own_and_directories_lie_in_the_volume(tmp_path: Path) -> None:
    flags = ["--worker-image=worlds:1", "--image=r:2"]
    document = rendered(tmp_path, 'data_dir = "/d"\n[learner]\nweights.url = "/d/weights"\n', *flags)
    images = {name: service["image"] for name, service in document["services"].items()}
    assert (images["env-0"], images["learn"], images["broker"]) == ("worlds:1", "r:2", BrokerConfig().image)
    assert settings_of(document["services"]["learn"], tmp_path).learner.weights.url == f"{HOME}/weights"
    assert ComposeOptions().kafka_image == BrokerConfig().image


@pytest.mark.parametrize("key", DIRECTORIES)
@pytest.mark.parametrize("directory", ["/d/of/mine", "of/mine"])
def test_a_directory_below_data_dir_or_a_relative_one_lies_in_the_volume(
    key: str, directory: str, tmp_path: Path
) -> None:
    flags = ["--set=data_dir=/d", f"--set={key}={directory}", "--code", str(tmp_path)]
    services = roles_of(rendered(tmp_path, "", *flags))
    config = settings_of(services["archive"], tmp_path)
    assert attrgetter(key)(config) == f"{HOME}/of/mine"


def test_a_run_of_a_control_task_has_its_roles(tmp_path: Path) -> None:
    text = '[collect]\nprocesses = 2\nplayer = "cell:play"\n[fill]\ndirectory = "windows"\n'
    document = rendered(tmp_path, text, "--code", str(tmp_path))
    services = roles_of(document)
    assert services.keys() == {"topics", "fill", "collect-0", "collect-1", "archive", "tools"}
    assert settings_of(services["fill"], tmp_path).fill.directory == f"{HOME}/windows"
    assert services["collect-0"]["depends_on"]["fill"] == {"condition": "service_healthy"}


def test_gpus_go_to_the_processes_of_the_roles_that_are_named_and_to_no_other(tmp_path: Path) -> None:
    services = rendered(tmp_path, MUCH, "--gpus", "learn=0,1", "--gpus", "infer=2")["services"]
    given = {
        name: service["deploy"]["resources"]["reservations"]["devices"]
        for name, service in services.items()
        if "deploy" in service
    }
    device = {"driver": "nvidia", "capabilities": ["gpu"]}
    assert given["learn"] == [{**device, "device_ids": ["0", "1"]}]
    assert given["infer"] == [{**device, "device_ids": ["2"]}]
    assert {name.partition("-")[0] for name in given} == {"learn", "infer"}

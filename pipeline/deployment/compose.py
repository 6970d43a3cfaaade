"""Renders a run as a compose file: brokers, topics, every role of its description, an archive, and monitoring.

Containers run without root, their file systems are read-only except for volumes and temporary folders, and no port is
open to other machines.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.infra.config import BrokerConfig, ClusterNode, image_environment, server_properties
from rollstream.pipeline.config import RunConfig, secret_references
from rollstream.pipeline.deployment.container_settings import (
    HOME,
    KAFKA_PORT,
    ContainerSecrets,
    check_broker_secrets,
    check_brokers,
    check_containers,
    container_secrets,
    container_settings,
    is_secured,
    secrets_of,
    variables_of,
)
from rollstream.pipeline.deployment.description import (
    ARCHIVE,
    ENV,
    GATEWAY,
    RoleDescription,
    counts,
    process_name,
    role_of,
)
from rollstream.pipeline.deployment.yaml_text import render_yaml
from rollstream.topics.errors import ConfigurationError

TOPICS = "topics"
"""The service that creates the topics and exits; every role starts after it."""
CONFIG = "/etc/rollstream/run.toml"
CODE = "/code"
MERGE = "<<"
"""Key whose value is the name of a table at the top, without `x-`, that is merged into this one."""
_DATA = "/var/lib/kafka/data"
_CONTROLLER_PORT = 9093
_USER = "1000:1000"
_LOCAL = "127.0.0.1"
_WAIT_FOR_BROKERS_S = 300
_PROBE = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}{path}', timeout=5)"


@dataclass(frozen=True, kw_only=True)
class ComposeOptions:
    """Options of a compose file in addition to the settings of the run."""

    brokers: int = 1
    """Number of broker containers: 1, 3, or 0 if kafka.bootstrap_servers names other brokers."""
    image: str = "rollstream:local"
    """Image of every role."""
    worker_image: str = ""
    """Image of the workers, if the environments' libraries are not in `image`."""
    kafka_image: str = BrokerConfig.image
    """Image of the brokers: the official image, or one with the same variables and paths."""
    prometheus_image: str = "prom/prometheus:v3.5.0"
    grafana_image: str = "grafana/grafana:12.1.0"
    config_file: str = ""
    """The run's configuration file, as a path relative to the compose file; empty if there is none."""
    code: str = ""
    """Directory of users' code, relative to the compose file, in which roles then run; empty if there is none."""
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the GPUs of this machine that the processes of a role get, by role."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for settings that are not given in the file."""


def render_compose(config: RunConfig, options: ComposeOptions) -> str:
    """Return the text of the compose file of a run. Raises ConfigurationError if containers cannot run it."""
    document = compose_document(config, options)
    text = re.sub(f'"{MERGE}": (.+)', rf"{MERGE}: *\1", render_yaml(_escaped(document)))
    return _head(config, options) + re.sub("^x-(.+):$", r"x-\1: &\1", text, flags=re.MULTILINE)


def compose_document(config: RunConfig, options: ComposeOptions) -> dict[str, Any]:
    """Return the compose file of a run as plain values; the value of `<<` is the name of the merged table."""
    _check(config, options)
    brokers = _broker_names(options.brokers)
    secrets, secret_settings = container_secrets(secret_references(config))
    settings = {**container_settings(config, service_name, brokers), **secret_settings}
    port, ready_timeout_s = settings["service.port"], settings["supervisor.ready_timeout_s"]
    role = _role(config, options)
    services: dict[str, Any] = {}
    for number, name in enumerate(brokers, start=1):
        services[name] = _broker(config, options, name, number)
    services[TOPICS] = _topics(options, brokers)
    processes = counts(config)
    for name, count in processes.items():
        for number in range(count):
            services[service_name(name, number)] = _process(config, options, role_of(name), number, processes)
    services[ARCHIVE] = {MERGE: "role", "command": _command(options, role_of(ARCHIVE), 0)}
    tools = {MERGE: "role", "profiles": ["tools"], "command": ["--help"], "restart": "no"}
    services["tools"] = tools | _secrets(secrets)
    services |= _monitoring(options, [service_name(n, i) for n, count in processes.items() for i in range(count)], port)
    volumes: dict[str, Any] = {name: {} for name in ("run", *brokers, "prometheus", "grafana")}
    code = {"PYTHONPATH": CODE} if options.code else {}
    document: dict[str, Any] = {
        "x-environment": {**dict(sorted({**options.variables, **variables_of(settings)}.items())), **code}
    }
    document["x-role"] = role
    document |= {f"x-{path}": _probe(port, f"/{path}", ready_timeout_s) for path in ("livez", "readyz")}
    document |= {"services": services, "volumes": volumes}
    if secrets.files:
        document["secrets"] = {name: {"file": path} for name, path in secrets.files.items()}
    return document


def service_name(role: str, number: int) -> str:
    """Return the name of the service of a process, which is also its host name."""
    return process_name(role_of(role), number)


def _check(config: RunConfig, options: ComposeOptions) -> None:
    check_containers(config)
    if options.brokers not in (0, 1, 3):
        raise ConfigurationError(f"--brokers {options.brokers}: give 1 or 3, or 0 to use kafka.bootstrap_servers")
    if absent := sorted(options.gpus.keys() - counts(config).keys()):
        raise ConfigurationError(
            f"--gpus {absent[0]}=...: the run has no such role; it has {', '.join(counts(config))}"
        )
    if not options.brokers:
        check_brokers(config)
    elif is_secured(config):
        raise ConfigurationError(
            "kafka.client sets security.protocol, but the brokers of the compose file are plaintext: remove the key, "
            "or use your own brokers with --brokers 0"
        )
    elif config.topics.replication_factor > options.brokers:
        raise ConfigurationError(
            f"topics.replication_factor is {config.topics.replication_factor} but there is one broker; give --brokers 3"
        )
    else:
        check_broker_secrets(config)


# ------------------------------------------------------------------ roles


def _role(config: RunConfig, options: ComposeOptions) -> dict[str, Any]:
    """Return the entries that the services of all roles share, including the secrets of the connection to Kafka."""
    mounts = [f"run:{HOME}"]
    mounts += [f"{options.config_file}:{CONFIG}:ro"] if options.config_file else []
    mounts += [f"{options.code}:{CODE}:ro"] if options.code else []
    mounts += [f"{path}:{path}:ro" for path in _files_of_connection(config)]
    secrets, _settings = container_secrets(secrets_of(config))
    return {
        "image": options.image,
        "entrypoint": ["rollstream"],
        **_confined(),
        "user": _USER,
        "working_dir": CODE if options.code else str(HOME),
        "volumes": mounts,
        "tmpfs": ["/tmp"],
        "stop_grace_period": f"{math.ceil(config.supervisor.stop_timeout_s)}s",
        "restart": "unless-stopped",
        "depends_on": {TOPICS: {"condition": "service_completed_successfully"}},
        "environment": {MERGE: "environment"},
        **_secrets(secrets),
    }


def _files_of_connection(config: RunConfig) -> list[str]:
    """Return the absolute paths by which settings of the connection to Kafka name files here, such as certificates.

    A path that does not exist here is taken for one of the image.
    """
    named = [value for key, value in config.kafka.client.items() if key.endswith(".location")]
    paths = map(Path, dict.fromkeys((*named, config.kafka.registry.ca)))
    return [str(path) for path in paths if path.is_absolute() and path.exists()]


def _secrets(secrets: ContainerSecrets) -> dict[str, Any]:
    """Return the entries of a service for secrets; empty if it has none."""
    entries: dict[str, Any] = {}
    if secrets.variables:
        entries["environment"] = {MERGE: "environment", **dict.fromkeys(secrets.variables)}
    if secrets.files:
        entries["secrets"] = list(secrets.files)
    return entries


def _process(
    config: RunConfig, options: ComposeOptions, role: RoleDescription, number: int, processes: Mapping[str, int]
) -> dict[str, Any]:
    awaited = {waiting for name in processes for waiting in role_of(name).after}
    service: dict[str, Any] = {
        MERGE: "role",
        "command": _command(options, role, number),
        # A role that other roles wait for is healthy once it is ready; any other role, while it makes progress.
        "healthcheck": {MERGE: "readyz" if role.name in awaited else "livez"},
        **_secrets(container_secrets(secrets_of(config, role.secrets))[0]),
    }
    if role.name in options.gpus:
        devices = {"driver": "nvidia", "device_ids": list(options.gpus[role.name]), "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [devices]}}}
    if role.name == ENV and options.worker_image:
        service["image"] = options.worker_image
    if role.finishes:
        service["restart"] = "on-failure"
    if role.name == GATEWAY:
        service["ports"] = [f"{_LOCAL}:{config.gateway.port + number}:{config.gateway.port}"]
    before = [service_name(name, n) for name in role.after for n in range(processes.get(name, 0))]
    if before:
        service["depends_on"] = {
            TOPICS: {"condition": "service_completed_successfully"},
            **{name: {"condition": "service_healthy"} for name in before},
        }
    return service


def _command(options: ComposeOptions, role: RoleDescription, number: int) -> list[str]:
    return [*role.arguments(number), *_config_flag(options)]


def _config_flag(options: ComposeOptions) -> list[str]:
    return ["--config", CONFIG] if options.config_file else []


def _topics(options: ComposeOptions, brokers: tuple[str, ...]) -> dict[str, Any]:
    return {
        MERGE: "role",
        "command": ["topics", "apply", "--wait", str(_WAIT_FOR_BROKERS_S), *_config_flag(options)],
        "restart": "no",
        "depends_on": {name: {"condition": "service_started"} for name in brokers},
    }


def _probe(port: int, path: str, ready_timeout_s: float) -> dict[str, Any]:
    return {
        "test": ["CMD", "python", "-c", _PROBE.format(port=port, path=path)],
        "interval": "15s",
        "timeout": "10s",
        "retries": 4,
        # Probes that fail before a process gives up by itself do not count.
        "start_period": f"{math.ceil(ready_timeout_s)}s",
    }


def _confined() -> dict[str, Any]:
    return {"init": True, "read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


# ------------------------------------------------------------------ brokers


def _broker_names(count: int) -> tuple[str, ...]:
    return ("broker",) if count == 1 else tuple(f"broker-{n}" for n in range(1, count + 1))


def _broker(config: RunConfig, options: ComposeOptions, name: str, number: int) -> dict[str, Any]:
    """Return one node of the cluster; each is a broker and a voter."""
    names = _broker_names(options.brokers)
    node = ClusterNode(
        node_id=number, cluster_id=_cluster_id(config.run), controller_ports=(_CONTROLLER_PORT,) * len(names)
    )
    own = BrokerConfig(host=name, properties=config.broker.properties, node=node)
    properties = server_properties(
        own, port=KAFKA_PORT, controller_port=_CONTROLLER_PORT, log_dir=_DATA, bind="0.0.0.0"
    ) | {
        "listeners": f"PLAINTEXT://0.0.0.0:{KAFKA_PORT},CONTROLLER://0.0.0.0:{_CONTROLLER_PORT}",
        "controller.quorum.voters": ",".join(f"{n}@{host}:{_CONTROLLER_PORT}" for n, host in enumerate(names, start=1)),
    }
    heap = f"-Xms{config.broker.heap_initial_mib}m -Xmx{config.broker.heap_max_mib}m"
    variables = {"CLUSTER_ID": node.cluster_id, "KAFKA_HEAP_OPTS": heap, "LOG_DIR": "/tmp/logs"}
    return {
        "image": options.kafka_image,
        **_confined(),
        "user": _USER,
        "environment": {**variables, **dict(sorted(image_environment(properties).items()))},
        "volumes": [f"{name}:{_DATA}"],
        # Kafka unpacks the library of zstd into /tmp and loads it; without `exec` it would reject rollouts.
        "tmpfs": ["/tmp:exec", "/opt/kafka/config:uid=1000,gid=1000", "/opt/kafka/logs:uid=1000,gid=1000"],
        "stop_grace_period": f"{math.ceil(config.broker.stop_timeout_s)}s",
        "restart": "unless-stopped",
    }


def _cluster_id(run: str) -> str:
    """Return 16 bytes in URL-safe base64, which are always the same for this run."""
    digest = hashlib.sha256(run.encode()).digest()[:16]
    # Kafka's storage tool reads a leading dash as a flag.
    return base64.urlsafe_b64encode(digest).decode().rstrip("=").replace("-", "_")


# ------------------------------------------------------------------ monitoring


def _monitoring(options: ComposeOptions, services: list[str], port: int) -> dict[str, Any]:
    """Return Prometheus and Grafana. Their settings are in variables, so that they need no files of their own."""
    scrape = {
        "global": {"scrape_interval": "15s"},
        "scrape_configs": [
            {"job_name": "rollstream", "static_configs": [{"targets": [f"{name}:{port}" for name in services]}]}
        ],
    }
    source = {"name": "Prometheus", "type": "prometheus", "url": "http://prometheus:9090", "isDefault": True}
    folder = "/tmp/provisioning"
    return {
        "prometheus": {
            "image": options.prometheus_image,
            "profiles": ["monitoring"],
            **_confined(),
            "entrypoint": ["/bin/sh", "-c"],
            "command": [
                'printf %s "$SCRAPE" >/tmp/prometheus.yml && exec /bin/prometheus --config.file=/tmp/prometheus.yml '
                "--storage.tsdb.path=/prometheus"
            ],
            "environment": {"SCRAPE": json.dumps(scrape)},
            "volumes": ["prometheus:/prometheus"],
            "tmpfs": ["/tmp"],
            "ports": [f"{_LOCAL}:9090:9090"],
            "restart": "unless-stopped",
        },
        "grafana": {
            "image": options.grafana_image,
            "profiles": ["monitoring"],
            **_confined(),
            "entrypoint": ["/bin/sh", "-c"],
            "command": [
                f"mkdir -p {folder}/datasources {folder}/dashboards {folder}/plugins {folder}/alerting && "
                f'printf %s "$SOURCES" >{folder}/datasources/prometheus.yaml && exec /run.sh'
            ],
            "environment": {
                "SOURCES": json.dumps({"apiVersion": 1, "datasources": [source]}),
                "GF_PATHS_PROVISIONING": folder,
                "GF_AUTH_ANONYMOUS_ENABLED": "true",
            },
            "volumes": ["grafana:/var/lib/grafana"],
            "tmpfs": ["/tmp", "/var/log/grafana:mode=1777"],
            "ports": [f"{_LOCAL}:3000:3000"],
            "restart": "unless-stopped",
            "depends_on": ["prometheus"],
        },
    }


# ------------------------------------------------------------------ text


def _head(config: RunConfig, options: ComposeOptions) -> str:
    source = options.config_file or "the defaults"
    flag = "".join(f" {word}" for word in _config_flag(options))
    return (
        f"# Run {config.run}, from {source}. Written by `rollstream deploy compose`: change the settings, and write it "
        "again.\n"
        "#   docker compose up --detach                      all roles (docker-compose if it has that name)\n"
        f"#   docker compose run --rm tools ledger{flag}    any other command of rollstream\n"
        "#   docker compose --profile monitoring up --detach with Prometheus and Grafana\n"
    )


def _escaped(value: Any) -> Any:
    """Return the values with `$` doubled, because compose reads a single `$` as the start of a variable."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value

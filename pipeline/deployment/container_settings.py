"""Settings of a run whose roles are containers: addresses, ports and directories that differ from a run on one machine.

The caller names the hosts; everything else comes from the run's own settings.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import tomli_w

from rollstream.pipeline.config import RunConfig, secret_references, secret_variables
from rollstream.pipeline.deployment.description import ENGINE, INFER, LEARN, counts
from rollstream.pipeline.settings import plain, variable_of
from rollstream.topics.errors import ConfigurationError

HOME = PurePosixPath("/var/lib/rollstream")
"""Directory of a run's files in a container. Roles write to no other directory except /tmp."""
SECRETS = PurePosixPath("/run/secrets")
KAFKA_PORT = 9092
INFERENCE_PORT = 8000
COORDINATOR_PORT = 8476
SERVICE_PORT = 8081
STARTING_S = 1800
"""Time until a container must be ready: a learner warms up, and a server waits for the learner and compiles."""
_EVERYWHERE = "0.0.0.0"
_DIRECTORIES = (
    "learner.checkpoint.directory",
    "learner.compile_cache",
    "tracker.directory",
    "fill.directory",
    "serving.directory",
    "learner.weights.url",
)
"""Settings of directories that roles write to."""
HostOf = Callable[[str, int], str]
"""Function from a role and the number of a process to the name of its host."""


@dataclass(frozen=True)
class ContainerSecrets:
    """Secrets of a container, by how it gets them."""

    variables: tuple[str, ...]
    """Names of the variables that are passed to the container."""
    files: Mapping[str, str]
    """Paths of the files that are mounted below SECRETS, by their names there."""


def is_secured(config: RunConfig) -> bool:
    """Whether the settings secure the connection to Kafka, which means that brokers already exist."""
    return config.kafka.client.get("security.protocol", "PLAINTEXT") != "PLAINTEXT"


def check_containers(config: RunConfig) -> None:
    """Raise ConfigurationError for a setting that names something on this machine that containers do not have."""
    if counts(config).get(ENGINE):
        raise ConfigurationError(
            "serving.python names a Python of this machine; run the engine in its own container, and set "
            "serving.urls to its address"
        )
    urls = {"worker.inference_urls": () if config.inference.replicas else config.worker.inference_urls}
    urls |= {"serving.urls": config.serving.urls, "labeling.judge.url": (config.labeling.judge.url,)}
    urls |= {"traces.endpoint": (config.traces.endpoint,), "kafka.registry.url": (config.kafka.registry.url,)}
    for key, values in urls.items():
        for url in values:
            if _is_loopback(urlsplit(url).hostname or ""):
                raise ConfigurationError(
                    f"{key} has {url}, which inside a container is the container itself; name the host that serves it"
                )
    service_port = config.service.port or SERVICE_PORT
    first = config.inference.port or INFERENCE_PORT
    served = {
        "inference.port": range(first, first + counts(config).get(INFER, 0)),
        "gateway.port": [config.gateway.port],
    }
    for key, ports in served.items():
        if service_port in ports:
            raise ConfigurationError(
                f"{key} makes a server listen on port {service_port}, at which every container answers probes and "
                "scrapers (service.port); set one of them to another port"
            )
    for key, (kind, name) in secret_references(config).items():
        # A file has another path in containers, which a variable tells them.
        if kind == "file" and not _has_variable(key):
            raise ConfigurationError(
                f"{key} is file:{name}, but no variable can tell containers where the file is, because the key is in a "
                "list or has upper-case letters; refer to an environment variable, env:NAME, in place of the file"
            )


def check_brokers(config: RunConfig) -> None:
    """Raise ConfigurationError if kafka.bootstrap_servers names this machine itself."""
    for address in config.kafka.bootstrap_servers.split(","):
        if _is_loopback(address.rpartition(":")[0].strip()):
            raise ConfigurationError(
                f"kafka.bootstrap_servers has {address.strip()}, which inside a container is the container itself; "
                "name the host of the brokers"
            )


def check_broker_secrets(config: RunConfig) -> None:
    """Raise ConfigurationError for a secret of brokers that run in containers: only local brokers resolve these."""
    for key in secret_references(config):
        if key.startswith("broker.properties."):
            raise ConfigurationError(
                f"{key} refers to a secret, which brokers in containers do not get; remove the key, or use brokers "
                "that you run yourself"
            )


def container_settings(config: RunConfig, host_of: HostOf, brokers: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings that containers of a run need in addition to the run's configuration file, by dotted key.

    `brokers` are the host names of brokers that also run in containers, if any.
    """
    settings: dict[str, Any] = {"run": config.run, "data_dir": str(HOME), **_directories(config)}
    settings["kafka.bootstrap_servers"] = config.kafka.bootstrap_servers
    if brokers:
        settings["kafka.bootstrap_servers"] = ",".join(f"{host}:{KAFKA_PORT}" for host in brokers)
    if len(brokers) > 1:
        settings["topics.replication_factor"] = replicas = min(3, len(brokers))
        settings["topics.min_insync_replicas"] = max(1, replicas - 1)
    settings |= {"service.host": _EVERYWHERE, "service.port": config.service.port or SERVICE_PORT}
    # A server waits for the learner's first version; without a supervisor it cannot know that the learner progresses.
    settings["supervisor.ready_timeout_s"] = max(float(STARTING_S), config.supervisor.ready_timeout_s)
    processes = counts(config)
    if servers := processes.get(INFER, 0):
        port = config.inference.port or INFERENCE_PORT
        settings |= {"inference.host": _EVERYWHERE, "inference.port": port}
        settings["worker.inference_urls"] = [f"http://{host_of(INFER, n)}:{port + n}/v1" for n in range(servers)]
    if config.gateway.port:
        settings["gateway.host"] = _EVERYWHERE
    if processes.get(LEARN, 0) > 1:
        settings["learner.coordinator"] = f"{host_of(LEARN, 0)}:{COORDINATOR_PORT}"
    return settings


def container_secrets(references: Mapping[str, tuple[str, str]]) -> tuple[ContainerSecrets, dict[str, str]]:
    """Return secrets as containers get them, and the settings by which containers find those in files.

    `references` has the kind (env or file) and name of each secret, by dotted key. References to variables need no
    setting, because a variable has the same name in containers.
    """
    variables, files, settings = [], {}, {}
    for key, (kind, name) in sorted(references.items()):
        if kind == "env":
            variables.append(name)
        else:
            mounted = key.replace(".", "-").replace("_", "-")
            files[mounted] = name
            settings[key] = f"file:{SECRETS / mounted}"
    return ContainerSecrets(tuple(variables), files), settings


def _has_variable(key: str) -> bool:
    """Whether a variable can set a key: variables express neither upper-case letters nor places in lists of options."""
    options = key.partition(".options.")[2]
    return key == key.lower() and not any(part.isdecimal() for part in options.split("."))


def variables_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of settings, given by dotted key."""
    return {variable_of(key): _text(value) for key, value in settings.items()}


def _text(value: Any) -> str:
    """Return the value as it is written in variables and flags: text unchanged, everything else as in TOML."""
    plainly = plain(value)
    if isinstance(plainly, str):
        return plainly
    return tomli_w.dumps({"value": plainly}, indent=0).removeprefix("value = ").replace("\n", "")


def _directories(config: RunConfig) -> dict[str, str]:
    """Return the configured directories as they are in a container, where directories below data_dir are below HOME."""
    moved = {}
    derived = str(config.run_dir / "checkpoints")
    for key in _DIRECTORIES:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if not value or value == derived or "://" in value:
            continue
        path = Path(value)
        if path.is_relative_to(config.data_dir):
            path = path.relative_to(config.data_dir)
        if path.is_absolute():
            raise ConfigurationError(
                f"{key} is {value}, but containers keep files only below data_dir; name a directory below "
                f"{config.data_dir}, or a relative one"
            )
        moved[key] = str(HOME / PurePosixPath(*path.parts))
    return moved


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]", "0.0.0.0") or host.startswith("127.")


_CONNECTION = ("kafka.client.", "kafka.registry.")


def secrets_of(config: RunConfig, used: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """Return the kind (env or file) and name of each secret of a process, by dotted key.

    Every process gets the secrets of its connection to Kafka; `used` are more keys or, with a dot at the end, sections.
    """
    sections = (*_CONNECTION, *(name for name in used if name.endswith(".")))
    references = secret_references(config).items()
    return {key: parts for key, parts in references if key in used or key.startswith(sections)}


def withheld_variables(config: RunConfig, used: Collection[str]) -> frozenset[str]:
    """Return the environment variables with secrets of the run that a process with these keys does not use."""
    given = {name for kind, name in secrets_of(config, used).values() if kind == "env"}
    return secret_variables(config) - given

"""Prepares a broker for each provider: writes its settings, formats its storage, and returns its command line.

It does not start the broker; `rollstream.infra.broker.broker_start` does.
"""

import base64
import logging
import os
import secrets
import subprocess
import uuid
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from rollstream.infra.broker.providers import DockerKafka, JavaKafka
from rollstream.infra.config import BrokerConfig, BrokerLayout, image_environment, render_properties, server_properties
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.logs import event
from rollstream.topics.secrets import is_secret, resolve

logger = logging.getLogger(__name__)

_IMAGE_DATA = "/var/lib/kafka/data"
_IMAGE_SETTINGS = "/opt/kafka/config"
_FORMAT_TIMEOUT_S = 180.0
_PULL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class LaunchCommand:
    """A command that runs a broker in the foreground. SIGTERM stops it gracefully.

    `kill_command`, if any, kills processes that SIGKILL would leave running.
    """

    command: tuple[str, ...]
    kill_command: tuple[str, ...] = ()


def prepare(
    provider: JavaKafka | DockerKafka, config: BrokerConfig, layout: BrokerLayout, *, port: int, controller_port: int
) -> LaunchCommand:
    """Write the settings, format the storage if it is new, and return the command that runs the broker.

    Raises ConfigurationError if a secret of the settings cannot be read.
    """
    layout.data.mkdir(parents=True, exist_ok=True)
    # Only the files that the broker reads get the secrets; they are in no command line, log or state file.
    given = {key: resolve(f"broker.properties.{key}", value) for key, value in config.properties.items()}
    config = replace(config, properties=given)
    if isinstance(provider, DockerKafka):
        return _docker(provider, config, layout, port=port, controller_port=controller_port)
    return _java(provider, config, layout, port=port, controller_port=controller_port)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, because it may hold secrets."""
    path.touch(0o600)
    path.chmod(0o600)  # an earlier file may be readable by everybody
    path.write_text(text)


def cluster_id(layout: BrokerLayout) -> str:
    """Return the id in the storage if it is formatted, else a new id."""
    if layout.formatted:
        written = (layout.data / "meta.properties").read_text().splitlines()
        return next(line.removeprefix("cluster.id=") for line in written if line.startswith("cluster.id="))
    return new_cluster_id()


def new_cluster_id() -> str:
    """Return 16 random bytes in URL-safe base64, not starting with a dash."""
    while True:
        name = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not name.startswith("-"):
            return name


def _java(
    kafka: JavaKafka, config: BrokerConfig, layout: BrokerLayout, *, port: int, controller_port: int
) -> LaunchCommand:
    data = str(layout.data.resolve())
    if "," in data:
        raise BrokerUnavailable(f"Kafka reads the comma in {data} as the end of a directory: give another --data")
    properties = server_properties(config, port=port, controller_port=controller_port, log_dir=data)
    _write_private(layout.properties, render_properties(properties))
    layout.log4j.write_text(files("rollstream.infra.broker").joinpath("log4j2.xml").read_text())
    # Serial collector and first-tier compiler: half the memory and a faster start; a laptop's broker is not CPU-bound.
    java = [
        str(kafka.java.executable),
        f"-Xms{config.heap_initial_mib}m",
        f"-Xmx{config.heap_max_mib}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={layout.log4j.resolve().as_uri()}",
        "-cp",
        kafka.jars.classpath,
    ]
    settings = str(layout.properties.resolve())
    if not layout.formatted:
        name = config.node.cluster_id if config.node else cluster_id(layout)
        formatting = [*java, "kafka.tools.StorageTool", "format", "-t", name, "-c", settings]
        _format(formatting, layout.log)
    return LaunchCommand((*java, "kafka.Kafka", settings))


def _format(command: list[str], log: Path) -> None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise BrokerUnavailable(
            f"formatting Kafka's storage took more than {_FORMAT_TIMEOUT_S:g} s: {log.parent}"
        ) from None
    with log.open("a") as stream:
        stream.write(answer.stdout + answer.stderr)
    if answer.returncode != 0:
        # The tool prints a Java stack trace: the line that names the exception has the message.
        lines = (answer.stderr + answer.stdout).strip().splitlines() or [f"exit {answer.returncode}"]
        message = next((line for line in lines if "Exception" in line or "Error" in line), lines[-1])
        raise BrokerUnavailable(f"Kafka's storage cannot be formatted: {message.strip()} (log: {log})")


def _docker(
    kafka: DockerKafka, config: BrokerConfig, layout: BrokerLayout, *, port: int, controller_port: int
) -> LaunchCommand:
    _ensure_image(kafka.docker, config.image)
    properties = server_properties(
        config, port=port, controller_port=controller_port, log_dir=_IMAGE_DATA, bind="0.0.0.0"
    )
    _write_private(layout.properties, render_properties(properties))
    secret = image_environment({key: value for key, value in properties.items() if is_secret(key)})
    _write_private(layout.image_secrets, "".join(f"{name}={value}\n" for name, value in secret.items()))
    # A new name each time, because --rm removes a killed container only after a while.
    name = f"rollstream-{port}-{secrets.token_hex(4)}"
    environment = {
        "CLUSTER_ID": cluster_id(layout),
        "KAFKA_HEAP_OPTS": f"-Xms{config.heap_initial_mib}m -Xmx{config.heap_max_mib}m",
        **image_environment({key: value for key, value in properties.items() if not is_secret(key)}),
    }
    run = [kafka.docker, "run", "--rm", "--name", name, "--publish", f"{config.host}:{port}:{port}"]
    # With our user id, the files in the data directory are ours. The image's own settings folder is then not writable,
    # so a folder of ours is mounted over it.
    layout.image_settings.mkdir(exist_ok=True)
    layout.image_settings.chmod(0o700)  # the image writes the secrets there, too
    run += ["--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{layout.data.resolve()}:{_IMAGE_DATA}"]
    run += ["--volume", f"{layout.image_settings.resolve()}:{_IMAGE_SETTINGS}", "--env", "LOG_DIR=/tmp/logs"]
    for key, value in environment.items():
        run += ["--env", f"{key}={value}"]
    run += ["--env-file", str(layout.image_secrets.resolve())]
    return LaunchCommand((*run, config.image), kill_command=(kafka.docker, "kill", name))


def _ensure_image(docker: str, image: str) -> None:
    """Pull the image unless it is present, so that a download does not count against the time to start."""
    if subprocess.run([docker, "image", "inspect", image], capture_output=True, timeout=30).returncode == 0:
        return
    event(logger, "docker_pull", image=image)
    try:
        pull = subprocess.run(
            [docker, "pull", "--quiet", image], capture_output=True, text=True, timeout=_PULL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BrokerUnavailable(f"{docker} pull {image} took more than {_PULL_TIMEOUT_S:g} s; run it by hand") from None
    if pull.returncode != 0:
        lines = pull.stderr.strip().splitlines() or [f"exit {pull.returncode}"]
        raise BrokerUnavailable(f"the image {image} cannot be pulled: {lines[-1]}; pull or load it, or install a JRE")

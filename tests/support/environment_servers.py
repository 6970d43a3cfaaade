"""`rollstream env serve` in a process of its own, which a test kills and starts again."""

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from rollstream.infra.broker.ports import free_port
from tests.support.role_server import role_environment


class ServedEnvironment:
    """An environment at a URL; use it as a context manager."""

    def __init__(self, folder: Path, *words: str, python: str | Path = sys.executable, before: tuple[str, ...] = ()):
        """`words` are those after `rollstream env serve`, which `python` runs in `folder`; `before` begins its command
        line."""
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self.processes: list[subprocess.Popen[bytes]] = []
        command = [str(python), "-P", "-m", "rollstream", "env", "serve", *words, "--port", str(port)]
        self._folder, self._command = folder, [*before, *command]

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        environment = role_environment(self._folder)
        self.processes.append(subprocess.Popen(self._command, cwd=self._folder, env=environment))

    def kill(self) -> None:
        """kill -9."""
        self.processes[-1].kill()
        self.processes[-1].wait(300)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()

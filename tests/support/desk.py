"""A user's desk: a folder with an environment of Python, commands in it, and how long each step took."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.waiting import eventually


@dataclass
class Desk:
    """A user's folder with an environment of Python, and how long each step took."""

    home: Path
    variables: dict[str, str]
    seconds: list[tuple[str, float]] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        return [str(self.home / "env" / "bin" / words[0]), *words[1:]]

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end; return what it prints."""
        done = subprocess.run(
            self.command(*words), cwd=self.home, env=self.variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr[-4000:]}"
        return done.stdout

    def rollstream(self, command: str, *words: str) -> str:
        return self.run("rollstream", *command.split(), "--config", "run.toml", *words)

    @contextmanager
    def started(self, name: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A process of its own group, whose output goes to a file of this name; nothing of it is left on leaving."""
        with (self.home / name).open("wb") as output:
            process = subprocess.Popen(
                self.command("rollstream", *words),
                cwd=self.home,
                env=self.variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(120)

    def printed(self, name: str, pattern: str, process: "subprocess.Popen[bytes]") -> str:
        """Wait for a line in the output of a started process; return its first group."""

        def match() -> "re.Match[str] | None":
            text = (self.home / name).read_text()
            assert process.poll() in (None, 0), text[-4000:]
            return re.search(pattern, text, re.MULTILINE)

        return eventually(match, 1500, f"{pattern} in {name}")[1]  # type: ignore[index]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds.append((name, time.monotonic() - began))
        print(f"{self.seconds[-1][1]:8.1f} s  {name}", flush=True)

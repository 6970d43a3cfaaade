"""Starts the other processes of a learner on this machine, for a command that all of its processes execute together."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rollstream.pipeline.config import RunConfig, to_toml
from rollstream.pipeline.run.plan import child_environment, is_of_this_machine, with_coordinator
from rollstream.topics.errors import RollstreamError

_LEAVE_TIMEOUT_S = 60.0


@contextmanager
def members(config: RunConfig, command: Sequence[str], process: int) -> Iterator[RunConfig]:
    """Execute a command as processes 1, 2, ... of a learner; yield the configuration of this `process`.

    Process 0 starts the others if all of them run on this machine. They do if `learner.coordinator` is empty or was
    chosen by `rollstream run`; a new coordinator then replaces it, because a learner may still use the old one. With
    any other coordinator, the user starts each process. The log of a member that failed goes to stderr if this process
    fails, too. No member outlives the block; if this process is killed, the members lose their coordinator and end.
    """
    if config.learner.processes == 1 or process > 0 or not is_of_this_machine(config.learner.coordinator):
        yield config
        return
    config = with_coordinator(replace(config, learner=replace(config.learner, coordinator="")))
    with tempfile.TemporaryDirectory(prefix="rollstream-") as folder:
        settings = Path(folder) / "run.toml"
        settings.write_text(to_toml(config), encoding="utf-8")
        started = [
            _start(number, settings, command, child_environment(config))
            for number in range(1, config.learner.processes)
        ]
        try:
            yield config
            for member in started:
                member.wait(_LEAVE_TIMEOUT_S)
        except RollstreamError:
            for number, member in enumerate(started, 1):
                if member.poll() not in (None, 0):
                    sys.stderr.write(_log(settings, number).read_text(encoding="utf-8", errors="replace"))
            raise
        finally:
            for member in started:
                member.kill()
                member.wait()


def _start(number: int, settings: Path, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    name, *flags = command
    words = [sys.executable, "-P", "-m", "rollstream", name, "--config", str(settings), *flags]
    with _log(settings, number).open("wb") as log:
        return subprocess.Popen(
            [*words, "--process", str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
        )


def _log(settings: Path, number: int) -> Path:
    return settings.with_name(f"{number}.log")

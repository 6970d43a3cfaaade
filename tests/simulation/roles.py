"""Roles of `rollstream` as processes of the model: the command line itself, on actors, with a log and signals."""

import io
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from rollstream.pipeline.audit import verification
from rollstream.pipeline.command_line import cli
from rollstream.pipeline.process import role_process
from rollstream.pipeline.tools import replay, rescore
from rollstream.topics import logs
from tests.simulation.cluster import Cluster
from tests.simulation.installation import World
from tests.simulation.scheduler import Crashed, Process

MODEL = "model:1"
"""Bootstrap servers of the model."""
_EVER_S = 1e9
_worlds: list[World] = []


class Output(io.TextIOBase):
    """A file that is not open between two lines, because nobody closes what a killed process had open."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.touch()

    def write(self, text: str) -> int:
        with self._file.open("a") as out:
            return out.write(text)


class Console:
    """What a process has for itself and the interpreter has once: output, handlers of logs, and its phase."""

    def __init__(self, out: TextIO) -> None:
        handler = logging.StreamHandler(out)
        handler.setFormatter(logs.JsonFormatter())
        self._other: tuple[Any, ...] = (out, out, [handler], logging.WARNING, logging.INFO, "starting")

    def swap(self) -> None:
        """Exchange what is in place: called before the process goes on, and again when it pauses."""
        ours, root = logging.getLogger("rollstream"), logging.root
        mine, phase = self._other, role_process.PHASE
        self._other = (sys.stdout, sys.stderr, root.handlers[:], root.level, ours.level, phase.name)
        sys.stdout, sys.stderr, root.handlers[:], level, our_level, phase.name = mine
        root.setLevel(level)
        ours.setLevel(our_level)


class ModelledRole(subprocess.Popen[bytes]):
    """A role on actors: all of Popen's interface that tests use of a role."""

    def __init__(self, world: World, command: Sequence[str], log: Path) -> None:
        self.args, self.returncode, self.pid = command, None, 0
        self.stdin = self.stdout = self.stderr = None
        self._child_created = False  # Popen's destructor has nothing to wait for
        self.handlers: dict[int, Callable[[int, None], object]] = {}
        self._world = world
        self.process = Process(" ".join(command[4:6]), console=Console(Output(log)))
        self.process.role = self
        world.scheduler.spawn(self.process, "main", lambda: self._run(command[4:]))

    def _run(self, words: Sequence[str]) -> None:
        try:
            code = cli.main(words)
        except Crashed:
            raise
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        self._end(code)

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self.process.alive = False

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._world.scheduler.wait(lambda: self.returncode is not None, timeout or _EVER_S):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGSTOP:
            self.process.stopped_until_s = _EVER_S * 10
        elif sig == signal.SIGCONT:
            self.process.stopped_until_s = 0.0
        elif sig != signal.SIGKILL and sig in self.handlers:
            self.handlers[sig](sig, None)
        else:
            self._end(-sig)


@contextmanager
def modelled_roles(world: World) -> Iterator[None]:
    """Run the block with `start` in place of processes."""

    def handle(number: int, handler: Any) -> Any:
        if (role := _role(world)) is None:
            return real_signal(number, handler)
        role.handlers[number] = handler
        return None

    def kill(pid: int, number: int) -> None:
        role = _role(world)
        if role is not None and pid == os.getpid():
            role.send_signal(number)
        else:
            real_kill(pid, number)

    def setup(level: str = "info") -> None:
        if _role(world) is None:
            real_setup(level)
        else:
            logging.getLogger("rollstream").setLevel(level.upper())

    real_signal, real_kill, real_setup, disabled = signal.signal, os.kill, logs.setup, logging.root.manager.disable
    logging.disable(logging.NOTSET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", handle)
        patch.setattr(os, "kill", kill)
        patch.setattr(logs, "setup", setup)
        for module in (verification, replay, rescore):  # only this process has the model
            patch.setattr(module, "spread", lambda work, jobs, _processes: map(work, jobs))
        _worlds.append(world)
        try:
            yield
        finally:
            _worlds.remove(world)
            logging.disable(disabled)


def _role(world: World) -> ModelledRole | None:
    return world.scheduler.process.role if world.scheduler.process else None


def start(command: Sequence[str], log: Path) -> ModelledRole:
    """Start `[python, -P, -m, rollstream, *words]` with its output in a file."""
    return ModelledRole(_worlds[-1], command, log)


def cluster() -> Cluster:
    """The model's cluster, for what no client can do."""
    return _worlds[-1].cluster

"""Ctrl-C at random moments: a command must end in time, with one line, and leave no process behind.

Tests share their machine, so time is scaled by the processor time that a purely computing thread gets meanwhile.
"""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.waiting import eventually

LIMIT_S = 2.0
_ENDING_S = 0.1
"""Fair time in which a command that was done when it was interrupted ends by itself."""
LINE = "rollstream: interrupted"


class FairTime:
    """Seconds as on an idle machine: the clock's, divided by how much slower than alone a thread computes."""

    seconds: float = 0.0
    """Between the begin and the end of the context."""

    def __enter__(self) -> "FairTime":
        self._over = threading.Event()
        self._computing = threading.Thread(target=self._compute, daemon=True)
        self._computing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._computing.join()

    def _compute(self) -> None:
        wall, processor = time.perf_counter(), time.thread_time()
        while not self._over.is_set():
            sum(range(1000))
        slower = (time.perf_counter() - wall) / max(time.thread_time() - processor, 1e-3)
        self.seconds = (time.perf_counter() - wall) / max(slower, 1.0)


@dataclass(frozen=True)
class Interruption:
    """How a command ended."""

    after_s: float
    """When it was interrupted, after it had begun to listen."""
    seconds: float
    """From the signal to its end, in fair time."""
    code: int
    errors: list[str]
    """Lines it wrote to standard error, without its log."""


def await_listening(process: subprocess.Popen[bytes]) -> None:
    """Wait until a command handles Ctrl-C, or has ended: the thread that listens is the first after the main one."""
    seen = psutil.Process(process.pid)
    eventually(lambda: process.poll() is not None or seen.num_threads() > 1, 60, "the command listens", every_s=0.001)


def interrupt(command: Sequence[str], log: Path, after_s: float, **environment: str) -> Interruption | None:
    """Start a command, interrupt it, and wait until it and all it started have ended; None if it ended before.

    A command that is done leaves Ctrl-C to the system, which ends it without a word, or ends by itself before that.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, cwd=log.parent, env={**os.environ, **environment}
        )
    try:
        await_listening(process)
        try:
            process.wait(after_s)
            return None
        except subprocess.TimeoutExpired:
            family = psutil.Process(process.pid).children(recursive=True)
        with FairTime() as passed:
            # `wait` looks every 50 ms, so the command may have ended since.
            if process.poll() is not None:
                return None
            process.send_signal(signal.SIGINT)
            code = process.wait(300)
        eventually(lambda: not [p for p in family if _runs(p)], 60, f"the end of {family}")
    finally:
        process.kill()
        process.wait()
    if code == -signal.SIGINT or (code == 0 and passed.seconds < _ENDING_S):
        return None
    lines = log.read_text(errors="replace").splitlines()
    return Interruption(after_s, passed.seconds, code, [line for line in lines if not line.startswith("{")])


def assert_ends_at_once(command: Sequence[str], directory: Path, moments: int, most_s: float, seed: int) -> None:
    """Interrupt a command at so many moments of its first `most_s` seconds, drawn from `seed`."""
    draw = random.Random(seed)
    ended = []
    while len(ended) < moments:
        outcome = interrupt(command, directory / "interrupted.log", draw.uniform(0.0, most_s))
        if outcome is None:
            most_s *= 0.9  # The command ended before it was interrupted.
            continue
        what = f"{' '.join(command[3:])}, seed {seed}: {outcome}"
        assert outcome.code == 130, what
        assert outcome.errors == [LINE], what
        assert outcome.seconds < LIMIT_S, what
        ended.append(outcome.seconds)
    print(f"{' '.join(command[3:6])}, seed {seed}: ended after {', '.join(f'{s:.2f}' for s in ended)} s")


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

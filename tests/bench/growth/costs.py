"""Costs of work by several processes: wall time, and processor time of this process and its descendants, which include
the broker.
"""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from tests.bench.growth.series import Series, collected
from tests.support.runs import RealRun
from tests.support.waiting import eventually

_LOOK_S = 0.2
"""Time between two checks of a condition; the processor time of each check is part of the measured cost."""


class Costs:
    """Costs of named work at increasing sizes; processor time has bounds, wall time is only shown."""

    def __init__(self, over: str) -> None:
        """`over` names the thing that the sizes count."""
        self._over = over
        self._bounds: dict[str, float] = {}
        self._processor: dict[str, list[tuple[float, float]]] = {}
        self._wall: dict[str, list[tuple[float, float]]] = {}

    def measure(self, name: str, size: float, bound: float, work: Callable[[], object]) -> None:
        """Do the work; record and print its costs. `bound` is the largest slope that its processor time may have."""
        before, began = processor_s(), time.perf_counter()
        work()
        wall_s, spent_s = time.perf_counter() - began, processor_s() - before
        print(f"{name} at {size:g} {self._over}: {spent_s:.3g} CPU s, {wall_s:.3g} s", file=sys.stderr, flush=True)
        self._bounds[name] = bound
        self._processor.setdefault(name, []).append((size, spent_s))
        self._wall.setdefault(name, []).append((size, wall_s))

    def series(self) -> list[Series]:
        """Return a series of processor time and one of wall time for each name."""
        return [
            series
            for name, bound in self._bounds.items()
            for series in (
                collected(name, self._over, "CPU s", bound, self._processor[name]),
                collected(name, self._over, "s", None, self._wall[name]),
            )
        ]


def processor_s() -> float:
    """Return the processor time of this process and its descendants, including descendants that have ended."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in (me, *me.children(recursive=True)))


def wait(run: RealRun, reached: Callable[[], bool], what: str) -> None:
    """Wait until `reached` returns true. Raises AssertionError, with the end of its log, if a process has ended."""
    eventually(lambda: _ended(run) or reached(), 0, what, every_s=_LOOK_S)
    for process in _ended(run):
        raise AssertionError(f"a process ended before {what}: {run.log_of(process)[-2000:]}")


def _ended(run: RealRun) -> list[subprocess.Popen[bytes]]:
    return [process for process in run.processes if process.poll() is not None]

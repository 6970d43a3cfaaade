"""Costs of work that several processes do: processor time of this one and all below it, a broker too, and wall time."""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from tests.bench.growth.series import Series, collected
from tests.support.runs import RealRun
from tests.support.waiting import eventually

_LOOK_S = 0.2
"""Time between looks: each costs processor time that counts."""


class Costs:
    """Costs of named work at sizes that rise; processor time is held to bounds, wall time is shown."""

    def __init__(self, over: str) -> None:
        """`over` is the thing that sizes count."""
        self._over = over
        self._bounds: dict[str, float] = {}
        self._processor: dict[str, list[tuple[float, float]]] = {}
        self._wall: dict[str, list[tuple[float, float]]] = {}

    def measure(self, name: str, size: float, bound: float, work: Callable[[], object]) -> None:
        """Do the work, and note and print what it costs; `bound` is the largest slope of its processor time."""
        before, began = processor_s(), time.perf_counter()
        work()
        wall_s, spent_s = time.perf_counter() - began, processor_s() - before
        print(f"{name} at {size:g} {self._over}: {spent_s:.3g} CPU s, {wall_s:.3g} s", file=sys.stderr, flush=True)
        self._bounds[name] = bound
        self._processor.setdefault(name, []).append((size, spent_s))
        self._wall.setdefault(name, []).append((size, wall_s))

    def series(self) -> list[Series]:
        """A series of processor time and one of wall time for each name."""
        return [
            series
            for name, bound in self._bounds.items()
            for series in (
                collected(name, self._over, "CPU s", bound, self._processor[name]),
                collected(name, self._over, "s", None, self._wall[name]),
            )
        ]


def processor_s() -> float:
    """Processor time of this process and of all below it, those that have ended included."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in (me, *me.children(recursive=True)))


def wait(run: RealRun, reached: Callable[[], bool], what: str) -> None:
    """Wait until something is reached. Raises AssertionError with the log of a process of the run that has ended."""
    eventually(lambda: _ended(run) or reached(), 0, what, every_s=_LOOK_S)
    for process in _ended(run):
        raise AssertionError(f"a process ended before {what}: {run.log_of(process)[-2000:]}")


def _ended(run: RealRun) -> list[subprocess.Popen[bytes]]:
    return [process for process in run.processes if process.poll() is not None]

"""Heartbeats of the loops of this process: a loop reports each iteration, and a loop that stops reporting is stuck.

There is one object per process, as with logs, and every loop calls its `beat`. A beat costs one reading of the clock.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_BEAT_S = 1.0
START = "start"
"""Stands for the main loop until the first loop beats."""


class Heartbeats:
    """Time of the newest beat of each loop. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: dict[str, float] = {START: clock()}

    def beat(self, loop: str = START) -> None:
        """Note an iteration of a loop. Beats of the start count only until the first loop beats."""
        if loop != START:
            self._newest[loop] = self._clock()
            self._newest.pop(START, None)
        elif START in self._newest:
            self._newest[START] = self._clock()

    @contextmanager
    def during(self, loop: str) -> Iterator[None]:
        """Return a context for a blocking call that may take long, with beats of a loop meanwhile; with beats of the
        start if the loop has not begun."""
        over = threading.Event()

        def repeat() -> None:
            while not over.wait(_BEAT_S):
                self.beat(loop if loop in self._newest else START)

        thread = threading.Thread(target=repeat, name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @property
    def ages(self) -> Mapping[str, float]:
        """Seconds since the newest beat of each loop."""
        now = self._clock()
        return {loop: max(0.0, now - newest) for loop, newest in list(self._newest.items())}

    def stuck(self, stall_s: float) -> str:
        """Name the loops without progress for longer than `stall_s`, each with its time; empty if there are none."""
        late = {loop: age for loop, age in self.ages.items() if age > stall_s}
        return ", ".join(f"{loop}: no progress for {age:.0f} s" for loop, age in sorted(late.items()))


HEARTBEATS = Heartbeats()
"""The heartbeats of this process."""
beat = HEARTBEATS.beat
beating_during = HEARTBEATS.during


async def beating(loop: str, work: Awaitable[T]) -> T:
    """Return the result of work that may take long and has its own time limits, with beats of `loop` meanwhile."""
    working = asyncio.ensure_future(work)
    try:
        while not working.done():
            beat(loop)
            await asyncio.wait({working}, timeout=_BEAT_S)
    except asyncio.CancelledError:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        raise
    return working.result()

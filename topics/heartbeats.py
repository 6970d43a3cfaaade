"""Heartbeats of the loops of this process: a loop says that it has turned, and one that stops turning is stuck.

One object a process, as with logs: a loop calls `beat`, whoever started it. A beat costs a look at the clock.
"""

import time
from collections.abc import Callable, Mapping

START = "start"
"""Stands for the main loop until the first loop beats."""


class Heartbeats:
    """The newest beat of each loop. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: dict[str, float] = {START: clock()}

    def beat(self, loop: str = START) -> None:
        """Note that a loop has turned. Progress of the start counts until the first loop has turned."""
        if loop != START:
            self._newest[loop] = self._clock()
            self._newest.pop(START, None)
        elif START in self._newest:
            self._newest[START] = self._clock()

    @property
    def ages(self) -> Mapping[str, float]:
        """Seconds since the newest beat of each loop."""
        now = self._clock()
        return {loop: max(0.0, now - newest) for loop, newest in list(self._newest.items())}

    def stuck(self, stall_s: float) -> str:
        """Return what has made no progress for longer than `stall_s` and for how long; empty if nothing has."""
        late = {loop: age for loop, age in self.ages.items() if age > stall_s}
        return ", ".join(f"{loop}: no progress for {age:.0f} s" for loop, age in sorted(late.items()))


HEARTBEATS = Heartbeats()
"""Those of this process."""
beat = HEARTBEATS.beat

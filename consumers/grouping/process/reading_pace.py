"""Limit on the number of records per second that a grouping process reads."""

import math
import time
from collections.abc import Callable


class ReadingPace:
    """Says how many records the next poll may return, and waits until at least one may be read."""

    def __init__(
        self,
        records_per_s: float,
        turn_s: float,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """A `records_per_s` of 0 sets no limit. Unused allowance accumulates for at most `turn_s`, so that no burst
        follows idle time."""
        self._rate, self._clock, self._sleep = records_per_s, clock or time.monotonic, sleep or time.sleep
        self._room = max(1.0, records_per_s * turn_s)
        self._left = self._room
        self._at = self._clock()

    def most(self, limit: int) -> int:
        """Return how many records may be read now, at least 1 and at most `limit`.

        Waits until half of a turn's records may be read, because many polls of a few records each would cost more time.
        """
        if not self._rate:
            return limit
        self._refill()
        if (lacking := max(1.0, self._room / 2) - self._left) > 0:
            self._sleep(lacking / self._rate)
            self._refill()
        return max(1, min(limit, math.floor(self._left)))

    def passed(self, records: int) -> None:
        """Count records that were read."""
        self._left -= records

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._room, self._left + (now - self._at) * self._rate)
        self._at = now

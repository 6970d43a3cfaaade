"""Estimate of the broker's clock, which determines stream time: grouping continues if the host's clock is set back.

The host's clock is read once. After that, a monotonic clock advances the estimate, and append times correct it: a
record that was read was appended earlier, and the append time of a record just written is the present time.
"""

import time
from collections.abc import Callable


class BrokerClock:
    """Estimate of the broker's clock in milliseconds."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead_ms = int(wall() * 1000) - self._elapsed_ms

    @property
    def now_ms(self) -> int:
        """Present time. It only goes back after a response from the broker, never because the host's clock was set."""
        return self._elapsed_ms + self._ahead_ms

    def passed(self, append_ms: int) -> None:
        """Note that a record with this append time was read: the present time is not earlier."""
        self._ahead_ms = max(self._ahead_ms, append_ms - self._elapsed_ms)

    def told(self, append_ms: int) -> None:
        """Note that the broker appended a record just now with this time."""
        self._ahead_ms = append_ms - self._elapsed_ms

    @property
    def _elapsed_ms(self) -> int:
        return int(self._monotonic() * 1000)

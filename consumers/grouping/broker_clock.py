"""What time it is for the broker, whose append times are the stream's: a host clock that is set back stops nothing.

The host's clock is asked once. From then on a monotonic clock counts, corrected by append times: a record that was read
was appended before, and the broker's answer to a record just written is the time itself.
"""

import time
from collections.abc import Callable


class BrokerClock:
    """Milliseconds of the broker's clock, as far as it is known here."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead_ms = int(wall() * 1000) - self._elapsed_ms

    @property
    def now_ms(self) -> int:
        """The time now. It goes back when the broker said so, and never because the host's clock was set."""
        return self._elapsed_ms + self._ahead_ms

    def passed(self, append_ms: int) -> None:
        """A record with this append time was read: it is that late at least."""
        self._ahead_ms = max(self._ahead_ms, append_ms - self._elapsed_ms)

    def told(self, append_ms: int) -> None:
        """The broker appended a record just now, and gave it this time."""
        self._ahead_ms = append_ms - self._elapsed_ms

    @property
    def _elapsed_ms(self) -> int:
        return int(self._monotonic() * 1000)

"""The pace of transactions: one that carries a batch begins as soon as the one before has ended, others wait a while.

A learner waits for batches, and nobody for the rest; so few transactions are made, and none that is waited for is late.
"""

import time
from collections.abc import Callable

GATHER_S = 0.005
"""How long a poll waits for further records after the first: a turn for each single record would cost too much."""


class CommitPace:
    """Says when the next transaction is due, and how long the next poll may wait for its first record."""

    def __init__(self, interval_s: float, most_records: int, clock: Callable[[], float] | None = None) -> None:
        """Effects without a batch wait up to `interval_s`; `most_records` begin a transaction, whatever they led to."""
        self._interval_s, self._most, self._clock = interval_s, most_records, clock or time.monotonic
        self._records = 0
        self._since_s: float | None = None
        self._begun_s = self._clock()

    def passed(self, records: int) -> None:
        """Count records that were read, and are part of no transaction yet."""
        if records:
            self._records += records
            self._since_s = self._clock() if self._since_s is None else self._since_s

    def is_due(self, *, batches: bool, free: bool) -> bool:
        """Whether to begin a transaction, given that there is something to commit: `batches` tells whether that is a
        batch, `free` whether the transaction before has ended. With `most_records` read it is due even then."""
        if self._since_s is None:
            self._since_s = self._clock()
        if self._records >= self._most:
            return True
        return free and (batches or self._clock() - self._since_s >= self._interval_s)

    def wait_s(self, *, batches: bool, free: bool) -> float:
        """How long a poll may wait for its first record; `batches` tells whether a batch waits for its transaction.

        While a transaction is in progress, a quarter of the time that it has taken: so the next one begins soon after
        the end of a fast one, and one that hangs costs few polls.
        """
        now_s = self._clock()
        if self._since_s is None:
            wait_s = self._interval_s
        elif free:
            wait_s = 0.0 if batches else self._since_s + self._interval_s - now_s
        else:
            wait_s = (now_s - self._begun_s) / 4
        return min(self._interval_s, max(GATHER_S, wait_s))

    def begun(self) -> None:
        """Note that a transaction has begun with all that was read."""
        self._records, self._since_s, self._begun_s = 0, None, self._clock()

"""Pace of transactions: with a batch, a transaction begins as soon as the previous one ends; without a batch, it waits.

Learners wait for batches, but nobody waits for other effects. This keeps the number of transactions small without
delaying batches.
"""

import time
from collections.abc import Callable

GATHER_S = 0.005
"""How long a poll waits for further records after the first, because one poll per record would cost too much."""


class CommitPace:
    """Says when the next transaction is due, and how long the next poll may wait for its first record."""

    def __init__(self, interval_s: float, most_records: int, clock: Callable[[], float] | None = None) -> None:
        """Effects without a batch wait up to `interval_s`; after `most_records`, a transaction begins in any case."""
        self._interval_s, self._most, self._clock = interval_s, most_records, clock or time.monotonic
        self._records = 0
        self._since_s: float | None = None
        self._begun_s = self._clock()

    def passed(self, records: int) -> None:
        """Count records that were read and are not yet part of a transaction."""
        if records:
            self._records += records
            self._since_s = self._clock() if self._since_s is None else self._since_s

    def is_due(self, *, batches: bool, free: bool) -> bool:
        """Whether to begin a transaction, given that there is something to commit.

        `batches` says whether that includes a batch, and `free` whether the previous transaction has ended. Once
        `most_records` have been read, a transaction is due even if the previous one has not ended.
        """
        if self._since_s is None:
            self._since_s = self._clock()
        if self._records >= self._most:
            return True
        return free and (batches or self._clock() - self._since_s >= self._interval_s)

    def wait_s(self, *, batches: bool, free: bool) -> float:
        """How long a poll may wait for its first record; `batches` says whether a batch waits for its transaction.

        While a transaction is in progress, the wait is a quarter of the time that it has taken so far. The next
        transaction then begins soon after a fast one ends, and a transaction that hangs costs few polls.
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
        """Note that a transaction has begun with all records read so far."""
        self._records, self._since_s, self._begun_s = 0, None, self._clock()

"""Times a loop of transactions from inside: from the end of the first one to the end of the one that completes it.

The first transaction is left out: it pays for connections, imports and first use.
"""

import threading

from tests.bench.measure import Stopwatch, Timing


class TransactionTimer:
    """Counts records of committed transactions; sets `done` once there are `wanted` of them."""

    def __init__(self, wanted: int, done: threading.Event) -> None:
        self._wanted = wanted
        self._done = done
        self._total = 0
        self._first = 0
        self._watch: Stopwatch | None = None
        self._timing: Timing | None = None

    def committed(self, records: int) -> None:
        """Note a committed transaction that read `records` records."""
        self._total += records
        if self._watch is None:
            self._first, self._watch = records, Stopwatch()
        elif self._total >= self._wanted and self._timing is None:
            self._timing = self._watch.timing(self._total - self._first)
        if self._total >= self._wanted:
            self._done.set()

    @property
    def timing(self) -> Timing:
        """Return the measurement. Raises RuntimeError when there was only one transaction, which measures nothing."""
        if self._timing is None:
            raise RuntimeError("everything fitted in one transaction: measure with more rollouts or a smaller poll")
        return self._timing

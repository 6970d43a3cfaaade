"""Keeps the ledger of a run: a thread proves it again when the run has changed; requests get the newest result.

Ranges of offsets by fate come from it, too. Each record that grouping has read has one fate or is in flight.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollstream.pipeline.audit.ledger import LiveLedger
from rollstream.pipeline.index.fates import IN_FLIGHT, UNREAD
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED
from rollstream.topics.records.journal import OffsetRange

_REST = 5
"""Least pause before a ledger is proven again, as a multiple of the time that the last proof took."""
LEAST_REST_S = 5.0


class LedgerKeeper:
    """The newest ledger of a run."""

    def __init__(self, prove: Callable[[], dict[str, Any]], revision: Callable[[], object]) -> None:
        """`prove` returns a ledger; `revision` returns a different value whenever the run has changed."""
        self._prove, self._revision = prove, revision
        self._book: dict[str, Any] | None = None
        self._at_ms: int | None = None
        self._seconds: float | None = None
        self._problem = ""
        self._proven: object = None
        self._rest_until = 0.0
        self._running = False

    def answer(self) -> dict[str, Any]:
        """Return the newest ledger (None before the first proof) and its time; start the next proof if one is due.

        `running` is true while a proof runs or waits for its pause, so that a later answer will differ. After a failed
        proof, only a request starts the next one.
        """
        # A transaction that hides records may be aborted, which changes nothing that `revision` shows.
        undecided = bool(self._book and self._book.get("undecided"))
        due = undecided or self._revision() != self._proven
        if due and not self._running and time.monotonic() >= self._rest_until:
            self._running = True
            threading.Thread(target=self._work, name="ledger", daemon=True).start()
        return {
            "ledger": self._book,
            "at_ms": self._at_ms,
            "seconds": self._seconds,
            "running": self._running or (due and not self._problem),
            "problem": self._problem or None,
        }

    def _work(self) -> None:
        began, revision = time.monotonic(), self._revision()
        try:
            self._book, self._problem = self._prove(), ""
            self._proven, self._at_ms = revision, int(time.time() * 1000)
        except (RollstreamError, OSError, sqlite3.Error) as error:
            self._problem = str(error)
        finally:
            seconds = time.monotonic() - began
            self._seconds = round(seconds, 3)
            self._rest_until = time.monotonic() + max(LEAST_REST_S, _REST * seconds)
            self._running = False


FATES = (IN_FLIGHT, UNREAD, BATCHED, DROPPED, DEAD_LETTERED, CONTROL)


def place_of(name: str) -> tuple[int, int]:
    """Return the partition and the last offset of a range, which order ranges also when their offsets have other fates
    by now. Raises ConfigurationError if `name` is no range."""
    named = OffsetRange.parse(name)
    return named.partition, named.last


def ranges_of(
    books: LiveLedger, bounds: Mapping[int, tuple[int, int]], fate: str, reason: str | None = None
) -> list[OffsetRange]:
    """Return, in order, the ranges of offsets that have a fate, or were dropped for a reason, as of the ledger's last
    poll. `bounds` has the first offset and the end of each partition of `rollouts`."""
    if fate == UNREAD:
        begins = {partition: max(books.positions.get(partition, low), low) for partition, (low, _) in bounds.items()}
        ranges = {partition: [(begins[partition], end - 1)] for partition, (_, end) in bounds.items()}
    else:
        ranges = books.offsets(fate, reason)
    return [
        OffsetRange(partition, first, last)
        for partition in sorted(bounds)
        for first, last in ranges.get(partition, ())
        if first <= last
    ]

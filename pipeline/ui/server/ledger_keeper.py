"""Keeps the ledger of a run: a thread proves it again when the run has changed; requests get the newest result."""

import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

from rollstream.topics.errors import RollstreamError

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

"""Waiting in tests: for a condition with a deadline, never for a time.

A wait that fails names what it waited for and what it saw last.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LEAST_S = 60.0
"""How long every wait is at least: a shorter one saves time only where a test fails."""


class Patience:
    """Seconds that pass without progress, of a machine that has nothing else to do.

    Where more processes want a core than there are, a second counts for the part of it that each of them gets.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = max(seconds, LEAST_S)
        self._seen: object = None
        self._then = time.monotonic()

    def ended(self, seen: object) -> bool:
        """Whether the time is up, which begins anew when `seen` has changed."""
        now = time.monotonic()
        self._left -= (now - self._then) / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        self._then = now
        if seen != self._seen:
            self._seen, self._left = seen, self._seconds
        return self._left <= 0


def eventually(check: Callable[[], T], timeout_s: float, what: str, *, every_s: float = 0.02) -> T:
    """Call `check` until it returns something truthy, and return that.

    Exceptions of `check` count as "not yet". After `timeout_s` seconds in which `check` gave the same, but not before
    `LEAST_S`, an AssertionError names `what` and the last value or exception seen. On a busy machine both are longer.
    """
    patience = Patience(timeout_s)
    while True:
        failure: Exception | None = None
        try:
            value = check()
            if value:
                return value
            last = f"last value: {value!r}"
        except Exception as error:
            failure = error
            last = f"last error: {error!r}"
        if patience.ended(last):
            raise AssertionError(f"not within {timeout_s:g} s without progress: {what} ({last})") from failure
        time.sleep(every_s)

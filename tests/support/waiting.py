"""Waiting in tests: for a condition with a deadline, never for a time.

A wait that fails names what it waited for and what it saw last.
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LEAST_S = 600.0
"""How long every wait is at least: a shorter one saves time only where a test fails, and fails on a busy machine."""


def eventually(check: Callable[[], T], timeout_s: float, what: str, *, every_s: float = 0.02) -> T:
    """Call `check` until it returns something truthy, and return that.

    Exceptions of `check` count as "not yet". After `timeout_s` seconds, but not before `LEAST_S`, an AssertionError
    names `what` and the last value or exception seen.
    """
    timeout_s = max(timeout_s, LEAST_S)
    deadline = time.monotonic() + timeout_s
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
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what} ({last})") from failure
        time.sleep(every_s)

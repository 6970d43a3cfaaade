"""Calls that may never come back: what they return or raise comes through, and nobody waits for them for ever."""

import threading

import pytest

from consumers.grouping.bounded import BoundedCalls, Stalled


def test_what_a_call_returns_or_raises_comes_through() -> None:
    calls = BoundedCalls()
    assert calls.run(lambda: 3, "three", 5.0) == 3

    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        calls.run(fail, "fail", 5.0)
    assert calls.run(lambda: 4, "four", 5.0) == 4
    calls.close()


def test_a_call_that_does_not_come_back_is_left() -> None:
    calls, release, left = BoundedCalls(), threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(30)
        left.set()

    with pytest.raises(Stalled, match=r"hang did not come back within 0\.05 s"):
        calls.run(hang, "hang", 0.05)
    assert not left.is_set()
    calls.close()
    release.set()
    assert left.wait(30)

"""Calls that may never return: their results and errors come through, and no caller waits for them forever."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest

from rollstream.topics.kafka.bounded_calls import BoundedCalls, Stalled
from tests.support.waiting import eventually

STOPPED = """
import sys
from rollstream.topics.kafka.bounded_calls import BoundedCalls
calls = BoundedCalls()

def wait():
    print("waiting", flush=True)
    return sys.stdin.readline()

print(calls.run(wait, "wait", 1.0), flush=True)
"""


def test_what_a_call_returns_or_raises_comes_through() -> None:
    calls = BoundedCalls()
    assert calls.run(lambda: 3, "three", 5.0) == 3

    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        calls.run(fail, "fail", 5.0)
    assert calls.run(lambda: 4, "four", 5.0) == 4
    calls.close()


class EndsAfterWait(Future[Any]):
    """The result of a call that ends right after a wait for it has given up."""

    def result(self, timeout: float | None = None) -> Any:
        if self.done():
            return super().result(timeout)
        self.set_result("ended")
        raise FutureTimeoutError


def test_a_call_that_ends_right_after_a_wait_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = BoundedCalls()
    monkeypatch.setattr(calls, "submit", lambda _call: EndsAfterWait())
    assert calls.run(lambda: "ended", "slow", 5.0) == "ended"
    calls.close()


def test_a_call_that_does_not_come_back_is_left() -> None:
    calls, release, left = BoundedCalls(), threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(300)
        left.set()

    with pytest.raises(Stalled, match=r"hang did not return within 0\.05 s"):
        calls.run(hang, "hang", 0.05)
    assert not left.is_set()
    calls.close()
    release.set()
    assert left.wait(300)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        eventually(lambda: time.monotonic() - since > 1.5, 60, "it was stopped for longer than it waits")
        process.stdin.write("came back\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().startswith("came back")
    assert process.returncode == 0

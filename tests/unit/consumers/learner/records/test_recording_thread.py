"""The thread that puts steps on record: one at a time and in order, and no error of it is lost."""

import threading
from collections.abc import Callable

import pytest

from rollstream.consumers.learner.records.recording_thread import RecordingThread
from tests.support.waiting import eventually


def test_a_call_runs_beside_its_caller_and_the_next_one_waits_for_it() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []
    with RecordingThread() as thread:

        def slow() -> None:
            begun.set()
            assert go_on.wait(60)
            done.append("first")

        thread.start(slow)
        assert begun.wait(60)
        assert done == [], "the caller goes on while it runs"
        thread.check()
        second = threading.Thread(target=lambda: thread.start(lambda: done.append("second")))
        second.start()
        go_on.set()
        second.join(60)
        assert thread.wait() >= 0
    assert done == ["first", "second"]


def fail() -> None:
    raise ValueError("no room")


def raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def test_an_error_comes_with_the_next_call_and_once() -> None:
    ran = []
    with RecordingThread() as thread:
        thread.start(fail)
        with pytest.raises(ValueError, match="no room"):
            thread.start(lambda: ran.append(1))
        thread.wait()
        thread.start(fail)
        eventually(lambda: raises(thread.check), 60, "the call has ended")
    assert ran == [], "nothing is recorded after a step that is not"


def test_closing_waits_and_leaves_the_error_that_ended_the_learner(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    with RecordingThread() as thread:
        thread.start(lambda: done.append(1))
    assert done == [1]

    def with_an_error_of_its_own() -> None:
        with RecordingThread() as thread:
            thread.start(fail)
            raise KeyError("the loader")

    with pytest.raises(KeyError, match="the loader"):
        with_an_error_of_its_own()
    assert [record.getMessage() for record in caplog.records] == ["recording_failed"]

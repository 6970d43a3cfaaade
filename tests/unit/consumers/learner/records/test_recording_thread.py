"""The thread that records steps: one at a time and in order, and none of its errors is lost."""

import threading
from collections.abc import Callable

import pytest

from rollstream.consumers.learner.records import recording_thread
from rollstream.consumers.learner.records.recording_thread import RecordingThread
from tests.support.log_lines import log_lines
from tests.support.waiting import eventually


def nothing() -> None:
    pass


def test_a_call_runs_beside_its_caller_and_the_next_one_waits_for_it() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []
    with RecordingThread() as thread:

        def slow(taken: str) -> None:
            begun.set()
            assert go_on.wait(60)
            done.append(taken)

        thread.start(lambda: "first", slow)
        assert begun.wait(60)
        assert done == [], "the caller goes on while it runs"
        thread.check()
        second = threading.Thread(target=lambda: thread.start(lambda: "second", done.append))
        second.start()
        go_on.set()
        second.join(60)
        assert thread.wait() >= 0
    assert done == ["first", "second"]


def test_who_waits_for_a_long_recording_shows_that_the_learner_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[str] = []
    go_on = threading.Event()

    def beat(loop: str) -> None:
        beats.append(loop)
        go_on.set()

    monkeypatch.setattr(recording_thread, "beat", beat)
    with RecordingThread() as thread:
        thread.start(nothing, lambda _taken: go_on.wait(60))
        thread.wait()
    assert set(beats) == {"training"}


def test_what_is_taken_is_waited_for_and_what_is_recorded_is_not() -> None:
    begun, go_on, on_record, done = threading.Event(), threading.Event(), threading.Event(), list[int]()
    with RecordingThread() as thread:
        assert thread.wait_until_taken() >= 0, "nothing is in flight"

        def take() -> int:
            begun.set()
            assert go_on.wait(60)
            return 7

        def record(taken: int) -> None:
            assert on_record.wait(60)
            done.append(taken)

        thread.start(take, record)
        assert begun.wait(60)
        waiting = threading.Thread(target=thread.wait_until_taken)
        waiting.start()
        assert waiting.is_alive(), "the buffers are still being read"
        go_on.set()
        waiting.join(60)
        assert done == [], "what was taken is not on record yet"
        on_record.set()
    assert done == [7]


def fail(_taken: object = None) -> None:
    raise ValueError("no room")


def raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def test_an_error_comes_with_the_next_call_and_once() -> None:
    ran: list[object] = []
    with RecordingThread() as thread:
        thread.start(nothing, fail)
        with pytest.raises(ValueError, match="no room"):
            thread.start(nothing, ran.append)
        thread.wait()
        thread.start(fail, ran.append)
        with pytest.raises(ValueError, match="no room"):
            thread.wait_until_taken()
        thread.wait()
        thread.start(fail, ran.append)
        eventually(lambda: raises(thread.check), 60, "the call has ended")
    assert ran == [], "nothing is recorded after a step that is not"


def test_closing_waits_and_leaves_the_error_that_ended_the_learner(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    with RecordingThread() as thread:
        thread.start(lambda: 1, done.append)
    assert done == [1]

    def with_an_error_of_its_own() -> None:
        with RecordingThread() as thread:
            thread.start(nothing, fail)
            raise KeyError("the loader")

    with pytest.raises(KeyError, match="the loader"):
        with_an_error_of_its_own()
    assert [record.getMessage() for record in caplog.records] == ["recording_failed"]
    assert ", in fail" in log_lines(caplog)

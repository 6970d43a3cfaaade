"""RecordingThread: takes the parameters after a step and records the step while the next step trains.

Steps are recorded one at a time, in order: each recording sees the effects of the previous one, and nothing else uses
the log during it. An error ends the learner at the next call.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rollstream.topics.closing import Closing
from rollstream.topics.heartbeats import beat
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_BEAT_S = 1.0

T = TypeVar("T")


class RecordingThread(Closing):
    """A thread with at most one step in flight. Only one thread may call its methods."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="record-step")
        self._taking: Future[Any] | None = None
        self._running: Future[object] | None = None

    def start(self, take: Callable[[], T], record: Callable[[T], object]) -> None:
        """Wait for the previous step; then have the thread call `take`, and `record` with its result.

        Raises the error of the previous step if it has one, and then calls neither function.
        """
        self.wait()
        self._taking = taking = self._pool.submit(take)
        self._running = self._pool.submit(lambda: record(taking.result()))

    def wait_until_taken(self) -> float:
        """Wait until `take` has ended, and return the seconds waited. Raises its error, once."""
        began = time.monotonic()
        taking, self._taking = self._taking, None
        if taking is not None and taking.exception() is not None:
            self.wait()
        return time.monotonic() - began

    def wait(self) -> float:
        """Wait until no step is in flight, and return the seconds waited. Raises the error of the step, once."""
        began = time.monotonic()
        running, self._running, self._taking = self._running, None, None
        if running is not None:
            # A large version, or one of several processes, may take minutes to publish.
            while not wait({running}, _BEAT_S).done:
                beat("training")
            running.result()
        return time.monotonic() - began

    def check(self) -> None:
        """Raise the error of a step that has failed; does not wait for a step in flight."""
        if self._running is not None and self._running.done():
            self.wait()

    def close(self) -> None:
        """Wait until no step is in flight. If the step failed, its error is only logged."""
        try:
            self.wait()
        except Exception as error:  # of any kind: it must not hide the error that ends the learner
            event(logger, "recording_failed", level=logging.WARNING, exc_info=error, error=repr(error))
        self._pool.shutdown()

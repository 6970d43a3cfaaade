"""RecordingThread: puts a step on record while the next one trains.

One step at a time, in order: what it runs sees the effects of the step before, and nobody else uses the log meanwhile.
An error ends the learner at the next call.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from rollstream.topics.closing import Closing
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class RecordingThread(Closing):
    """A thread with at most one call in flight. Used by one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="record-step")
        self._running: Future[object] | None = None

    def start(self, call: Callable[[], object]) -> None:
        """Run a call once the one before has ended. Raises the error of that one, and then runs nothing."""
        self.wait()
        self._running = self._pool.submit(call)

    def wait(self) -> float:
        """Wait until no call runs, and return the seconds waited. Raises the error of the call, once."""
        began = time.monotonic()
        running, self._running = self._running, None
        if running is not None:
            running.result()
        return time.monotonic() - began

    def check(self) -> None:
        """Raise the error of a call that has ended with one; waits for none."""
        if self._running is not None and self._running.done():
            self.wait()

    def close(self) -> None:
        """Wait until no call runs. An error of it is logged, because another one has ended the learner already."""
        try:
            self.wait()
        except Exception as error:  # whatever it is, what ended the learner is raised
            event(logger, "recording_failed", level=logging.WARNING, error=repr(error))
        self._pool.shutdown()

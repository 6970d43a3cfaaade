"""Client calls with a deadline; some calls of the client can block forever.

librdkafka's send_offsets_to_transaction ignores its timeout if the group's coordinator went away and came back (its
issues 5456 and 5511). All calls run on one daemon thread; a caller whose deadline passes leaves it behind.
"""

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from rollstream.topics.errors import RollstreamError

_SLICE_S = 0.25


class Stalled(RollstreamError):
    """A call did not return in time. Its thread and its client are lost: use new ones."""


class BoundedCalls:
    """Runs calls one after another on a thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon thread, so that a call that never returns does not keep the process from ending.
        threading.Thread(target=self._serve, name="bounded-calls", daemon=True).start()

    def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
        """Return or raise what `call` does. Raises Stalled if it runs for more than `timeout_s`.

        Time in which the process was stopped does not count: a zombie that wakes up must learn that it was replaced,
        and must not take its place back because a call took so long.
        """
        future = self.submit(call)
        for _ in range(math.ceil(timeout_s / _SLICE_S)):
            try:
                return future.result(min(_SLICE_S, timeout_s))
            except FutureTimeoutError:
                if future.done():
                    raise
        raise Stalled(f"{name} did not come back within {timeout_s:g} s")

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue `call` behind the calls submitted before it."""
        future: Future[Any] = Future()
        self._waiting.put((call, future))
        return future

    def close(self) -> None:
        """End the thread once its current call returns."""
        self._waiting.put(None)

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # This frame must not keep the last call's client alive while it is idle.
            del call, future, item

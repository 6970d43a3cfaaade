"""Client calls with a deadline, because some calls of the client can block forever.

librdkafka's send_offsets_to_transaction ignores its timeout if the group's coordinator goes away and comes back (its
issues 5456 and 5511). All calls run on one daemon thread; a caller whose deadline passes abandons the thread.
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
    """A call did not return in time; its thread and its client must not be used any more."""


class BoundedCalls:
    """Runs calls one after another on its own thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon thread, so that a call that never returns does not keep the process from ending.
        threading.Thread(target=self._serve, name="bounded-calls", daemon=True).start()

    def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
        """Return what `call` returns, or raise its exception. Raises Stalled if it runs for more than `timeout_s`.

        Time during which the process was suspended does not count. A zombie that resumes must learn that it was
        replaced; it must not mistake the suspension for a call that stalled, and fence its replacement.
        """
        future = self.submit(call)
        for _ in range(math.ceil(timeout_s / _SLICE_S)):
            try:
                return future.result(min(_SLICE_S, timeout_s))
            except FutureTimeoutError:
                # The call may have ended just after this wait, or have raised a TimeoutError itself.
                if future.done():
                    return future.result()
        raise Stalled(f"{name} did not return within {timeout_s:g} s")

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
            # This frame must not keep the client of the last call alive while the thread is idle.
            del call, future, item

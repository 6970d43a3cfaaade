"""Calls into the client that come back in time, whatever the client does: it has some that can wait for ever.

librdkafka's sending of offsets to a transaction ignores its timeout where the group's coordinator went away and came
back (its issues 5456 and 5511). Each call runs on one daemon thread; who waits too long leaves it there and goes on.
"""

import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from topics.errors import RollstreamError

_SLICE_S = 0.25


class Stalled(RollstreamError):
    """A call did not come back in time. Its thread and the client it is in are lost: use others."""


class BoundedCalls:
    """Runs calls one after another on a thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon: one that never comes back must not keep the process from ending.
        threading.Thread(target=self._serve, name="bounded-calls", daemon=True).start()

    def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
        """What `call` returns or raises. Raises Stalled when that takes more than `timeout_s` of running.

        Time in which the process was stopped does not count: a zombie that wakes up must hear that it was replaced, and
        not take its place back because a call took so long.
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
        """Have `call` run after those before it."""
        future: Future[Any] = Future()
        self._waiting.put((call, future))
        return future

    def close(self) -> None:
        """Let the thread end, once it is back."""
        self._waiting.put(None)

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # The last call's client must not live on in this frame while there is nothing to do.
            del call, future, item

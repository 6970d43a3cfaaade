"""Threads outside the event loop: for blocking calls, such as reads of topics and of files, and to follow a run.

The threads are daemons, so that a server that stops does not wait for a broker.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class FollowingThread:
    """A thread that follows a run until it is closed, and calls back into the event loop."""

    def __init__(self, name: str, follow: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=follow, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which calls back into the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop; the thread ends after its current read."""
        self._stop.set()

    def _call(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop."""
        assert self._loop is not None, "the thread was started"
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            self._stop.set()


class Background:
    """A few threads that call functions for coroutines, in the order of the requests."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function on a thread; return its result or raise its error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._tasks.put((function, loop, future))
        return await future

    def close(self) -> None:
        """Let each thread end after the calls that are queued."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, loop, future = task
            if future.cancelled():
                continue
            try:
                result, error = function(), None
            except Exception as raised:  # handed to the coroutine that waits for it
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed, so nobody waits for the result
                return


def _settle(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)

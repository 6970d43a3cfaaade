"""An event loop in a thread of its own, for servers whose clients are tests."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TIMEOUT_S = 300.0


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """A running loop. At the end it cancels the tasks that are left, such as those of connections that a client kept.
    Otherwise a task that is destroyed while pending would report this when it is collected, in any later test."""
    turning: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def turn() -> None:
        stop = asyncio.Event()
        turning.put((asyncio.get_running_loop(), stop))
        await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(turn()), name="test-loop", daemon=True)
    thread.start()
    loop, stop = turning.get(timeout=_TIMEOUT_S)
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_TIMEOUT_S)

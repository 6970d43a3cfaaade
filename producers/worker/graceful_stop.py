"""Limits the time that work may take once its process is asked to stop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish_or_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event, *, grace_s: float) -> T:
    """Return the result of `work`. Cancel it and raise TimeoutError if it runs for `grace_s` after `stop` is set."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.wait_for(task, grace_s)
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)

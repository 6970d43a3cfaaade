"""Values that take time to read: one thread reads a value for all concurrent requests, and it is kept for a while."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rollstream.pipeline.ui.server.background import Background

T = TypeVar("T")


class Kept(Generic[T]):
    """A value that is read again when it is older than `keep_s`."""

    def __init__(self, background: Background, read: Callable[[], T], keep_s: float) -> None:
        self._background, self._read, self._keep_s = background, read, keep_s
        self._value: T | None = None
        self._read_at = -keep_s
        self._reading: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the value; raise the error that reading it raised."""
        if self._value is not None and time.monotonic() - self._read_at < self._keep_s:
            return self._value
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._refresh())
        # If one of several waiting requests is cancelled, the other requests still need the value.
        return await asyncio.shield(self._reading)

    def forget(self) -> None:
        """Make the next request read the value again."""
        self._value = None

    async def _refresh(self) -> T:
        try:
            self._value = value = await self._background.call(self._read)
            # A value that took long to read is not old at once, or it would be read all the time.
            self._read_at = time.monotonic()
            return value
        finally:
            self._reading = None

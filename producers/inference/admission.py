"""Admission of requests: the server's key, a limit on waiting requests, and a drain that finishes admitted requests."""

import asyncio
import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollstream.topics.errors import RollstreamError

RETRY_AFTER_S = 1


class TooManyWaiting(RollstreamError):
    """The server's limit of waiting requests is reached; a later attempt may succeed."""


class Draining(RollstreamError):
    """The server is about to stop and accepts no new requests."""


class Admission:
    """Admits requests while the server is not draining and `waiting()` returns less than `max_waiting`."""

    def __init__(self, max_waiting: int, waiting: Callable[[], int]) -> None:
        self.draining = False
        self.admitted = 0
        """Requests admitted and not yet answered."""
        self._max_waiting = max_waiting
        self._waiting = waiting
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request until it is answered. Raises Draining or TooManyWaiting."""
        if self.draining:
            raise Draining("the server is about to stop; use another server, or try again later")
        waiting = self._waiting()
        if waiting >= self._max_waiting:
            raise TooManyWaiting(
                f"{waiting} requests wait, which is the limit of this server (inference.max_waiting_requests); "
                "try again later"
            )
        self.admitted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.admitted -= 1
            if not self.admitted:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the admitted requests; return whether all were answered in time."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def authorised(header: str | None, key: str) -> bool:
    """Whether an Authorization header holds the server's key; always true if the server has no key."""
    if not key:
        return True
    scheme, _, token = (header or "").partition(" ")
    # Compare in constant time, and as bytes, because a header may hold characters beyond ASCII.
    return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(errors="replace"), key.encode())

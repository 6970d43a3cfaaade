"""Prefetching: computes results in a background thread before they are needed."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from rollstream.topics.closing import Closing

T = TypeVar("T")


class Prefetcher(Closing, Generic[T]):
    """Calls `produce` for consecutive numbers and keeps up to `depth` results ready, in order.

    `produce` gets the number, and an event that is set once the result is no longer wanted; a result of None
    ends the sequence.
    """

    def __init__(
        self, produce: Callable[[int, threading.Event], T | None], first: int, last: int, *, depth: int = 1
    ) -> None:
        """Call `produce` for the numbers from `first` to `last`, inclusive."""
        self._produce = produce
        self._numbers = range(first, last + 1)
        self._ready: queue.Queue[T | BaseException | None] = queue.Queue(depth)
        self._unwanted = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> T | None:
        """The next result; None if the sequence has ended (see `ended`) or no result is ready within `timeout_s`.

        Raises the error that `produce` raised.
        """
        if self._ended:
            return None
        try:
            result = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            self._ended = True
            raise result
        self._ended = result is None
        return result

    @property
    def ended(self) -> bool:
        """Whether the sequence has ended."""
        return self._ended

    def close(self) -> None:
        """Stop producing, and discard results that are ready."""
        self._unwanted.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.05)

    def _run(self) -> None:
        result: T | BaseException | None = None
        for number in self._numbers:
            if self._unwanted.is_set():
                return
            try:
                result = self._produce(number, self._unwanted)
            except BaseException as error:  # Raised by `next`.
                result = error
            self._ready.put(result)
            if result is None or isinstance(result, BaseException):
                return
        self._ready.put(None)

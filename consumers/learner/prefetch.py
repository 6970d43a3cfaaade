"""Makes what the next step needs while the present one runs, in a thread of its own."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from consumers.closing import Closing

T = TypeVar("T")


class Prefetcher(Closing, Generic[T]):
    """Calls `produce` for one number after another and keeps up to `depth` results ready, in order.

    `produce` gets the number and an event that is set when nobody wants the result any more; None ends the sequence.
    """

    def __init__(
        self, produce: Callable[[int, threading.Event], T | None], first: int, last: int, *, depth: int = 1
    ) -> None:
        """Numbers from `first` up to `last`, which is the last one made."""
        self._produce = produce
        self._numbers = range(first, last + 1)
        self._ready: queue.Queue[T | BaseException | None] = queue.Queue(depth)
        self._unwanted = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> T | None:
        """The next result; None when the sequence ended, which `ended` tells from none within `timeout_s`.

        Raises what `produce` raised.
        """
        if self._ended:
            return None
        try:
            found = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            self._ended = True
            raise found
        self._ended = found is None
        return found

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._ended

    def close(self) -> None:
        """Stop producing; what is ready is thrown away."""
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
            except BaseException as error:  # Raised again where the result is asked for.
                result = error
            self._ready.put(result)
            if result is None or isinstance(result, BaseException):
                return
        self._ready.put(None)

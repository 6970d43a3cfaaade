"""Work on several items at a time, on daemon threads.

A call to an external store may never return. On a daemon thread, it does not keep the process alive, and the caller can
give up waiting for it.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
_WAIT_S = 0.05
_NONE_LEFT = object()
_abandoned: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def abandoned_threads() -> int:
    """Number of threads whose caller gave up waiting, and which still work on an item."""
    return sum(thread.is_alive() for thread in list(_abandoned))


def in_parallel(
    items: Iterable[T], work: Callable[[T], R], threads: int, *, check: Callable[[], None], ended: threading.Event
) -> Iterator[R]:
    """Yield the results of `work` as they arrive. Each of the `threads` takes an item when it begins to work on it.

    Errors of `work` and of the items are raised here. `check` is called while no result arrives, and an error from it
    ends the iteration. `ended` is set at the end, whatever the reason; long-running work must check it.
    """
    source, taking = iter(items), threading.Lock()
    results: queue.SimpleQueue[tuple[R | None, BaseException | None, bool]] = queue.SimpleQueue()

    def run() -> None:
        try:
            while not ended.is_set():
                with taking:
                    item = next(source, _NONE_LEFT)
                if item is _NONE_LEFT:
                    break
                results.put((work(item), None, False))  # type: ignore[arg-type]
            results.put((None, None, True))
        except BaseException as error:
            results.put((None, error, True))

    workers = [threading.Thread(target=run, name=f"store-{number}", daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    running = threads
    try:
        while running:
            try:
                result, error, over = results.get(timeout=_WAIT_S)
            except queue.Empty:
                check()
                continue
            if error is not None:
                raise error
            if over:
                running -= 1
            else:
                yield result  # type: ignore[misc]
    finally:
        ended.set()
        _abandoned.update(worker for worker in workers if worker.is_alive())

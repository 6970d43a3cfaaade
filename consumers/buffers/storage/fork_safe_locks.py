"""Locks that no other thread holds when a process forks, so that the child can use what they guard.

A child has only the thread that forked: a lock that another thread holds at that moment would stay locked in the child
for ever. So a fork first waits for all of these locks, and parent and child release them.
"""

# Handlers run in reverse order before a fork. `concurrent.futures.thread` and `logging` also take locks then, so they
# must be registered first: a fork then takes our locks before theirs, as a thread does that logs or submits work under
# one of our locks.
import concurrent.futures.thread  # noqa: F401
import itertools
import logging
import os
import threading
import weakref

from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
PATIENCE_S = 30.0
"""Maximum time that a fork waits for one lock. It ends a wait in a circle: for example, two threads that hold a lock
each may both fork."""
_locks: "dict[int, weakref.ref[threading.RLock]]" = {}
"""All locks, oldest first."""
_numbers = itertools.count()
_of_thread = threading.local()
"""The locks that the fork of a thread holds."""


def fork_safe_lock() -> "threading.RLock":
    """Return a reentrant lock that no other thread holds in a forked child. A fork waits until the lock is free, or
    held by the thread that forks."""
    lock = threading.RLock()
    number = next(_numbers)
    _locks[number] = weakref.ref(lock, lambda _gone: _locks.pop(number, None))
    return lock


def _acquire_all() -> None:
    held = _of_thread.held = []
    # Listing the values is atomic, while other threads create locks. Every fork takes them in the same order.
    for reference in list(_locks.values()):
        lock = reference()
        if lock is not None:
            if lock.acquire(timeout=PATIENCE_S):
                held.append(lock)
            else:
                event(logger, "forked_with_a_buffer_in_use", level=logging.WARNING, waited_s=PATIENCE_S)


def _release_all() -> None:
    while _of_thread.held:
        _of_thread.held.pop().release()


os.register_at_fork(before=_acquire_all, after_in_parent=_release_all, after_in_child=_release_all)

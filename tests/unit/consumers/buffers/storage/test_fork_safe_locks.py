"""Locks of a process that forks: a child can take them all, and threads that fork do not wait for each other."""

import gc
import os
import threading
from typing import Any

import pytest

from rollstream.consumers.buffers.storage import fork_safe_locks
from rollstream.consumers.buffers.storage.fork_safe_locks import fork_safe_lock


def forks(locks: list[Any]) -> bool:
    """Whether a forked child can take locks, in a thread that has none of them."""
    child = os.fork()
    if not child:
        code = 1
        try:
            taken: list[bool] = []
            # A lock that is held only by the thread that forked is free once this thread releases it.
            worker = threading.Thread(target=lambda: taken.extend(lock.acquire(timeout=10) for lock in locks))
            worker.start()
            worker.join(60)
            code = 0 if taken == [True] * len(locks) else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_fork_waits_for_the_thread_that_holds_a_lock() -> None:
    locks = [fork_safe_lock() for _ in range(3)]
    holding, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)

    def hold() -> None:
        with locks[1]:
            holding.set()
            assert forking.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(60)
    assert forks(locks)
    holder.join()
    assert all(lock.acquire(blocking=False) for lock in locks)


def test_a_thread_may_fork_while_it_holds_a_lock() -> None:
    lock, other = fork_safe_lock(), fork_safe_lock()
    with lock:
        assert forks([other])
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert taken == [False], "the thread still holds it"
    assert forks([lock, other])


def test_threads_that_fork_at_once_while_they_hold_locks_all_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_safe_locks, "PATIENCE_S", 0.1)
    locks = [fork_safe_lock() for _ in range(2)]
    holding = threading.Barrier(2)
    done: list[bool] = []

    def fork(lock: Any) -> None:
        with lock:
            holding.wait(60)
            done.append(forks([]))

    threads = [threading.Thread(target=fork, args=(lock,), daemon=True) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True, True]


def test_a_lock_that_nobody_has_any_more_does_not_hold_up_forks() -> None:
    fork_safe_lock().acquire()
    gc.collect()
    assert forks([])

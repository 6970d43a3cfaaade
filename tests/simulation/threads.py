"""Threads, locks, queues and event loops of our modules, as actors in virtual time.

Modules of rollstream and of tests get them, those too that are imported meanwhile, and the library's pools of threads.
Other libraries keep their own threads, which do not use Kafka.
"""

import asyncio
import builtins
import importlib.util
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.simulation.cluster import OUTSIDE
from tests.simulation.installation import World
from tests.simulation.scheduler import EPOCH_S, Actor, Crashed, Scheduler

_EVER_S, _LEAST_S = 1e9, 1e-6
_OURS = ("rollstream.", "tests.")
_POOLS = ("concurrent.futures._base", "concurrent.futures.thread", "asyncio.base_events")
"""Modules of the library that start threads for ours, or wait for these."""


def _seconds(timeout: float | None) -> float:
    return _EVER_S if timeout is None or timeout < 0 else timeout


@contextmanager
def virtual_threads(world: World) -> Iterator[None]:
    """Run the block with these threads. Raises the first error that ended one of them."""
    errors: list[BaseException] = []
    scheduler = world.scheduler
    of_actors: dict[Actor | None, Any] = {}

    def current_thread() -> object:
        return of_actors.get(scheduler.current) or threading.current_thread()

    class Thread:
        """An actor of the process that starts it."""

        def __init__(
            self,
            group: None = None,
            target: Callable[..., object] = lambda: None,
            name: str = "thread",
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
            *,
            daemon: bool | None = None,
        ) -> None:
            self.name, self.daemon, self._actor = name, daemon, None
            self._work = lambda: target(*args, **(kwargs or {}))

        _actor: Actor | None

        def start(self) -> None:
            self._actor = scheduler.spawn(scheduler.process or OUTSIDE, self.name, self._run)
            of_actors[self._actor] = self

        def _run(self) -> None:
            try:
                self._work()
            except Crashed:
                raise
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                of_actors.pop(self._actor, None)

        def is_alive(self) -> bool:
            return self._actor is not None and not self._actor.done

        def join(self, timeout: float | None = None) -> None:
            scheduler.wait(lambda: not self.is_alive(), _seconds(timeout))

    class Lock:
        """A lock of actors; one that its owner may take again if it says so."""

        def __init__(self, *, again: bool = False) -> None:
            self._owner: object = None
            self.depth, self._again = 0, again

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            mine = scheduler.current or OUTSIDE
            if not (self._again and self._owner is mine):
                if not scheduler.wait(lambda: self._owner is None, _seconds(timeout) if blocking else 0.0):
                    return False
                self._owner = mine
            self.depth += 1
            return True

        def release(self) -> None:
            assert self._owner is not None
            self.depth -= 1
            if not self.depth:
                self._owner = None

        def locked(self) -> bool:
            return self._owner is not None

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_raised: object) -> None:
            self.release()

    class Condition:
        """A condition of actors."""

        def __init__(self, lock: Lock | None = None) -> None:
            self._lock = lock or Lock(again=True)
            self.acquire, self.release = self._lock.acquire, self._lock.release
            self._waiting: list[list[bool]] = []

        def wait(self, timeout: float | None = None) -> bool:
            woken = [False]
            self._waiting.append(woken)
            depth = self._lock.depth
            for _ in range(depth):
                self.release()
            try:
                scheduler.wait(lambda: woken[0], _seconds(timeout))
            finally:
                self._waiting = [other for other in self._waiting if other is not woken]
                for _ in range(depth):
                    self.acquire()
            return woken[0]

        def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            deadline_s = scheduler.now_s + _seconds(timeout)
            while not (met := predicate()) and scheduler.now_s < deadline_s:
                self.wait(deadline_s - scheduler.now_s)
            return met

        def notify(self, n: int = 1) -> None:
            for woken in self._waiting[:n]:
                woken[0] = True
            del self._waiting[:n]

        def notify_all(self) -> None:
            self.notify(len(self._waiting))

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(self, *_raised: object) -> None:
            self.release()

    class Event:
        """An event of actors."""

        def __init__(self) -> None:
            self._set = False

        def set(self) -> None:
            self._set = True

        def clear(self) -> None:
            self._set = False

        def is_set(self) -> bool:
            scheduler.pause()  # or whoever asks in a loop would never let another go on
            return self._set

        def wait(self, timeout: float | None = None) -> bool:
            scheduler.wait(lambda: self._set, _seconds(timeout))
            return self._set

    class Semaphore(threading.Semaphore):
        """The library's own, over a condition of actors."""

        def __init__(self, value: int = 1) -> None:
            super().__init__(value)
            self._cond, self._value = Condition(Lock()), value

    class Barrier(threading.Barrier):
        """The library's own, over a condition of actors."""

        def __init__(
            self, parties: int, action: Callable[[], None] | None = None, timeout: float | None = None
        ) -> None:
            super().__init__(parties, action, timeout)
            self._cond = Condition(Lock())

    ours = {
        "Barrier": Barrier,
        "Thread": Thread,
        "Lock": Lock,
        "RLock": lambda: Lock(again=True),
        "Condition": Condition,
        "Event": Event,
        "Semaphore": Semaphore,
        "current_thread": current_thread,
    }
    namespace = SimpleNamespace(**{**vars(threading), **ours})

    with pytest.MonkeyPatch.context() as patch:
        replaced = {threading: namespace, queue: _queues(namespace)}
        for name, module in list(sys.modules.items()):
            if name in _POOLS or (name.startswith(_OURS) and not name.startswith("tests.simulation.")):
                for attribute in ("threading", "queue"):
                    if (new := replaced.get(vars(module).get(attribute))) is not None:
                        patch.setattr(module, attribute, new)
        importing = builtins.__import__

        def imported(name: str, globals: Any = None, *rest: Any, **named: Any) -> Any:  # noqa: A002  # the library's
            ours = globals and str(globals.get("__name__")).startswith("rollstream.")
            module = importing(name, globals, *rest, **named)
            return replaced.get(module, module) if ours and name in ("threading", "queue") else module

        patch.setattr(builtins, "__import__", imported)
        for module in (asyncio, asyncio.events):  # asyncio.run looks in the second
            patch.setattr(module, "new_event_loop", lambda: _Loop(scheduler))
        yield
    for module in list(sys.modules.values()):  # those that were imported meanwhile
        for real, modelled in replaced.items():
            if vars(module).get(real.__name__) is modelled:
                setattr(module, real.__name__, real)
    if errors:
        raise errors[0]


def _queues(namespace: SimpleNamespace) -> ModuleType:
    """Return the library's module of queues, over these locks."""
    assert queue.__spec__ is not None
    assert queue.__spec__.loader is not None
    copy = importlib.util.module_from_spec(queue.__spec__)
    queue.__spec__.loader.exec_module(copy)
    for name, value in {"threading": namespace, "SimpleQueue": copy._PySimpleQueue, "Full": queue.Full}.items():
        setattr(copy, name, value)
    setattr(copy, "time", time.monotonic)  # noqa: B010
    return copy


class _Selector(selectors.SelectSelector):
    """Lets actors go on while nothing is ready."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = []

        def look() -> bool:
            ready[:] = super(_Selector, self).select(0)
            return bool(ready)

        if timeout is None or timeout > 0:
            self._scheduler.wait(look, max(_LEAST_S, _seconds(timeout)))
        else:
            self._scheduler.pause()
            look()
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """An event loop of an actor. Its time is small, because a loop tells times apart by nanoseconds."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(_Selector(scheduler))
        self._scheduler = scheduler

    def time(self) -> float:
        return self._scheduler.now_s - EPOCH_S

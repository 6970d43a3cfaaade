"""Runs actors one at a time, in an order and at times that one seed gives: every run of a seed is the same.

An actor is a thread of a simulated process. It goes on until it pauses, which each request to a broker does before and
after it takes effect; then the seed chooses who goes on. Time moves with every step, and jumps where everybody waits.
Code outside every actor, such as a test, lets the actors run while it waits.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

STEP_S = 0.001
EPOCH_S = 1_700_000_000.0
_TIMERS_EVERY_S = 0.25


class Crashed(BaseException):
    """The process of the actor was killed: nothing that it still does has an effect."""


class Hanging(BaseException):
    """A call of a client that never returns."""


class Endless(AssertionError):
    """A schedule took too many steps: somebody makes no progress."""


@dataclass(eq=False)
class Process:
    """A process of the simulated machine, from its start to its end."""

    name: str
    alive: bool = True
    stopped_until_s: float = 0.0
    """Stopped as by SIGSTOP, with the threads of its clients."""
    cut_until_s: float = 0.0
    """Its requests do not arrive, or their answers do not."""
    losing: bool = False
    """The next answer is lost."""
    hanging: bool = False
    """The next call that may hang does."""
    actors: list["Actor"] = field(default_factory=list)
    console: Any = None
    """Has `swap()`, called before an actor of this process goes on and after it has paused."""
    role: Any = None
    """The role whose process this is."""


class Actor:
    """A thread of a process."""

    def __init__(self, scheduler: "Scheduler", process: Process, name: str, work: Callable[[], Any]) -> None:
        self.process, self.name = process, name
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.until: Callable[[], bool] | None = None
        self.deadline_s = 0.0
        self._work = work
        self.thread = greenlet(self._run, scheduler.main)

    def _run(self) -> None:
        try:
            if self.process.alive:
                self.result = self._work()
        except BaseException as error:
            self.error = error
        self.done = True


class Scheduler:
    """Actors, virtual time and the one source of randomness."""

    def __init__(self, seed: int, most_steps: int = 60_000) -> None:
        """A schedule of more than `most_steps` counts as endless; two long outages in a row take some 16,000."""
        self.rng = random.Random(seed)
        self.now_s = EPOCH_S
        self.steps = 0
        self.switching = self.rng.choice((0.05, 0.2, 0.5, 1.0))
        """How probable it is that another actor goes on after a step."""
        self.main = getcurrent()
        self.current: Actor | None = None
        self.on_step: Callable[[Process], None] = lambda process: None
        """Called at each step of a process: where faults are injected."""
        self.timers: list[Callable[[float], float]] = []
        """Called whenever time has moved, with the time; they return when they want to be called at the latest."""
        self._most_steps = most_steps
        self._actors: list[Actor] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._timers_due_s = 0.0

    # ------------------------------------------------------------------ called by actors

    def pause(self) -> None:
        """One step: faults may come, and another actor may go on."""
        actor = self.current
        if actor is None:
            self._turn()
            return
        self.steps += 1
        self.on_step(actor.process)
        if not actor.process.alive:
            raise Crashed
        stopped = actor.process.stopped_until_s > self.now_s
        if stopped or self.rng.random() < self.switching:
            self._yield(None, 0.0)

    def wait(self, until: Callable[[], bool], for_s: float) -> bool:
        """Wait until a condition holds, or for a time; return whether it holds."""
        if not until():
            deadline_s = self.now_s + for_s
            if self.current is not None:
                self._yield(until, deadline_s)
            else:
                self.later(for_s, lambda: None)  # time does not jump past it
                self.run(lambda: until() or self.now_s >= deadline_s)
        return until()

    def sleep(self, for_s: float) -> None:
        """Let time pass."""
        self.wait(lambda: False, for_s)

    def _yield(self, until: Callable[[], bool] | None, deadline_s: float) -> None:
        actor = self.current
        assert actor is not None
        if not actor.process.alive:
            raise Crashed
        actor.until, actor.deadline_s = until, deadline_s
        loop = asyncio._get_running_loop()  # one for all actors, because they share a thread
        asyncio._set_running_loop(None)
        self.main.switch()
        asyncio._set_running_loop(loop)
        if not actor.process.alive:
            raise Crashed

    # ------------------------------------------------------------------ called by anyone

    @property
    def process(self) -> Process | None:
        """The process that runs now."""
        return self.current.process if self.current else None

    def spawn(self, process: Process, name: str, work: Callable[[], Any]) -> Actor:
        """Start a thread of a process."""
        actor = Actor(self, process, name, work)
        self._actors.append(actor)
        process.actors.append(actor)
        return actor

    def later(self, in_s: float, work: Callable[[], None]) -> None:
        """Do something later that belongs to no process, such as a request under way."""
        self._count += 1
        self._later.append((self.now_s + in_s, self._count, work))

    # ------------------------------------------------------------------ the loop

    def run(self, until: Callable[[], bool]) -> None:
        """Let actors run until a condition holds. Raises Endless if it takes too many steps or nobody can go on."""
        while not until():
            if not self._turn() and not self._jump() and not until():
                raise Endless("nobody can ever go on")

    def _turn(self) -> bool:
        """Let one actor go on; return whether any could."""
        self._advance(STEP_S)
        self._due()
        ready = [actor for actor in self._actors if self._ready(actor)]
        if not ready:
            return False
        self._resume(ready[0] if len(ready) == 1 else self.rng.choice(ready))
        self.steps += 1
        if self.steps > self._most_steps:
            raise Endless(f"{self.steps} steps and no end; {[(a.name, a.until is None) for a in self._actors]}")
        return True

    def end(self) -> None:
        """End every actor, so that nothing of the schedule is left."""
        for actor in self._actors:
            actor.process.alive = False
        for actor in list(self._actors):
            self._resume(actor)

    def _ready(self, actor: Actor) -> bool:
        if not actor.process.alive:
            return True
        if actor.process.stopped_until_s > self.now_s:
            return False
        return actor.until is None or actor.deadline_s <= self.now_s or actor.until()

    def _resume(self, actor: Actor) -> None:
        actor.until = None
        self.current = actor
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        if (console := actor.process.console) is not None:
            console.swap()
        actor.thread.switch()
        if console is not None:
            console.swap()
        asyncio._set_running_loop(loop)
        self.current = None
        if actor.done:
            self._actors.remove(actor)

    def _advance(self, by_s: float) -> None:
        self.now_s += by_s
        if self.now_s >= self._timers_due_s:
            coming = min((timer(self.now_s) for timer in self.timers), default=_TIMERS_EVERY_S)
            self._timers_due_s = min(coming, self.now_s + _TIMERS_EVERY_S)

    def _due(self) -> None:
        if not self._later:
            return
        due = [item for item in self._later if item[0] <= self.now_s]
        if due:
            self._later = [item for item in self._later if item[0] > self.now_s]
            for _at, _count, work in sorted(due, key=lambda item: item[:2]):
                work()

    def _jump(self) -> bool:
        """Move time to where something happens next; return whether anything will."""
        # Ask the timers first, because they may schedule something.
        times = [timer(self.now_s) for timer in self.timers]
        times += [at for at, _count, _work in self._later]
        for actor in self._actors:
            stopped_s = actor.process.stopped_until_s
            if actor.process.alive and stopped_s > self.now_s:
                times.append(stopped_s)
            elif actor.until is not None:
                times.append(actor.deadline_s)
        coming = [at for at in times if self.now_s < at < float("inf")]
        if coming:
            self._advance(min(coming) - self.now_s)
        return bool(coming or self._later)

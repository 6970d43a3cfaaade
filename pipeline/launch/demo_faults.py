"""Fault injection of the demo: kills a grouping consumer and the learner, and measures how long each takes to recover.

Both are killed together, at a step drawn from the seed. The supervisor starts them again, as it would in any run.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import GROUP, LEARN
from rollstream.pipeline.run.plan import RunPlan


class Roles(Protocol):
    """The part of a supervisor that fault injection needs."""

    def kill(self, name: str) -> int | None:
        """SIGKILL a role; return its process id, or None if it does not run."""

    def is_ready(self, name: str) -> bool:
        """Whether a role runs and has reported that it is ready."""

    def finished(self, name: str) -> bool:
        """Whether a role that finishes by itself has done so."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One process that was killed."""

    role: str
    pid: int
    step: int
    """Newest step of the learner when it was killed."""
    at_s: float
    """Time since the workers started."""
    back_s: float | None = None
    """Time from the kill until the role worked again, which a grouping consumer does once it has restored its
    partitions, and the learner once it has made a new step. None if that was not observed."""
    back: str = ""
    """Description of the evidence that the role works again."""


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Roles to kill, and the step at which to kill them."""

    step: int
    roles: tuple[str, ...]


def plan_faults(config: RunConfig, roles: RunPlan) -> FaultPlan | None:
    """Choose a grouping consumer and a step between a tenth and a fifth of learner.max_steps, by the run's seed.

    Return None if the supervisor would not start killed roles again.
    """
    if config.supervisor.restarts < 1:
        return None
    draw = random.Random(f"second act {config.seed}")
    first = max(1, config.learner.max_steps // 10)
    step = draw.randint(first, max(first, config.learner.max_steps // 5))
    return FaultPlan(step=step, roles=(draw.choice(roles.of(GROUP)).name, LEARN))


class FaultInjector:
    """Kills roles at the planned step, and watches them recover."""

    def __init__(
        self,
        plan: FaultPlan | None,
        roles: Roles,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._roles = roles
        self._say = say
        self._clock = clock
        self._began = clock()
        self._last_step = 0
        self.faults: tuple[Fault, ...] = ()

    @property
    def pending(self) -> bool:
        """Whether a killed role has not recovered yet."""
        return any(fault.back_s is None for fault in self.faults)

    def poll(self, step: int) -> None:
        """Kill the roles if it is time, and note recoveries; `step` is the newest step on the log. Call it often."""
        if self._plan is not None and step >= self._plan.step and not self._roles.finished(LEARN):
            plan, self._plan = self._plan, None
            self._kill(plan, step)
        self.faults = tuple(
            fault if fault.back_s is not None else self._recovered(fault, step) for fault in self.faults
        )

    def _kill(self, plan: FaultPlan, step: int) -> None:
        at_s = self._clock() - self._began
        for role in plan.roles:
            if (pid := self._roles.kill(role)) is not None:
                self.faults += (Fault(role=role, pid=pid, step=step, at_s=round(at_s, 1)),)
        victims = " and ".join(f"{fault.role} (process {fault.pid})" for fault in self.faults)
        self._say(f"kill -9 of {victims} at step {step}")

    def _recovered(self, fault: Fault, step: int) -> Fault:
        """Return the fault, with its recovery if the role works again."""
        if fault.role != LEARN:
            back = "its partitions" if self._roles.is_ready(fault.role) else ""
        elif self._roles.finished(LEARN):
            back = "its last step"
        else:
            ready = self._roles.is_ready(LEARN)
            if not ready:
                self._last_step = step  # the killed process made this step, even if it is read only now
            back = f"step {step}" if ready and step > self._last_step else ""
        if not back:
            return fault
        took_s = self._clock() - self._began - fault.at_s
        self._say(f"{fault.role} is back after {took_s:.1f} s, with {back}")
        return replace(fault, back_s=round(took_s, 1), back=back)


def faults_text(faults: tuple[Fault, ...]) -> str:
    """Table of the killed roles, with the step and time of the kill, and how long each role took to recover."""
    if not faults:
        return "nothing was killed on the way"
    rows = [
        (
            f.role,
            f"step {f.step}, {f.at_s:.0f} s",
            *(("never",) if f.back_s is None else (f"{f.back_s:.1f} s, {f.back}",)),
        )
        for f in faults
    ]
    return table(("kill -9 of", "at", "at work again after, with"), rows)


def plain_faults(faults: tuple[Fault, ...]) -> list[dict[str, Any]]:
    """Faults as plain values for JSON."""
    return [asdict(fault) for fault in faults]

"""The demo's second act: kill -9 of one grouping consumer and the learner in mid-run, and how long each takes to be at
work again.

Both at once, at a step drawn from the seed. Starting them again is the supervisor's affair, as in any run.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from pipeline.config import RunConfig
from pipeline.plan import LEARN, RunPlan
from pipeline.tables import table


class Roles(Protocol):
    """What of a supervisor is needed."""

    def kill(self, name: str) -> int | None:
        """SIGKILL a role, as the world would; its process id, or None where it does not run."""

    def is_ready(self, name: str) -> bool:
        """Whether a role runs and has said that it is ready."""

    def finished(self, name: str) -> bool:
        """Whether a role that finishes by itself has done so."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One process that was killed."""

    role: str
    pid: int
    step: int
    """The learner's newest step then."""
    at_s: float
    """Since the first rollout was wanted."""
    back_s: float | None = None
    """From the kill until it was at work again: a grouping consumer with its partitions, their state restored; the
    learner with a step nobody had made before. None where it was not seen."""
    back: str = ""
    """What showed that it was."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Whom to kill, and when."""

    step: int
    roles: tuple[str, ...]


def plan_faults(config: RunConfig, roles: RunPlan) -> Plan | None:
    """A grouping consumer and the learner, between a tenth and a fifth of the most steps there may be, both drawn from
    the run's seed; None where nobody would start them again.
    """
    if config.supervisor.restarts < 1:
        return None
    draw = random.Random(f"second act {config.seed}")
    first = max(1, config.learner.max_steps // 10)
    step = draw.randint(first, max(first, config.learner.max_steps // 5))
    return Plan(step=step, roles=(draw.choice(roles.groupers).name, LEARN))


class SecondAct:
    """Kills when it is time, and watches what it killed come back."""

    def __init__(
        self, plan: Plan | None, roles: Roles, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plan = plan
        self._roles = roles
        self._say = say
        self._clock = clock
        self._began = clock()
        self._made = 0
        self.faults: tuple[Fault, ...] = ()

    @property
    def pending(self) -> bool:
        """Whether something that was killed is not back yet."""
        return any(fault.back_s is None for fault in self.faults)

    def look(self, step: int) -> None:
        """Kill, or see who is back; `step` is the newest on record. Call it often."""
        if self._plan is not None and step >= self._plan.step and not self._roles.finished(LEARN):
            plan, self._plan = self._plan, None
            self._kill(plan, step)
        self.faults = tuple(fault if fault.back_s is not None else self._seen(fault, step) for fault in self.faults)

    def _kill(self, plan: Plan, step: int) -> None:
        at_s = self._clock() - self._began
        for role in plan.roles:
            if (pid := self._roles.kill(role)) is not None:
                self.faults += (Fault(role=role, pid=pid, step=step, at_s=round(at_s, 1)),)
        who = " and ".join(f"{fault.role} (process {fault.pid})" for fault in self.faults)
        self._say(f"kill -9 of {who} at step {step}")

    def _seen(self, fault: Fault, step: int) -> Fault:
        if fault.role != LEARN:
            back = "its partitions" if self._roles.is_ready(fault.role) else ""
        elif self._roles.finished(LEARN):
            back = "its last step"
        else:
            ready = self._roles.is_ready(LEARN)
            if not ready:
                self._made = step  # by the one that was killed, its last steps maybe read only now
            back = f"step {step}" if ready and step > self._made else ""
        if not back:
            return fault
        took_s = self._clock() - self._began - fault.at_s
        self._say(f"{fault.role} is back after {took_s:.1f} s, with {back}")
        return replace(fault, back_s=round(took_s, 1), back=back)


def faults_text(faults: tuple[Fault, ...]) -> str:
    """What was killed when, and how long each took to come back."""
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
    """As programs read them."""
    return [asdict(fault) for fault in faults]

"""What is wrong with a run that goes on: a stage that starves the others, environments that teach nothing, crash loops.

A stalled stage is sought from the learner back to the environments: the first that has input and passes nothing on,
because the stages before it wait, and the stages after it starve. An environment teaches nothing if every group of many
policy versions was dropped for equal rewards. All functions are pure.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.pipeline.run.component_metrics import ComponentMetrics
from rollstream.topics.records import FateCount
from rollstream.topics.records.fates import BATCHED, dropped_for

STEP_PATIENCE_S = 600.0
"""Time without a step after which a run may count as stalled."""
STEPS = 5
"""Time without a step after which a run may count as stalled, in median step times."""
_ENV, _GROUP, _LEARN, _WEIGHTS, _LABEL = "env", "group", "learn", "weights", "label"
_SERVERS = ("infer", "serve-weights")
_MOSTLY = 0.5


@dataclass(frozen=True, kw_only=True)
class FlowFacts:
    """How a run flows: positions on its log, times since its newest records, and metrics of its components."""

    step_age_s: float
    """Time since the newest step, or since the first record of the run if there is none."""
    median_step_s: float = 0.0
    """Median time from one of the newest steps to the next."""
    rollout_age_s: float = 0.0
    """Time since the newest rollout; infinite if there is none. The next two are the same for reads and batches."""
    read_age_s: float = 0.0
    batch_age_s: float = 0.0
    version_age_s: float = 0.0
    version: int = -1
    """Newest version published."""
    waiting_rollouts: int = 0
    """Rollouts of batches that no step has used or skipped."""
    needed_rollouts: int = 1
    """Rollouts that a step needs."""
    in_flight: int = 0
    unread: int = 0
    unlabeled: int = 0
    """Records that no labeler has read."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rollouts dropped since the newest step, by reason."""
    skipped: int = 0
    """Rollouts that the learner has skipped since the newest step."""
    components: Sequence[ComponentMetrics] = ()
    ends: bool = False
    """Whether operators want the run to end, so that no further step is due."""


class Stall(NamedTuple):
    """The stage at which a run stalls, and why."""

    stage: str
    """Role to check, or `weights`."""
    why: str


def stalled_stage(facts: FlowFacts, patience_s: float) -> Stall | None:
    """Return the stage that keeps a run from its next step; None if the run makes steps, has ended, or is to end."""
    limit_s = max(patience_s, STEPS * facts.median_step_s)
    if facts.step_age_s < limit_s or facts.ends or not any(each.alive for each in facts.components):
        return None
    for look in (_learner, _weights, _grouping, _labeling, _inference):
        if stall := look(facts, limit_s):
            return stall
    return _environments(facts)


def _learner(facts: FlowFacts, limit_s: float) -> Stall | None:
    if facts.waiting_rollouts >= facts.needed_rollouts:
        return Stall(_LEARN, f"the learner does not take batches: {facts.waiting_rollouts:,} rollouts wait for a step")
    return None


def _weights(facts: FlowFacts, limit_s: float) -> Stall | None:
    if facts.version < 0:
        return Stall(_WEIGHTS, "no policy version was ever published, so nothing can be sampled")
    served = [
        int(each.values["policy_version"])
        for each in facts.components
        if each.role in _SERVERS and each.alive and "policy_version" in each.values
    ]
    behind = [version for version in served if version < facts.version]
    if behind and facts.version_age_s >= limit_s and (facts.skipped or facts.dropped.get("stale_version", 0)):
        return Stall(
            _WEIGHTS,
            f"weights do not arrive: servers have version {min(behind)}, and {facts.version} is published; what they "
            "sample is too old",
        )
    return None


def _grouping(facts: FlowFacts, limit_s: float) -> Stall | None:
    if facts.batch_age_s < limit_s:
        return None  # Batches arrive, so the stall lies elsewhere.
    if facts.unread and facts.read_age_s >= limit_s:
        return Stall(_GROUP, f"grouping reads nothing: {facts.unread:,} records wait")
    if facts.rollout_age_s >= limit_s:
        return None
    if facts.unread > facts.in_flight + facts.needed_rollouts:
        return Stall(_GROUP, f"grouping lags: {facts.unread:,} records wait")
    if (lost := sum(facts.dropped.values())) > facts.in_flight:
        reason = max(facts.dropped, key=lambda name: facts.dropped[name])
        return Stall(_GROUP, f"groups are dropped, {lost:,} rollouts since the last step, most for {reason}")
    return Stall(_GROUP, f"groups never complete: {facts.in_flight:,} rollouts wait for members or a batch")


def _labeling(facts: FlowFacts, limit_s: float) -> Stall | None:
    if facts.unlabeled and facts.rollout_age_s >= limit_s:
        return Stall(_LABEL, f"labels do not arrive: {facts.unlabeled:,} rollouts wait for a labeler")
    return None


def _inference(facts: FlowFacts, limit_s: float) -> Stall | None:
    """Return the stall if workers play but get no answers."""
    workers = [each for each in facts.components if each.role == _ENV and each.alive]
    if facts.rollout_age_s < limit_s or not workers:
        return None
    servers = [each for each in facts.components if each.role in _SERVERS]
    name = servers[0].role if servers else _SERVERS[0]
    if servers and not any(each.alive for each in servers):
        return Stall(name, "inference does not answer: no server runs")
    errors = sum(each.values.get("errors_per_s", 0.0) for each in servers if each.alive)
    failed = sum(each.values.get("failed_per_s", 0.0) for each in workers)
    if errors or failed:
        return Stall(name, f"inference refuses: {failed:.2g} rollouts and {errors:.2g} requests fail per second")
    return None


def _environments(facts: FlowFacts) -> Stall:
    workers = [each for each in facts.components if each.role == _ENV and each.alive]
    if not workers:
        return Stall(_ENV, "environments produce nothing: no worker runs")
    waits = sum(each.values.get("waiting_for_capacity", 0.0) for each in workers) / len(workers)
    if waits > _MOSTLY:
        return Stall(
            _ENV, f"environments wait for room: {facts.in_flight:,} rollouts are in flight, and none gets a fate"
        )
    return Stall(_ENV, f"environments produce nothing: {len(workers)} workers play, but no rollout arrives")


FLAT_VERSIONS = 20
"""Versions without a batched rollout after which an environment counts as flat."""
_FLAT = (dropped_for("zero_variance"), dropped_for("zero_advantage"))


class _Taught(NamedTuple):
    """When a rollout of an environment was last batched."""

    version: int
    batched: int
    flat: int
    """Rollouts that had been dropped for equal rewards by then."""


class FlatEnvironments:
    """The environments that are flat, by the counts of the journal."""

    def __init__(self) -> None:
        self._taught: dict[str, _Taught] = {}

    def look(self, counts: Iterable[FateCount], version: int) -> tuple[str, ...]:
        """Return the names of the environments that are flat at this policy version. Call it often."""
        fates: dict[str, Counter[str]] = {}
        for count in counts:
            fates.setdefault(count.environment, Counter())[count.fate] += count.rollouts
        flat = []
        for name, now in fates.items():
            dropped, taught = sum(now[fate] for fate in _FLAT), self._taught.get(name)
            if taught is None or now[BATCHED] != taught.batched:
                self._taught[name] = taught = _Taught(version, now[BATCHED], dropped)
            if version - taught.version >= FLAT_VERSIONS and dropped > taught.flat:
                flat.append(name)
        return tuple(sorted(flat))


@dataclass(frozen=True, kw_only=True)
class CrashLoop:
    """The last exit of a role that exits again and again."""

    exits: int
    """Exits within the window."""
    cause: str
    """How it exited, and its last error or the end of its log."""
    again_in_s: float
    """Pause until it is started again; infinite if another process has its place, so that it is not."""

    @property
    def is_final(self) -> bool:
        """Whether the role is not started again."""
        return self.again_in_s == math.inf


class LoopWatch:
    """Compares the crash loops with those that it already reported."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._told: dict[str, CrashLoop] = {}

    def look(self, loops: Mapping[str, CrashLoop]) -> list[str]:
        """Return a warning for each role that began to loop or exited for another reason, and a line for each that
        recovered."""
        lines = []
        for name, loop in loops.items():
            before = self._told.get(name)
            if before is None or before.cause != loop.cause:
                again = "not started again" if loop.is_final else f"started again in {loop.again_in_s:.0f} s"
                lines.append(
                    f"warning: role {name} {loop.cause}; run {self._run} continues without this role, which is {again}"
                )
        lines += [f"role {name} has recovered" for name in self._told if name not in loops]
        self._told = dict(loops)
        return lines

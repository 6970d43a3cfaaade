"""Warns if a run stalls, and names the number on the display, or the stage of the run, to check.

It is given snapshots of the run in order of time, each with the time of a monotonic clock.
"""

import logging
import math

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.diagnoses import FLAT_VERSIONS
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import VALUES

logger = logging.getLogger(__name__)
STILL_S = 60.0
"""Time without a new batch, or without a new step, after which the run counts as stalled."""
AGAIN_S = 300.0
"""Time until the warning is repeated."""


class StallWatch:
    """Reports that a run stalls or goes on, on the display, in the log and at /metrics.

    After a minute without a batch or a step, a warning names a number on the display to check. If no step is made
    for so long that the snapshot names a stage, one warning names the stage instead, and the log records it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._since: dict[str, tuple[float, RunSnapshot]] = {}
        """For each count, the time when it last grew, and the snapshot at that time."""
        self._warned_s: dict[str, float] = {}
        self._labeled = -math.inf, 0
        """Time when labelers last read a record, and how many they had read then."""
        self._stage = ""
        self._flat: frozenset[str] = frozenset()

    def look(self, now: RunSnapshot, time_s: float) -> list[str]:
        """Return the lines to show now, usually none. `time_s` is the time of a monotonic clock."""
        VALUES.record("run", {"stalled": float(bool(now.stalled_stage))})
        if now.history_left:
            return []  # until the history is read, counts describe the past
        if now.read_by_labelers != self._labeled[1]:
            self._labeled = time_s, now.read_by_labelers
        lines = [*self._of_stage(now), *self._of_flat(now)]
        for count in ("batches", "step"):
            since_s, then = self._since.setdefault(count, (time_s, now))
            if getattr(now, count) != getattr(then, count):
                self._since[count] = (time_s, now)
                self._warned_s.pop(count, None)
            elif time_s - since_s >= STILL_S and time_s - self._warned_s.get(count, -AGAIN_S) >= AGAIN_S:
                self._warned_s[count] = time_s
                if count == "batches":
                    why = self._why_not_batched(then, now, time_s)
                    lines.append(f"warning: nothing was batched for {time_s - since_s:.0f} s: {why}")
                elif not self._stage:
                    why = self._why_not_trained(then, now)
                    lines.append(f"warning: nothing was trained for {time_s - since_s:.0f} s: {why}")
        return lines

    def _of_stage(self, now: RunSnapshot) -> list[str]:
        """Return a line if the run begins to stall at a stage, or goes on again."""
        if now.stalled_stage == self._stage:
            return []
        self._stage, run = now.stalled_stage, now.run
        if not self._stage:
            event(logger, "run_steps_again", run=run, step=now.step)
            return ["the run goes on"]
        where = {"run": run, "stage": self._stage, "reason": now.stalled, "step": now.step}
        event(logger, "run_stalled", level=logging.WARNING, **where)
        return [f"warning: no step was made for long: look at {self._stage}: {now.stalled}"]

    def _of_flat(self, now: RunSnapshot) -> list[str]:
        """Return a line for each environment that begins to teach nothing, or teaches again."""
        before, self._flat = self._flat, frozenset(now.flat_environments)
        lines = []
        for name in sorted(self._flat - before):
            event(logger, "environment_flat", level=logging.WARNING, run=now.run, environment=name, step=now.step)
            lines.append(
                f"warning: environment {name} teaches nothing: for {FLAT_VERSIONS} policy versions, the rewards of "
                f"each of its groups were equal (zero_variance); look at its rewards, change its difficulty, or run "
                f"`rollstream steer environment pause {name}`"
            )
        return lines + [f"environment {name} teaches again" for name in sorted(before - self._flat)]

    def _why_not_batched(self, then: RunSnapshot, now: RunSnapshot, time_s: float) -> str:
        dropped = {reason: count - then.dropped.get(reason, 0) for reason, count in now.dropped.items()}
        if any(dropped.values()):
            reason = max(dropped, key=lambda reason: dropped[reason])
            return f"look at what is dropped, {dropped[reason]:,} in this time for {reason}"
        if now.dead_lettered > then.dead_lettered:
            return (
                f"look at dead letters, {now.dead_lettered - then.dead_lettered:,} in this time; "
                f"`rollstream dlq ls --run {now.run}` says why"
            )
        if now.unread and now.produced - now.unread <= then.produced - then.unread:
            return (
                f"look at unread, {now.unread:,}: grouping reads nothing; its logs are group-*.log, and "
                f"`rollstream broker mend --run {now.run}` says whether a transaction holds it back for ever"
            )
        if now.waiting_for_labels and time_s - self._labeled[0] >= STILL_S:
            return (
                f"look at waiting for labels, {now.waiting_for_labels:,} rollouts on `unlabelled`: no labeler reads "
                f"them; labelers' logs are label-*.log, and `rollstream role label --run {now.run}` starts another"
            )
        if now.rollouts > then.rollouts or now.in_flight > then.in_flight:
            size = self._config.grouping.batch_rollouts
            return (
                f"look at in flight, {now.in_flight:,}: groups wait for members (worker.group_size "
                f"{self._config.worker.group_size}), or there are too few for a batch (grouping.batch_rollouts {size})"
            )
        if now.waiting:
            return (
                f"look at waiting, {now.waiting:,} batches: workers produce no more until these are trained on; the "
                f"learner's log is learn.log"
            )
        return f"look at rollouts, {now.rollouts:,}: no more are produced; the workers' logs are env-*.log"

    def _why_not_trained(self, then: RunSnapshot, now: RunSnapshot) -> str:
        learner = self._config.learner
        if now.skipped > then.skipped:
            return (
                f"look at skipped, {now.skipped - then.skipped:,} rollouts in this time: they were too old when the "
                f"learner reached them (learner.max_policy_lag {learner.max_policy_lag})"
            )
        if now.waiting:
            return (
                f"look at waiting, {now.waiting:,} batches: the learner takes none, or they are too few for a step "
                f"(learner.rollouts_per_step {learner.rollouts_per_step}); its log is learn.log"
            )
        return f"look at batches, {now.batches:,}: the learner has trained on all of them"

"""Warns if a run stalls, with nothing batched or nothing trained for a minute, and names the number to look at.

It takes snapshots of the run one after the other, with the time of a monotonic clock.
"""

import logging
import math

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.topics.logs import event
from rollstream.topics.metric_values import VALUES

logger = logging.getLogger(__name__)
STILL_S = 60.0
"""Time without a batch, or a step, after which the run is stalled."""
AGAIN_S = 300.0
"""Time until the warning is repeated."""


class StageWatch:
    """Tells when a run stalls for want of a step, and when it goes on: to people, in the log and at /metrics."""

    def __init__(self, run: str) -> None:
        self._run, self._stage = run, ""

    def look(self, now: RunSnapshot) -> str:
        """Return what is to be said now; mostly nothing."""
        VALUES.record("run", {"stalled": float(bool(now.stalled_stage))})
        if now.stalled_stage == self._stage:
            return ""
        self._stage = now.stalled_stage
        if not self._stage:
            event(logger, "run_steps_again", run=self._run, step=now.step)
            return "the run goes on"
        event(
            logger,
            "run_stalled",
            level=logging.WARNING,
            run=self._run,
            stage=self._stage,
            reason=now.stalled,
            step=now.step,
        )
        return f"warning: no step for long: look at {self._stage}: {now.stalled}"


class StallWatch:
    """Compares each snapshot with the one at which a batch, or a step, was last made."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._since: dict[str, tuple[float, RunSnapshot]] = {}
        self._warned_s: dict[str, float] = {}
        self._labeled = -math.inf, 0
        """Time when labelers last read a record, and how many they had read then."""

    def look(self, now: RunSnapshot, time_s: float) -> list[str]:
        """Return the warnings that are due now: one for each count that has stalled."""
        warnings = []
        if now.read_by_labelers != self._labeled[1]:
            self._labeled = time_s, now.read_by_labelers
        for count in ("batches", "step"):
            since_s, then = self._since.setdefault(count, (time_s, now))
            if getattr(now, count) != getattr(then, count):
                self._since[count] = (time_s, now)
                self._warned_s.pop(count, None)
            elif time_s - since_s >= STILL_S and time_s - self._warned_s.get(count, -AGAIN_S) >= AGAIN_S:
                self._warned_s[count] = time_s
                why = (
                    self._why_not_batched(then, now, time_s) if count == "batches" else self._why_not_trained(then, now)
                )
                done = "batched" if count == "batches" else "trained"
                warnings.append(f"warning: nothing was {done} for {time_s - since_s:.0f} s: {why}")
        return warnings

    def _why_not_batched(self, then: RunSnapshot, now: RunSnapshot, time_s: float) -> str:
        dropped = {reason: count - then.dropped.get(reason, 0) for reason, count in now.dropped.items()}
        if any(dropped.values()):
            reason = max(dropped, key=lambda reason: dropped[reason])
            return f"look at what is dropped, {dropped[reason]:,} since then as {reason}"
        if now.dead_lettered > then.dead_lettered:
            return (
                f"look at dead letters, {now.dead_lettered - then.dead_lettered:,} since then; "
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
                f"them; labelers' logs are label-*.log, and `rollstream label --run {now.run}` starts another"
            )
        if now.rollouts > then.rollouts or now.in_flight > then.in_flight:
            size = self._config.grouping.batch_rollouts
            return (
                f"look at in flight, {now.in_flight:,}: groups wait for members (worker.group_size "
                f"{self._config.worker.group_size}), or there are too few for a batch (grouping.batch_rollouts {size})"
            )
        if now.waiting:
            return (
                f"look at waiting, {now.waiting:,} batches: workers produce no more before these are trained on; the "
                f"learner's log is learn.log"
            )
        return f"look at rollouts, {now.rollouts:,}: none are produced; the workers' logs are env-*.log"

    def _why_not_trained(self, then: RunSnapshot, now: RunSnapshot) -> str:
        learner = self._config.learner
        if now.skipped > then.skipped:
            return (
                f"look at skipped, {now.skipped - then.skipped:,} rollouts since then: they were too old when the "
                f"learner came to them (learner.max_policy_lag {learner.max_policy_lag})"
            )
        if now.waiting:
            return (
                f"look at waiting, {now.waiting:,} batches: the learner takes none, or fewer than a step needs "
                f"(learner.rollouts_per_step {learner.rollouts_per_step}); its log is learn.log"
            )
        return f"look at batches, {now.batches:,}: the learner has trained on all there are"

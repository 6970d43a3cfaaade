"""Says when a run stands still, and which number to look at: nothing batched, or nothing trained, for a minute.

Pure: snapshots of the run go in, one after the other, with the time of a monotonic clock.
"""

from pipeline.config import RunConfig
from pipeline.flow import Snapshot

STILL_S = 60.0
"""How long nothing may be batched, or trained, before it is said."""
AGAIN_S = 300.0
"""How long until it is said again."""


class StallWatch:
    """Compares each snapshot with the one at which something was batched, or trained, last."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._since: dict[str, tuple[float, Snapshot]] = {}
        self._said: dict[str, float] = {}

    def look(self, now: Snapshot, time_s: float) -> list[str]:
        """What is to be said now: nothing, or a line for each of what stands still."""
        warnings = []
        for what in ("batches", "step"):
            since_s, then = self._since.setdefault(what, (time_s, now))
            if getattr(now, what) != getattr(then, what):
                self._since[what] = (time_s, now)
                self._said.pop(what, None)
            elif time_s - since_s >= STILL_S and time_s - self._said.get(what, -AGAIN_S) >= AGAIN_S:
                self._said[what] = time_s
                why = self._why_not_batched(then, now) if what == "batches" else self._why_not_trained(then, now)
                done = "batched" if what == "batches" else "trained"
                warnings.append(f"warning: nothing was {done} for {time_s - since_s:.0f} s: {why}")
        return warnings

    def _why_not_batched(self, then: Snapshot, now: Snapshot) -> str:
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

    def _why_not_trained(self, then: Snapshot, now: Snapshot) -> str:
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

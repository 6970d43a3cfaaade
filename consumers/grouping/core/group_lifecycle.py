"""The groups of a partition from their first record to their end: opened, sealed, offered, batched or dropped.

Every offset that opens or joins a group is entered as unfinished, and gets its fate when its group finishes. Groups
that are read again were checked when they were first read, so the finished groups are not consulted for them. This
module is part of the pure fold.
"""

from collections.abc import Iterable
from typing import Literal

from rollstream.consumers.grouping.config import GroupingConfig, milliseconds
from rollstream.consumers.grouping.core import batch_assembly, group_tables
from rollstream.consumers.grouping.core.delivery import BatchDelivery
from rollstream.consumers.grouping.core.drop_rules import (
    Clocks,
    Rejection,
    content_rejection,
    deadline_rejection,
    sealed_rejection,
    superseded_by,
)
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.estimators import Estimator, estimator
from rollstream.consumers.grouping.core.group_tables import FinishedGroups, LiveGroups
from rollstream.consumers.grouping.core.groups import DeadlineKind, Deadlines, Group, GroupKey, Member, Stage
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout, details_of
from rollstream.consumers.grouping.core.limits import Rates
from rollstream.consumers.grouping.core.offset_tracker import OffsetTracker
from rollstream.consumers.grouping.core.plug_ins import PlugIns
from rollstream.consumers.grouping.core.task_state import Replay, TaskState
from rollstream.topics.records import GroupCancelled, RateLevel, Rollout
from rollstream.topics.wire.codec import decode_as, frame_of
from rollstream.topics.wire.rl_examples import Source


class GroupLifecycle:
    """Groups, their deadlines and batches, and the finished groups that are remembered."""

    def __init__(self, state: TaskState, replay: Replay, tracker: OffsetTracker, plug_ins: PlugIns) -> None:
        """Begin at the watermark of `state`; `tracker` gets the fates and batches."""
        config = GroupingConfig.from_json(state.watermark_configuration)
        self.clocks = Clocks(state.watermark_stream_time_ms, state.watermark_policy_version, config)
        self._partition = state.partition
        self._replay = replay
        self._tracker = tracker
        self._live = LiveGroups()
        self._deadlines = Deadlines()
        self._finished = FinishedGroups(state.remembered_since_ms, state.finished_groups)
        self._delivery = BatchDelivery(self._partition, state.batch_number, state.delivered, config, plug_ins)
        self._rates = Rates(state.rates)
        self._estimators = plug_ins.estimators
        self._keeps_details = any(each.details for each in self._estimators.values())
        for name in config.estimator_names:
            estimator(name, self._estimators)  # An unknown name fails here, before any record is read.

    # ------------------------------------------------------------------ admission

    def join(self, record: InputRecord, rollout: HeldRollout, before: Clocks) -> None:
        """Let a valid rollout open or join its group, or drop it; `before` holds the clocks before it was read."""
        key = GroupKey(rollout.environment, rollout.example_id, rollout.policy_version, rollout.group_id)
        rejection = self._membership_rejection(key, rollout)
        if rejection is not None:
            self._tracker.drop(record.offset, rejection, rollout)
            return
        group = self._live.open.get(key) or self._open(key, record.offset, rollout.group_size)
        source = Source(self._partition, record.offset, rollout.uid)
        rest = rollout.trimmed(self.clocks.config.token_arrays)
        size_bytes = group_tables.member_cost(rest)
        if self._keeps_details:
            # Whatever the configuration is: another one may be in force when the group seals.
            details = details_of(decode_as(Rollout, record.value or b""))
            rest = rest._replace(details=details)
            if self._estimator_of(key.environment).details:
                size_bytes += group_tables.details_cost(details)
        group.add(Member(source, rest, size_bytes, self.clocks.stream_time_ms))
        self._live.hold(group, size_bytes)
        self._tracker.admit(record.offset, before)
        if exceeded := self._rate_exceeded(key.environment, record):
            self._drop(group, Rejection("quota", f"the environment exceeds grouping.quotas {exceeded}"))
        elif group.complete:
            self._seal(group)
        self._shed(key.environment)

    def cancel(self, record: InputRecord, cancelled: GroupCancelled, before: Clocks) -> None:
        """Remove the cancelled members from their group, which is opened if necessary; `before` is as for `join`."""
        key = GroupKey(cancelled.environment, cancelled.example_id, cancelled.policy_version, cancelled.group_id)
        group = self._live.open.get(key)
        if group is None and (self._live.sealed(key) is not None or self._is_finished(key)):
            self._tracker.finish_control(record.offset, key.environment)
            return
        group = group or self._open(key, record.offset, cancelled.group_size)
        if not group.cancel(cancelled.uids):
            self._tracker.finish_control(record.offset, key.environment)
            return
        group.control_offsets.append(record.offset)
        self._tracker.admit(record.offset, before)
        self._live.hold(group, group_tables.cancellation_cost(cancelled.uids))
        if group.expected <= 0:
            self._drop(group, Rejection("cancelled", "every member was cancelled"))
        elif group.complete:
            self._seal(group)
        self._shed(key.environment)

    def _rate_exceeded(self, environment: str, record: InputRecord) -> str:
        """Return the rate quota that a member exceeds, "" if none; a member that is read again is not counted again."""
        quota = self.clocks.config.quotas_by_environment.get(environment)
        if quota is None or not self._replay.ended:
            return ""
        return self._rates.exceeded(environment, quota, len(frame_of(record.value or b"")), record.timestamp_ms)

    def _membership_rejection(self, key: GroupKey, rollout: HeldRollout) -> Rejection | None:
        """Reject a valid rollout that cannot join its group."""
        if (group := self._live.open.get(key)) is not None:
            refusal = group.refusal(rollout)
            return Rejection(*refusal) if refusal else None
        if (sealed := self._live.sealed(key)) is not None:
            return Rejection("duplicate_uid" if rollout.uid in sealed.members else "late", f"group {key} is sealed")
        if self._is_finished(key):
            return Rejection("late", f"group {key} is finished")
        return None

    def _is_finished(self, key: GroupKey) -> bool:
        """Whether a group is finished; False while restoring, because the records being read preceded its end."""
        return self._replay.ended and key in self._finished

    def _open(self, key: GroupKey, offset: int, size: int) -> Group:
        group = Group(key, offset, self.clocks.stream_time_ms, size)
        self._live.add_open(group)
        self._live.hold(group, group_tables.group_cost(key))
        self._set_deadline(self.clocks.config.group_deadline_s, DeadlineKind.OPEN, group)
        return group

    def _shed(self, environment: str) -> None:
        """Drop groups, oldest incomplete first, until the environment is within its quotas and the partition within its
        capacity."""
        if (quota := self.clocks.config.quotas_by_environment.get(environment)) is not None:
            while (beyond := self._live.beyond(environment, quota)) is not None:
                oldest, exceeded = beyond
                self._drop(oldest, Rejection("quota", f"the environment exceeds grouping.quotas {exceeded}"))
        capacity_bytes = self.clocks.config.capacity_bytes
        while self._live.held_bytes > capacity_bytes:
            group = self._live.next_to_shed
            if group is None:
                return  # Only groups on their way into a batch are left, and batches have a separate limit.
            self._drop(group, Rejection("capacity", f"the partition holds more than {capacity_bytes} bytes"))

    # ------------------------------------------------------------------ clocks

    def advance_time(self, stream_time_ms: int) -> None:
        """Move stream time forward, and act on the deadlines that are due."""
        self.clocks = Clocks(stream_time_ms, self.clocks.policy_version, self.clocks.config)
        self.forget_finished()
        while (due := self._deadlines.pop(stream_time_ms)) is not None:
            kind, group = due
            if kind is DeadlineKind.BATCH_AGE:
                # Full batches first: if many groups came at once, a batch of all rollouts would exceed the size.
                self.cut("size")
                if group.stage is Stage.OFFERED:
                    self.cut("age")
            elif (rejection := deadline_rejection(kind, group, self.clocks)) is not None:
                self._drop(group, rejection)
            elif kind is DeadlineKind.OPEN:
                self._seal(group)

    def advance_policy(self, policy_version: int) -> None:
        """Move the policy clock forward: drop sealed groups that are stale now, and offer groups that waited for it."""
        self.clocks = self.clocks._replace(policy_version=policy_version)
        self._recheck_sealed()
        for group in self._live.release(policy_version):
            self._offer(group)

    def configure(self, config: GroupingConfig) -> None:
        """Put another configuration in force, also for the groups that are sealed."""
        self.clocks = self.clocks._replace(config=config)
        if self._replay.ended:
            self._rates.keep(config.quotas_by_environment)
        self.forget_finished()
        self._delivery.configure(config)
        for group in self._live.all_sealed():
            self._watch_age(group)
        self._recheck_sealed()
        # The new configuration may also supersede older versions that sealed before it.
        for group in self._live.all_sealed():
            if (rejection := self._superseded(group.key)) is not None:
                self._drop(group, rejection)

    def forget_finished(self) -> None:
        """Forget the finished groups that are older than the horizon or that exceed the memory for finished groups."""
        self._finished.forget_before(self.clocks.stream_time_ms - milliseconds(self.clocks.config.horizon_s))
        self._shrink_finished()

    def _shrink_finished(self) -> None:
        # Not while restoring: groups over the limit were already forgotten when the records were first read.
        if self._replay.ended:
            self._finished.shrink_to(self.clocks.config.remembered_bytes)

    def _recheck_sealed(self) -> None:
        for group in self._live.all_sealed():
            if (rejection := sealed_rejection(group, self.clocks)) is not None:
                self._drop(group, rejection)

    def _set_deadline(self, after_s: float, kind: DeadlineKind, group: Group) -> None:
        self._deadlines.add(self.clocks.stream_time_ms + milliseconds(after_s), kind, group)

    def _watch_age(self, group: Group) -> None:
        max_age_s = self.clocks.config.max_age_s
        if max_age_s >= 0:
            self._deadlines.add(group.opened_ms + milliseconds(max_age_s) + 1, DeadlineKind.AGE, group)

    # ------------------------------------------------------------------ sealing

    def _seal(self, group: Group) -> None:
        key, config = group.key, self.clocks.config
        self._live.close(group)
        group.sealed_ms = self.clocks.stream_time_ms
        group.batch_bytes = batch_assembly.batch_bytes(group)
        how = self._estimator_of(key.environment)
        episodes = batch_assembly.group_episodes(group, details=how.details)
        rejection = (
            sealed_rejection(group, self.clocks)
            or self._superseded(key)
            or content_rejection(group, episodes.outcomes, config, how)
        )
        if rejection is not None:
            self._drop(group, rejection)
            return
        group.estimator = config.estimator_of(key.environment)
        group.advantages = batch_assembly.member_advantages(group, episodes, how)
        self._live.add_sealed(group)
        self._watch_age(group)
        if key.policy_version > self.clocks.policy_version:
            self._live.wait(group)
            self._set_deadline(config.future_deadline_s, DeadlineKind.FUTURE, group)
        else:
            self._offer(group)

    def _estimator_of(self, environment: str) -> Estimator:
        return estimator(self.clocks.config.estimator_of(environment), self._estimators)

    def _superseded(self, key: GroupKey) -> Rejection | None:
        """Reject a group if a newer version of its example sealed before; never while restoring."""
        if not self._delivery.latest_version_only or not self._replay.ended:
            return None
        newest = self._finished.newest_sealed(key.environment, key.example_id)
        return superseded_by(newest, before=True) if newest > key.policy_version else None

    def _offer(self, group: Group) -> None:
        """Offer a group to the batch maker, and drop the older versions of its example; those that seal later are
        dropped then."""
        if self._delivery.latest_version_only:
            for older in self._live.older_versions(group.key):
                self._drop(older, superseded_by(group.key.policy_version))
        group.supersedes_ms = self.clocks.stream_time_ms
        self._finished.add_sealed(group.key, group.supersedes_ms)
        self._delivery.offer(group)
        self._set_deadline(self.clocks.config.max_batch_age_s, DeadlineKind.BATCH_AGE, group)

    # ------------------------------------------------------------------ ends

    def cancel_open(self) -> None:
        """Drop the groups that await more members: at a drain, no producer is left to send them."""
        for group in [*self._live.open.values()]:
            self._drop(group, Rejection("cancelled", "the run was drained before every member had come"))

    def drain(self) -> None:
        """Cut batches of all rollouts that the batch maker holds."""
        self.cut("size")
        self.cut("drain")

    def cut(self, why: Literal["size", "age", "drain"]) -> None:
        """Cut the batches that are due, and finish the groups all of whose members have a fate."""
        if why == "size" and self._delivery.untouched:
            return
        while (cut := self._delivery.cut(why, self.clocks.stream_time_ms)) is not None:
            self._tracker.add_batch(cut.batch)
            self._finish_decided(cut.groups)
        self._finish_decided(self._delivery.take_discarded())

    def _finish_decided(self, groups: Iterable[Group]) -> None:
        for group in dict.fromkeys(groups):
            if group.stage is not Stage.FINISHED and len(group.fates) == len(group.members):
                self._finish(group, group.fates, "")

    def _drop(self, group: Group, rejection: Rejection) -> None:
        """Drop the members of a group that have no fate yet."""
        offsets = (member.source.offset for member in group.members.values())
        fates = {offset: group.fates.get(offset, rejection.reason) for offset in offsets}
        self._finish(group, fates, rejection.detail)

    def _finish(self, group: Group, fates: dict[int, str], detail: str) -> None:
        now_ms = self.clocks.stream_time_ms
        self._delivery.withdraw(group)
        self._live.remove(group)
        self._deadlines.forget(group)
        self._finished.add(group.key, now_ms)
        self._shrink_finished()
        self._tracker.finish_group(group, fates, detail, now_ms)

    # ------------------------------------------------------------------ state

    @property
    def open_groups(self) -> int:
        """Number of groups that collect members."""
        return len(self._live.open)

    @property
    def held_bytes(self) -> int:
        """Memory that unfinished groups take, as grouping.capacity_bytes counts it."""
        return self._live.held_bytes

    @property
    def next_deadline_ms(self) -> int | None:
        """Stream time of the next deadline; None if there is none."""
        return self._deadlines.next_ms

    @property
    def batch_number(self) -> int:
        """Number of the next batch."""
        return self._delivery.batch_number

    @property
    def remembered_since_ms(self) -> int:
        """Stream time before which finished groups are forgotten."""
        return self._finished.since_ms

    @property
    def rate_levels(self) -> tuple[RateLevel, ...]:
        """Levels of the rate quotas."""
        return self._rates.levels

    def partly_delivered(self) -> list[int]:
        """Return the offsets that a batch carries, although their groups are not finished."""
        return self._delivery.partly_delivered()

"""The fold: from the records of one partition of `rollouts` to batches, drops and state. Pure.

No clock, no I/O, no randomness of its own: stream time is the running maximum of append times, and everything else
that moves it is a record (marks). Running, restoring, replaying and verifying are this one function of the log.

Rules that make restoring exact (each is needed; see docs/decisions/0002-the-log-is-the-state.md):
an offset that opened or joined a group finishes only with its group, others finish alone; every record of a re-read
range advances stream time and marks apply, but only unfinished offsets are admitted, and the memory of finished groups
is not consulted for them; re-reading has no effects.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

from consumers.grouping import assemble
from consumers.grouping.batch_maker import MAKERS, MakerContext, MakerFactory, SealedGroup, batch_maker
from consumers.grouping.changes import (
    BATCHED,
    CONTROL,
    CORE_VERSION,
    DEAD_LETTERED,
    DROPPED,
    Changes,
    DeadLetter,
    Output,
    Record,
)
from consumers.grouping.config import GroupingConfig
from consumers.grouping.estimators import estimator
from consumers.grouping.groups import Group, GroupKey, Member
from consumers.grouping.memory import Memory
from consumers.grouping.runs import to_runs
from consumers.grouping.state import TaskState
from topics import codec
from topics.errors import ConfigurationError, RecordError, StateRefused
from topics.examples import RLExample, Source
from topics.keys import encode_key, partition_of
from topics.records import Drop, FateCount, FinishedGroup, FinishedOffsets, GroupCancelled, JournalRecord, Mark, Rollout
from topics.validation import cancellation_problems, problems

_OPEN, _FUTURE, _AGE, _BATCH_AGE = range(4)
"""What falls due: an open group, a group waiting for the policy clock, a group's age, the oldest group's wait."""


@cache
def _mark_frames() -> tuple[bytes, ...]:
    return tuple(codec.MAGIC + schema.fingerprint for schema in codec.schemas()["Mark"])


def check_names(config: GroupingConfig, makers: Mapping[str, MakerFactory] = MAKERS) -> None:
    """Raise ConfigurationError unless the estimator and the maker of a configuration exist."""
    estimator(config.estimator)
    batch_maker(config.maker, MakerContext(partition=0, seed=config.seed, batch_bytes=config.batch_bytes), makers)


class _Before(NamedTuple):
    """The scalars as they were before a record was read."""

    stream_time_ms: int
    policy_version: int
    config: GroupingConfig


class Fold:
    """State of one partition, advanced one record at a time."""

    def __init__(self, state: TaskState, makers: Mapping[str, MakerFactory] = MAKERS) -> None:
        """Take up `state`: `replay` the records from its watermark to its position, then `resume`, then `apply`.

        `makers` are the batch makers a configuration may name.
        """
        self._makers = makers
        self.partition = state.partition
        self.partitions = state.partitions
        self.topic_id = state.topic_id
        self.position = state.watermark
        self.stream_time_ms = state.watermark_stream_time_ms
        self.policy_version = state.watermark_policy_version
        self.config = GroupingConfig.from_json(state.watermark_configuration)
        self.sequence = state.sequence
        self.batch_number = state.batch_number
        self._target = state
        self._replaying = True
        self._awaited = set(state.unfinished)
        self._delivered_before = frozenset(state.delivered)
        self._counts = dict(state.counts)
        self._produced = dict(state.produced)
        self._memory = Memory(int(self.config.horizon_s * 1000))
        for group in state.finished_groups:
            key = GroupKey(group.environment, group.example_id, group.policy_version, group.group_id)
            self._memory.finish(key, group.finished_ms)
            if group.sealed_ms >= 0:
                self._memory.seal(key, group.sealed_ms)
        self._open: dict[GroupKey, Group] = {}
        self._opened: deque[Group] = deque()
        self._sealed: dict[GroupKey, Group] = {}
        self._waiting: dict[GroupKey, Group] = {}
        self._held: dict[int, Group] = {}
        self._offered: dict[Group, None] = {}
        self._deadlines: list[tuple[int, int, int, Group]] = []
        self._unfinished: dict[int, _Before] = {}
        self._unfinished_order: deque[int] = deque()
        self.held_bytes = 0
        self._make_maker()
        self._changes = Changes(begin=state.position)
        if not self._awaited and state.watermark == state.position:
            self.resume()

    # ------------------------------------------------------------------ reading

    def replay(self, record: Record) -> None:
        """Read a record again while restoring. Raises StateRefused when it has an effect: log and state disagree."""
        self._read(record, self._replay_admit)
        if self._changes.effects or self._changes.delivered:
            raise StateRefused(
                f"re-reading offset {record.offset} of rollouts[{self.partition}] had an effect it had not had before: "
                f"the journal is not of this log, or core version {CORE_VERSION} folds it otherwise; start a new run, "
                f"or go back to the version that wrote it"
            )

    def resume(self) -> None:
        """End restoring. Raises StateRefused unless every unfinished offset was met and the clocks agree."""
        target = self._target
        if self._awaited:
            raise StateRefused(
                f"rollouts[{self.partition}] no longer holds unfinished offsets {sorted(self._awaited)[:5]}; they were "
                f"deleted before they were batched, restore the topic or start a new run"
            )
        reached = (self.stream_time_ms, self.policy_version, self.config.generation)
        if reached != (target.stream_time_ms, target.policy_version, target.generation):
            raise StateRefused(
                f"re-reading rollouts[{self.partition}] gave stream time, policy version and generation {reached}, "
                f"the journal says {(target.stream_time_ms, target.policy_version, target.generation)}; the topic's "
                f"records are not those the journal was written for, restore the topic or start a new run"
            )
        self.position = target.position
        self._changes = Changes(begin=target.position)
        self._replaying = False
        self._memory.forget(self.stream_time_ms)

    def apply(self, record: Record) -> None:
        """Read the next record. Its effects are in the next `take`."""
        if self._replaying:
            raise StateRefused(f"rollouts[{self.partition}] is still being restored; call resume first")
        self._read(record, self._admit)

    def _read(self, record: Record, admit: Callable[[Record, _Before], None]) -> None:
        if record.offset < self.position:
            raise StateRefused(
                f"offset {record.offset} of rollouts[{self.partition}] was read already (position {self.position})"
            )
        before = _Before(self.stream_time_ms, self.policy_version, self.config)
        if record.timestamp_ms > self.stream_time_ms:
            self.stream_time_ms = record.timestamp_ms
            self._fire_deadlines()
        self.position = record.offset + 1
        admit(record, before)
        self._cut()

    def _replay_admit(self, record: Record, before: _Before) -> None:
        if record.offset in self._awaited:
            self._awaited.discard(record.offset)
            self._admit(record, before)
            if record.offset not in self._unfinished:
                raise StateRefused(
                    f"offset {record.offset} of rollouts[{self.partition}] was in flight, and is not any more"
                )
            return
        # Finished already: only what moves clocks and configuration matters, and only marks do.
        if record.value is not None and record.value.startswith(_mark_frames()):
            try:
                mark = codec.decode_as(Mark, record.value)
            except RecordError:
                return  # It went to dead letters when it was first read.
            self._apply_mark(mark)

    def _admit(self, record: Record, before: _Before) -> None:
        try:
            value = codec.decode(record.value)
        except RecordError as error:
            self._count_produced("", 0)
            self._changes.dead_letters.append(DeadLetter(record, str(error)))
            self._finish(record.offset, DEAD_LETTERED, "", 0)
            return
        if isinstance(value, Mark):
            self._finish(record.offset, CONTROL, "", 0)
            self._apply_mark(value)
        elif isinstance(value, Rollout):
            self._count_produced(value.environment, len(value.tokens))
            self._admit_rollout(record, value, before)
        elif isinstance(value, GroupCancelled):
            self._admit_cancellation(record, value, before)
        else:
            self._count_produced("", 0)
            self._drop_alone(record, "invalid", f"a {type(value).__name__} does not belong in rollouts")

    # ------------------------------------------------------------------ admission

    def _admit_rollout(self, record: Record, rollout: Rollout, before: _Before) -> None:
        wrong = self._misplaced(record, rollout)
        if wrong:
            self._drop_alone(record, wrong[0], wrong[1], rollout)
            return
        key = GroupKey(rollout.environment, rollout.example_id, rollout.policy_version, rollout.group_id)
        group = self._open.get(key)
        if group is None:
            sealed = self._sealed.get(key)
            if sealed is not None:
                reason = "duplicate_uid" if rollout.uid in sealed.members else "late"
                self._drop_alone(record, reason, f"group {key} is sealed", rollout)
                return
            if not self._replaying and self._memory.over(key):
                self._drop_alone(record, "late", f"group {key} is finished", rollout)
                return
            group = self._open_group(key, record.offset, rollout.group_size)
        elif rollout.uid in group.members:
            self._drop_alone(record, "duplicate_uid", f"uid {rollout.uid} is in group {key}", rollout)
            return
        elif rollout.uid in group.cancelled_uids:
            self._drop_alone(record, "cancelled", f"uid {rollout.uid} was cancelled before it came", rollout)
            return
        elif rollout.group_size != group.declared_size:
            detail = f"group_size {rollout.group_size}, where group {key} declared {group.declared_size}"
            self._drop_alone(record, "invalid", detail, rollout)
            return
        source = Source(self.partition, record.offset, rollout.uid)
        member = Member(source, rollout, len(record.value or b""), self.stream_time_ms)
        group.add(member)
        self.held_bytes += member.size_bytes
        self._unfinish(record.offset, before)
        if group.complete:
            self._seal(group)
        if self.held_bytes > self.config.capacity_bytes:
            self._shed()

    def _misplaced(self, record: Record, rollout: Rollout) -> tuple[str, str] | None:
        found = problems(rollout)
        if found:
            return "invalid", "; ".join(found)
        if record.key != encode_key(rollout.environment, rollout.example_id):
            return (
                "invalid",
                f"the record's key {record.key!r} is not that of {rollout.environment}/{rollout.example_id}",
            )
        if partition_of(record.key, self.partitions) != self.partition:
            return "wrong_partition", f"its key belongs on partition {partition_of(record.key, self.partitions)}"
        if rollout.sampling.filtered and not self.config.allow_filtered_sampling:
            return "invalid", (
                f"sampled with {rollout.sampling}; logprobs of filtered sampling cannot be trained on "
                f"(grouping.allow_filtered_sampling permits it)"
            )
        return None

    def _admit_cancellation(self, record: Record, cancelled: GroupCancelled, before: _Before) -> None:
        found = cancellation_problems(cancelled)
        if found:
            self._count_produced(cancelled.environment, 0)
            self._drop_alone(record, "invalid", "; ".join(found))
            return
        key = GroupKey(cancelled.environment, cancelled.example_id, cancelled.policy_version, cancelled.group_id)
        group = self._open.get(key)
        if group is None:
            if key in self._sealed or (not self._replaying and self._memory.over(key)):
                self._finish(record.offset, CONTROL, key.environment, 0)
                return
            group = self._open_group(key, record.offset, cancelled.group_size)
        if not group.cancel(cancelled.uids):
            self._finish(record.offset, CONTROL, key.environment, 0)
            return
        group.control_offsets.append(record.offset)
        self._unfinish(record.offset, before)
        if group.expected <= 0:
            self._drop_group(group, "cancelled", "every member was cancelled")
        elif group.complete:
            self._seal(group)

    def _open_group(self, key: GroupKey, offset: int, size: int) -> Group:
        group = Group(key, offset, self.stream_time_ms, size)
        self._open[key] = group
        self._opened.append(group)
        self._deadline(self.config.group_deadline_s, _OPEN, group)
        return group

    def _apply_mark(self, mark: Mark) -> None:
        if mark.kind == "configuration":
            self._configure(mark)
        if mark.policy_version > self.policy_version:
            self.policy_version = mark.policy_version
            self._judge_sealed()
            self._release()
        if mark.kind == "drain":
            self._cut_all("drain")

    def _configure(self, mark: Mark) -> None:
        try:
            config = GroupingConfig.from_json(mark.configuration)
            check_names(config, self._makers)
        except ConfigurationError:
            return  # Whoever wrote it cannot have run it: tasks check what they write.
        if mark.generation <= self.config.generation or config.generation != mark.generation:
            return
        remake = (config.maker, config.seed, config.batch_bytes) != (
            self.config.maker,
            self.config.seed,
            self.config.batch_bytes,
        )
        self.config = config
        self._memory.horizon_ms = int(config.horizon_s * 1000)
        if remake:
            self._make_maker()
            for group in self._offered:
                self._give(group)
        self._judge_sealed()

    # ------------------------------------------------------------------ time

    def _deadline(self, after_s: float, kind: int, group: Group) -> None:
        heapq.heappush(self._deadlines, (self.stream_time_ms + int(after_s * 1000), kind, group.opened_offset, group))

    @property
    def next_deadline_ms(self) -> int | None:
        """Stream time at which something is due if nothing else happens; None when nothing is."""
        while self._deadlines and not self._alive(*self._deadlines[0][1:]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _alive(self, kind: int, _offset: int, group: Group) -> bool:
        if kind == _OPEN:
            return self._open.get(group.key) is group
        if kind == _FUTURE:
            return self._waiting.get(group.key) is group
        if kind == _BATCH_AGE:
            return group in self._offered
        return self._sealed.get(group.key) is group

    def _fire_deadlines(self) -> None:
        self._memory.forget(self.stream_time_ms)
        while (due_ms := self.next_deadline_ms) is not None and due_ms <= self.stream_time_ms:
            _due, kind, _offset, group = heapq.heappop(self._deadlines)
            if kind == _OPEN:
                least = self.config.min_group_size or group.expected
                if group.complete_episodes >= least:
                    self._seal(group)
                else:
                    self._drop_group(
                        group, "group_too_small", f"{group.complete_episodes} of {least} members at the deadline"
                    )
            elif kind == _FUTURE:
                self._drop_group(
                    group, "future_version", f"the policy clock stayed at {self.policy_version} until the deadline"
                )
            elif kind == _AGE:
                self._drop_group(group, "too_old", f"not batched within {self.config.max_age_s:g} s of stream time")
            else:
                self._cut_all("age")

    # ------------------------------------------------------------------ sealing

    def _seal(self, group: Group) -> None:
        key = group.key
        del self._open[key]
        group.sealed_ms = self.stream_time_ms
        self._sealed[key] = group
        self._memory.seal(key, self.stream_time_ms)
        reason = self._judge(group) or self._judge_content(group)
        if reason is not None:
            self._drop_group(group, *reason)
            return
        if self.config.drop_superseded:
            for other in [g for g in self._sealed.values() if g.key[:2] == key[:2]]:
                if other.key.policy_version < key.policy_version:
                    self._drop_group(other, "superseded_version", f"version {key.policy_version} of it sealed")
        if self.config.max_age_s >= 0:
            due_ms = group.opened_ms + int(self.config.max_age_s * 1000)
            heapq.heappush(self._deadlines, (due_ms, _AGE, group.opened_offset, group))
        if key.policy_version > self.policy_version:
            self._waiting[key] = group
            self._deadline(self.config.future_deadline_s, _FUTURE, group)
        else:
            self._offer(group)

    def _judge(self, group: Group) -> tuple[str, str] | None:
        """Why a sealed group must go by what can change after sealing: exclusion, staleness, age, newer versions."""
        config, key = self.config, group.key
        if key.environment in config.exclude_environments:
            return "excluded", f"environment {key.environment} is excluded"
        for member in group.members.values():
            if member.rollout.metadata.worker_id in config.exclude_workers:
                return "excluded", f"worker {member.rollout.metadata.worker_id} is excluded"
        lag = self.policy_version - group.lowest_version
        if 0 <= config.max_policy_lag < lag:
            return "stale_version", f"sampled {lag} versions before {self.policy_version}"
        if 0 <= config.max_age_s * 1000 < self.stream_time_ms - group.opened_ms:
            return "too_old", f"opened {(self.stream_time_ms - group.opened_ms) / 1000:g} s of stream time ago"
        return None

    def _judge_content(self, group: Group) -> tuple[str, str] | None:
        """Why a group must go by what it holds, decided once, at sealing; sets its advantages otherwise."""
        if group.complete_episodes < self.config.min_group_size:
            return "group_too_small", f"{group.complete_episodes} of {self.config.min_group_size} members"
        if self.config.drop_superseded and not self._replaying:
            newest = self._memory.newest_sealed(group.key.environment, group.key.example_id)
            if newest > group.key.policy_version:
                return "superseded_version", f"version {newest} of it sealed before"
        rewards = [m.rollout.reward for m in group.members.values()]
        if max(rewards) == min(rewards):
            return "zero_variance", f"every reward is {rewards[0]:g}"
        size_bytes = sum(m.size_bytes for m in group.members.values())
        if size_bytes > self.config.batch_bytes:
            return "too_large", f"the group's {size_bytes} bytes exceed grouping.batch_bytes {self.config.batch_bytes}"
        group.advantages = tuple(estimator(self.config.estimator)(rewards))
        return None

    def _judge_sealed(self) -> None:
        for group in list(self._sealed.values()):
            reason = self._judge(group)
            if reason is not None:
                self._drop_group(group, *reason)

    def _release(self) -> None:
        for group in [g for g in self._waiting.values() if g.key.policy_version <= self.policy_version]:
            del self._waiting[group.key]
            self._offer(group)

    def _shed(self) -> None:
        """Drop groups, oldest incomplete first, until the partition is within its capacity."""
        while self.held_bytes > self.config.capacity_bytes:
            while self._opened and self._open.get(self._opened[0].key) is not self._opened[0]:
                self._opened.popleft()
            victim = self._opened[0] if self._opened else next(iter(self._waiting.values()), None)
            if victim is None:
                return  # What remains is on its way into a batch, which is bounded by itself.
            self._drop_group(victim, "capacity", f"the partition holds more than {self.config.capacity_bytes} bytes")

    # ------------------------------------------------------------------ batches

    def _make_maker(self) -> None:
        context = MakerContext(partition=self.partition, seed=self.config.seed, batch_bytes=self.config.batch_bytes)
        self._maker = batch_maker(self.config.maker, context, self._makers)
        self._maker.batch_number = self.batch_number

    def _offer(self, group: Group) -> None:
        self._offered[group] = None
        self._deadline(self.config.max_batch_age_s, _BATCH_AGE, group)
        for member in group.members.values():
            self._held[member.source.offset] = group
        self._give(group)

    def _give(self, group: Group) -> None:
        key = group.key
        sealed = SealedGroup(
            environment=key.environment,
            example_id=key.example_id,
            policy_version=key.policy_version,
            group_id=key.group_id,
            rewards=tuple(m.rollout.reward for m in group.members.values()),
            advantages=group.advantages,
            sealed_ms=group.sealed_ms,
        )
        for member, advantage in zip(group.members.values(), group.advantages, strict=True):
            offset = member.source.offset
            if offset in self._delivered_before:
                group.fates[offset] = BATCHED
                self._held.pop(offset, None)
            elif offset not in group.fates:
                self._maker.add_rollout(assemble.example(member, advantage), sealed)

    def _cut(self) -> None:
        while (examples := self._maker.create_batch(self.config.batch_rollouts)) is not None:
            self._deliver(examples, "size")
        self._collect_discarded()

    def _cut_all(self, cut: Literal["age", "drain"]) -> None:
        while self._maker.held and (examples := self._maker.create_batch(self._maker.held)) is not None:
            self._deliver(examples, cut)
        self._collect_discarded()

    def _deliver(self, examples: list[RLExample], cut: Literal["size", "age", "drain"]) -> None:
        groups = []
        for example in examples:
            group = self._held.pop(example.source.offset, None)
            if group is None:
                raise StateRefused(
                    f"batch maker {self.config.maker} delivered {example.source}, which it does not hold"
                )
            groups.append(group)
        metadata = self._maker.get_batch_metadata(examples)
        batch = assemble.batch(
            examples,
            groups,
            partition=self.partition,
            number=self.batch_number,
            core_version=CORE_VERSION,
            generation=self.config.generation,
            cut=cut,
            cut_ms=self.stream_time_ms,
            metadata=metadata,
        )
        self.batch_number += 1
        self._maker.batch_number = self.batch_number
        self._changes.batches.append(batch)
        for example, group in zip(examples, groups, strict=True):
            group.fates[example.source.offset] = BATCHED
            self._changes.delivered.append(example.source.offset)
        self._finish_decided(groups)

    def _collect_discarded(self) -> None:
        for source, reason in self._maker.take_discarded():
            group = self._held.pop(source.offset)
            group.fates[source.offset] = reason
            self._finish_decided([group])
        if self._maker.held != len(self._held):
            raise StateRefused(
                f"batch maker {self.config.maker} holds {self._maker.held} rollouts and was given {len(self._held)} "
                f"that it neither delivered nor reported; every rollout must be one of the three"
            )

    def _finish_decided(self, groups: Iterable[Group]) -> None:
        for group in dict.fromkeys(groups):
            if len(group.fates) == len(group.members):
                self._end_group(group, group.fates, "")

    # ------------------------------------------------------------------ ends

    def _drop_group(self, group: Group, reason: str, detail: str) -> None:
        undecided = [m.source for m in group.members.values() if m.source.offset in self._held]
        for source in undecided:
            del self._held[source.offset]
        if undecided:
            self._maker.discard(undecided)
        self._open.pop(group.key, None)
        fates = {m.source.offset: group.fates.get(m.source.offset, reason) for m in group.members.values()}
        self._end_group(group, fates, detail)

    def _end_group(self, group: Group, fates: dict[int, str], detail: str) -> None:
        key = group.key
        self._sealed.pop(key, None)
        self._waiting.pop(key, None)
        self._offered.pop(group, None)
        for member in group.members.values():
            fate = fates[member.source.offset]
            if fate == BATCHED:
                self._finish(member.source.offset, BATCHED, key.environment, len(member.rollout.tokens))
            else:
                self._drop(member, fate, detail)
        for member in group.cancelled_members:
            self._drop(member, "cancelled", "cancelled after it had come")
        for offset in group.control_offsets:
            self._finish(offset, CONTROL, key.environment, 0)
        self.held_bytes -= group.size_bytes
        self._memory.finish(key, self.stream_time_ms)
        self._changes.finished_groups.append(
            FinishedGroup(
                environment=key.environment,
                example_id=key.example_id,
                policy_version=key.policy_version,
                group_id=key.group_id,
                sealed_ms=group.sealed_ms,
                finished_ms=self.stream_time_ms,
            )
        )

    def _drop(self, member: Member, reason: str, detail: str) -> None:
        self._record_drop(member.source.offset, reason, detail, member.rollout, self.stream_time_ms - member.append_ms)

    def _drop_alone(self, record: Record, reason: str, detail: str, rollout: Rollout | None = None) -> None:
        self._record_drop(record.offset, reason, detail, rollout, 0)

    def _record_drop(self, offset: int, reason: str, detail: str, rollout: Rollout | None, age_ms: int) -> None:
        drop = Drop(offset=offset, reason=reason, detail=detail, age_ms=age_ms)
        if rollout is not None:
            drop = Drop(
                offset=offset,
                reason=reason,
                detail=detail,
                age_ms=age_ms,
                uid=rollout.uid,
                environment=rollout.environment,
                policy_version=rollout.policy_version,
                lowest_version=rollout.lowest_version,
                tokens=len(rollout.tokens),
            )
        self._changes.drops.append(drop)
        self._finish(offset, DROPPED, drop.environment, drop.tokens, f"{DROPPED}:{reason}")

    def _finish(self, offset: int, fate: str, environment: str, tokens: int, counted_as: str = "") -> None:
        self._unfinished.pop(offset, None)
        self._changes.finished.setdefault(fate, []).append(offset)
        key = (environment, counted_as or fate)
        rollouts, total = self._counts.get(key, (0, 0))
        self._counts[key] = (rollouts + 1, total + tokens)

    def _unfinish(self, offset: int, before: _Before) -> None:
        self._unfinished[offset] = before
        self._unfinished_order.append(offset)
        self._changes.admitted.append(offset)

    def _count_produced(self, environment: str, tokens: int) -> None:
        if not self._replaying:
            rollouts, total = self._produced.get(environment, (0, 0))
            self._produced[environment] = (rollouts + 1, total + tokens)

    # ------------------------------------------------------------------ state

    @property
    def replaying(self) -> bool:
        return self._replaying

    @property
    def changed(self) -> bool:
        """Whether there is anything to commit: records read since the last `take`."""
        return self.position != self._changes.begin

    @property
    def in_flight(self) -> int:
        """Offsets read and not finished."""
        return len(self._unfinished)

    @property
    def open_groups(self) -> int:
        return len(self._open)

    def take(self, *, snapshot: bool = False) -> Output:
        """The effects since the last call and the state they lead to, to be committed together."""
        changes, self._changes = self._changes, Changes(begin=self.position)
        while self._unfinished_order and self._unfinished_order[0] not in self._unfinished:
            self._unfinished_order.popleft()
        now = _Before(self.stream_time_ms, self.policy_version, self.config)
        watermark = self._unfinished_order[0] if self._unfinished_order else self.position
        before = self._unfinished.get(watermark, now)
        delivered: Iterable[int] = (o for o in changes.delivered if o in self._unfinished)
        if snapshot:
            partly = (g for g in self._sealed.values() if g.fates)
            delivered = [o for g in partly for o, fate in g.fates.items() if fate == BATCHED]
        journal = JournalRecord(
            partition=self.partition,
            sequence=self.sequence,
            core_version=CORE_VERSION,
            topic_id=self.topic_id,
            partitions=self.partitions,
            begin=changes.begin,
            position=self.position,
            watermark=watermark,
            watermark_stream_time_ms=before.stream_time_ms,
            watermark_policy_version=before.policy_version,
            watermark_generation=before.config.generation,
            watermark_configuration=before.config.to_json(),
            stream_time_ms=self.stream_time_ms,
            policy_version=self.policy_version,
            generation=self.config.generation,
            batch_number=self.batch_number,
            admitted=to_runs(o for o in changes.admitted if o in self._unfinished),
            finished=tuple(FinishedOffsets(fate=f, runs=to_runs(o)) for f, o in sorted(changes.finished.items())),
            drops=tuple(changes.drops),
            finished_groups=tuple(changes.finished_groups),
            batch_ids=tuple(b.batch_id for b in changes.batches),
            counts=tuple(
                FateCount(environment=e, fate=f, rollouts=n, tokens=t)
                for (e, f), (n, t) in sorted(self._counts.items())
            ),
            produced=tuple(
                FateCount(environment=e, fate="read", rollouts=n, tokens=t)
                for e, (n, t) in sorted(self._produced.items())
            ),
            snapshot=snapshot,
            unfinished=to_runs(self._unfinished) if snapshot else to_runs(()),
            delivered=to_runs(delivered),
        )
        self.sequence += 1
        return Output(journal, tuple(changes.batches), tuple(changes.dead_letters))

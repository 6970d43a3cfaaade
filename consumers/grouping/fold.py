"""The fold: from the records of one partition of `rollouts` to batches, drops and state. Pure.

No clock, no I/O, no randomness of its own: stream time is the running maximum of append times, and everything else
that moves it is a record (marks). Running, restoring, replaying and verifying are this one function of the log.

Rules that make restoring exact (each is needed; see docs/decisions/0002-the-log-is-the-state.md):
an offset that opened or joined a group finishes only with its group, others finish alone; every record of a re-read
range advances stream time and marks apply, but only unfinished offsets are admitted, and the memory of finished groups
is not consulted for them; re-reading has no effects.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from consumers.grouping import advantages, assemble, costs
from consumers.grouping.account import Account
from consumers.grouping.changes import CORE_VERSION, Output, Record
from consumers.grouping.config import GroupingConfig, milliseconds
from consumers.grouping.configuring import Judged, judge_mark
from consumers.grouping.deadlines import Deadlines, Due
from consumers.grouping.delivery import Delivery
from consumers.grouping.groups import Group, GroupKey, Member, Stage, kept
from consumers.grouping.judging import Clocks, Verdict, judge_content, judge_record, judge_sealed
from consumers.grouping.makers import MAKERS, MakerFactory
from consumers.grouping.memory import Memory
from consumers.grouping.state import TaskState
from topics import codec
from topics.errors import RecordError, StateRefused
from topics.examples import Source
from topics.records import FateCount, GroupCancelled, Mark, Rollout


class Fold:
    """State of one partition, advanced one record at a time."""

    def __init__(
        self,
        state: TaskState,
        makers: Mapping[str, MakerFactory] = MAKERS,
        skips: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Take up `state`: `replay` the records from its watermark to its position, then `resume`, then `apply`.

        `makers` are the batch makers a configuration may name, `skips` offsets to be left out unread, and why: those of
        them not read yet. Which were is in the journal, for whoever folds the log again.
        """
        self.partition = state.partition
        self.partitions = state.partitions
        self.position = state.watermark
        self.stream_time_ms = state.watermark_stream_time_ms
        self.policy_version = state.watermark_policy_version
        self.config = GroupingConfig.from_json(state.watermark_configuration)
        self.held_bytes = 0
        self._makers = makers
        self._skips = skips
        self._target = state
        self._replaying = True
        self._awaited = set(state.unfinished)
        self._account = Account(state)
        self._memory = Memory(state.remembered_since_ms)
        for group in state.finished_groups:
            key = GroupKey(group.environment, group.example_id, group.policy_version, group.group_id)
            self._memory.finish(key, group.finished_ms)
            if group.sealed_ms >= 0:
                self._memory.seal(key, group.sealed_ms)
        self._open: OrderedDict[GroupKey, Group] = OrderedDict()
        self._sealed: dict[GroupKey, Group] = {}
        self._sealed_by_example: dict[tuple[str, str], dict[GroupKey, Group]] = {}
        self._waiting: OrderedDict[GroupKey, Group] = OrderedDict()
        self._deadlines = Deadlines()
        self._delivery = Delivery(self.partition, state.batch_number, state.delivered, self.config, makers)
        if not self._awaited and state.watermark == state.position:
            self.resume()

    # ------------------------------------------------------------------ reading

    def replay(self, record: Record) -> None:
        """Read a record again while restoring. Raises StateRefused when it has an effect: log and state disagree."""
        if not self._replaying or record.offset >= self._target.position:
            raise StateRefused(
                f"offset {record.offset} of rollouts[{self.partition}] is not to be read again: the state was taken at "
                f"{self._target.position}"
            )
        self._read(record, self._replay_admit)
        if self._account.changes.effects:
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
        self._account.resume(target.position)
        self._replaying = False
        self._forget()

    def apply(self, record: Record) -> None:
        """Read the next record. Its effects are in the next `take`."""
        if self._replaying:
            raise StateRefused(f"rollouts[{self.partition}] is still being restored; call resume first")
        self._read(record, self._admit)

    def _read(self, record: Record, admit: Callable[[Record, Clocks], None]) -> None:
        if record.offset < self.position:
            raise StateRefused(
                f"offset {record.offset} of rollouts[{self.partition}] was read already (position {self.position})"
            )
        before = self._clocks
        if record.timestamp_ms > self.stream_time_ms:
            self.stream_time_ms = record.timestamp_ms
            self._forget()
            self._fire_deadlines()
        self.position = record.offset + 1
        if not self._is_skipped(record.offset):
            admit(record, before)
        elif not self._replaying:
            self._count_read("", 0)
            self._account.skip(record.offset, self._skips[record.offset])
        self._cut("size")

    def _is_skipped(self, offset: int) -> bool:
        return offset in (self._target.skipped if self._replaying else self._skips)

    def _replay_admit(self, record: Record, before: Clocks) -> None:
        if record.offset in self._awaited:
            self._awaited.discard(record.offset)
            self._admit(record, before)
            if record.offset not in self._account:
                raise StateRefused(
                    f"offset {record.offset} of rollouts[{self.partition}] was in flight, and is not any more"
                )
            return
        # Finished already: only what moves clocks and configuration matters, and only marks do.
        if record.value is not None and record.value.startswith(codec.frames("Mark")):
            try:
                mark = codec.decode_as(Mark, record.value)
            except RecordError:
                return  # It went to dead letters when it was first read.
            judged = self.judge(mark)
            if not judged.problem:
                self._obey(mark, judged.config)

    def _admit(self, record: Record, before: Clocks) -> None:
        try:
            value = codec.decode(record.value)
            verdict = self._judged(record, value)
        except RecordError as error:
            self._count_read("", 0)
            self._account.dead_letter(record, str(error))
            return
        if isinstance(value, Mark):
            self._admit_mark(record, value)
            return
        if isinstance(value, Rollout):
            self._count_read(value.environment, len(value.tokens))
        elif verdict is not None:
            self._count_read(value.environment if isinstance(value, GroupCancelled) else "", 0)
        if verdict is not None:
            self._account.drop(record.offset, verdict, value)
        elif isinstance(value, Rollout):
            self._admit_rollout(record, value, before)
        else:
            self._admit_cancellation(record, value, before)

    def _judged(self, record: Record, value: object) -> Verdict | None:
        """Why what is no mark cannot be grouped, by itself. Raises RecordError where judging it fails."""
        if isinstance(value, Mark):
            return None
        if not isinstance(value, Rollout | GroupCancelled):
            return Verdict("invalid", f"a {type(value).__name__} does not belong in rollouts")
        if self._replaying and isinstance(value, Rollout):
            return None  # What is read again was found sound when it was first read.
        try:
            return judge_record(record, value, self.partition, self.partitions, self.config)
        except Exception as error:
            # No bytes may end a task: it would meet them again at every start. Memory is no property of the record.
            if self.config.core_version < 3 or isinstance(error, MemoryError):
                raise
            raise RecordError(f"it cannot be judged ({type(error).__name__}: {error})"[:200]) from error

    # ------------------------------------------------------------------ admission

    def _admit_rollout(self, record: Record, rollout: Rollout, before: Clocks) -> None:
        key = GroupKey(rollout.environment, rollout.example_id, rollout.policy_version, rollout.group_id)
        verdict = self._refused(key, rollout)
        if verdict is not None:
            self._account.drop(record.offset, verdict, rollout)
            return
        group = self._open.get(key) or self._open_group(key, record.offset, rollout.group_size)
        source = Source(self.partition, record.offset, rollout.uid)
        rest = kept(rollout)
        size_bytes = costs.of_member(rest) if self.config.core_version >= 3 else len(record.value or b"")
        group.add(Member(source, rest, size_bytes, self.stream_time_ms))
        self._hold(group, size_bytes)
        self._account.admit(record.offset, before)
        if group.complete:
            self._seal(group)
        if self.held_bytes > self.config.capacity_bytes:
            self._shed()

    def _refused(self, key: GroupKey, rollout: Rollout) -> Verdict | None:
        """Why a sound rollout cannot join its group."""
        if (group := self._open.get(key)) is not None:
            refusal = group.refusal(rollout)
            return Verdict(*refusal) if refusal else None
        if (sealed := self._sealed.get(key)) is not None:
            return Verdict("duplicate_uid" if rollout.uid in sealed.members else "late", f"group {key} is sealed")
        if self._is_over(key):
            return Verdict("late", f"group {key} is finished")
        return None

    def _admit_cancellation(self, record: Record, cancelled: GroupCancelled, before: Clocks) -> None:
        key = GroupKey(cancelled.environment, cancelled.example_id, cancelled.policy_version, cancelled.group_id)
        group = self._open.get(key)
        if group is None and (key in self._sealed or self._is_over(key)):
            self._account.control(record.offset, key.environment)
            return
        group = group or self._open_group(key, record.offset, cancelled.group_size)
        if not group.cancel(cancelled.uids):
            self._account.control(record.offset, key.environment)
            return
        group.control_offsets.append(record.offset)
        self._account.admit(record.offset, before)
        if self.config.core_version >= 3:
            self._hold(group, costs.of_cancellation(cancelled.uids))
        if group.expected <= 0:
            self._drop_group(group, Verdict("cancelled", "every member was cancelled"))
        elif group.complete:
            self._seal(group)
        if self.config.core_version >= 3 and self.held_bytes > self.config.capacity_bytes:
            self._shed()

    def _is_over(self, key: GroupKey) -> bool:
        """Whether a group finished before; not asked of records read again, which came before it did."""
        return not self._replaying and self._memory.over(key)

    def _open_group(self, key: GroupKey, offset: int, size: int) -> Group:
        group = Group(key, offset, self.stream_time_ms, size)
        self._open[key] = group
        if self.config.core_version >= 3:
            self._hold(group, costs.of_group(key))
        self._due(self.config.group_deadline_s, Due.OPEN, group)
        return group

    def _hold(self, group: Group, size_bytes: int) -> None:
        group.size_bytes += size_bytes
        self.held_bytes += size_bytes

    def _count_read(self, environment: str, tokens: int) -> None:
        if not self._replaying:
            self._account.read(environment, tokens)

    # ------------------------------------------------------------------ marks and time

    def judge(self, mark: Mark) -> Judged:
        """What a mark would be if it were the next record. Raises StateRefused as `judge_mark` does."""
        return judge_mark(mark, self.config, self.policy_version, self._makers)

    def _admit_mark(self, record: Record, mark: Mark) -> None:
        judged = self.judge(mark)
        if judged.problem:
            self._count_read("", 0)
            self._account.drop(record.offset, Verdict("invalid", judged.problem))
            return
        self._account.control(record.offset)
        self._obey(mark, judged.config)

    def _obey(self, mark: Mark, config: GroupingConfig | None) -> None:
        if config is not None:
            self._configure(config)
        if mark.policy_version > self.policy_version:
            self.policy_version = mark.policy_version
            self._judge_sealed()
            self._release()
        if mark.kind == "drain":
            self._cut("drain")

    def _configure(self, config: GroupingConfig) -> None:
        self.config = config
        self._forget()
        self._delivery.configure(config)
        for group in self._sealed.values():
            self._watch_age(group)
        self._judge_sealed()
        if config.core_version >= 2:
            self._supersede_sealed()

    def _forget(self) -> None:
        self._memory.forget(self.stream_time_ms - milliseconds(self.config.horizon_s))
        self._forget_excess()

    def _forget_excess(self) -> None:
        """What is read again was remembered, and forgotten, when it was first read."""
        if self.config.core_version >= 3 and not self._replaying:
            self._memory.forget_excess(self.config.remembered_bytes)

    def _due(self, after_s: float, kind: Due, group: Group) -> None:
        self._deadlines.add(self.stream_time_ms + milliseconds(after_s), kind, group)

    def _watch_age(self, group: Group) -> None:
        if self.config.max_age_s >= 0:
            self._deadlines.add(group.opened_ms + milliseconds(self.config.max_age_s) + 1, Due.AGE, group)

    def _fire_deadlines(self) -> None:
        while (due := self._deadlines.pop(self.stream_time_ms)) is not None:
            kind, group = due
            if kind is Due.OPEN:
                least = self.config.min_group_size or group.expected
                if group.complete_episodes >= least:
                    self._seal(group)
                else:
                    detail = f"{group.complete_episodes} of {least} members at the deadline"
                    self._drop_group(group, Verdict("group_too_small", detail))
            elif kind is Due.FUTURE:
                detail = f"the policy clock stayed at {self.policy_version} until the deadline"
                self._drop_group(group, Verdict("future_version", detail))
            elif kind is Due.AGE:
                # The limit may have been raised since the deadline was set.
                verdict = judge_sealed(group, self._clocks)
                if verdict is not None:
                    self._drop_group(group, verdict)
            else:
                self._cut("age")

    # ------------------------------------------------------------------ sealing

    def _seal(self, group: Group) -> None:
        key = group.key
        del self._open[key]
        group.stage = Stage.WAITING
        group.sealed_ms = self.stream_time_ms
        group.batch_bytes = assemble.batch_bytes(group)
        if self._delivery.latest_version_only:
            self._supersede(key)
        found = advantages.judged(group, self.config.core_version)
        verdict = (
            judge_sealed(group, self._clocks)
            or self._superseded(key)
            or judge_content(group, found.outcomes, self.config)
        )
        self._memory.seal(key, self.stream_time_ms)
        if verdict is not None:
            self._drop_group(group, verdict)
            return
        group.estimator = self.config.estimator
        group.worths = advantages.worths(group, found, group.estimator, self.config.core_version)
        self._sealed[key] = group
        self._sealed_by_example.setdefault(key[:2], {})[key] = group
        self._watch_age(group)
        if key.policy_version > self.policy_version:
            self._waiting[key] = group
            self._due(self.config.future_deadline_s, Due.FUTURE, group)
        else:
            self._offer(group)

    def _supersede(self, key: GroupKey) -> None:
        """A group sealed: older sealed groups of its example go."""
        for other in list(self._sealed_by_example.get(key[:2], {}).values()):
            if other.key.policy_version < key.policy_version:
                self._drop_group(other, Verdict("superseded_version", f"version {key.policy_version} of it sealed"))

    def _superseded(self, key: GroupKey) -> Verdict | None:
        """Whether a newer group of the example sealed before; not asked of groups read again, which were kept."""
        if not self._delivery.latest_version_only or self._replaying:
            return None
        newest = self._memory.newest_sealed(key.environment, key.example_id)
        if newest <= key.policy_version:
            return None
        return Verdict("superseded_version", f"version {newest} of it sealed before")

    def _supersede_sealed(self) -> None:
        """A configuration may have older versions go: those, too, that sealed before it."""
        for group in list(self._sealed.values()):
            if (verdict := self._superseded(group.key)) is not None:
                self._drop_group(group, verdict)

    def _judge_sealed(self) -> None:
        for group in list(self._sealed.values()):
            verdict = judge_sealed(group, self._clocks)
            if verdict is not None:
                self._drop_group(group, verdict)

    def _release(self) -> None:
        for group in [g for g in self._waiting.values() if g.key.policy_version <= self.policy_version]:
            del self._waiting[group.key]
            self._offer(group)

    def _offer(self, group: Group) -> None:
        self._delivery.offer(group)
        self._due(self.config.max_batch_age_s, Due.BATCH_AGE, group)

    def _shed(self) -> None:
        """Drop groups, oldest incomplete first, until the partition is within its capacity."""
        while self.held_bytes > self.config.capacity_bytes:
            victim = next(iter(self._open.values()), None) or next(iter(self._waiting.values()), None)
            if victim is None:
                return  # What remains is on its way into a batch, which is bounded by itself.
            detail = f"the partition holds more than {self.config.capacity_bytes} bytes"
            self._drop_group(victim, Verdict("capacity", detail))

    # ------------------------------------------------------------------ batches and ends

    def _cut(self, why: Literal["size", "age", "drain"]) -> None:
        while (delivered := self._delivery.cut(why, self.stream_time_ms)) is not None:
            self._account.batch(delivered.batch)
            self._end_decided(delivered.groups)
        self._end_decided(self._delivery.take_discarded())

    def _end_decided(self, groups: Iterable[Group]) -> None:
        for group in dict.fromkeys(groups):
            if group.stage is not Stage.OVER and len(group.fates) == len(group.members):
                self._end_group(group, group.fates, "")

    def _drop_group(self, group: Group, verdict: Verdict) -> None:
        """Drop what is not yet decided of a group."""
        offsets = (member.source.offset for member in group.members.values())
        fates = {offset: group.fates.get(offset, verdict.reason) for offset in offsets}
        self._end_group(group, fates, verdict.detail)

    def _end_group(self, group: Group, fates: dict[int, str], detail: str) -> None:
        key = group.key
        self._delivery.withdraw(group)
        self._open.pop(key, None)
        self._waiting.pop(key, None)
        if self._sealed.pop(key, None) is not None:
            of_example = self._sealed_by_example[key[:2]]
            del of_example[key]
            if not of_example:
                del self._sealed_by_example[key[:2]]
        group.stage = Stage.OVER
        self._deadlines.forget(group)
        self.held_bytes -= group.size_bytes
        self._memory.finish(key, self.stream_time_ms)
        self._forget_excess()
        self._account.end(group, fates, detail, self.stream_time_ms)

    # ------------------------------------------------------------------ state

    @property
    def _clocks(self) -> Clocks:
        return Clocks(self.stream_time_ms, self.policy_version, self.config)

    @property
    def replaying(self) -> bool:
        return self._replaying

    @property
    def changed(self) -> bool:
        """Whether there is anything to commit: records read since the last `take`."""
        return self.position != self._account.changes.begin

    @property
    def batch_number(self) -> int:
        """Number the next batch gets."""
        return self._delivery.batch_number

    @property
    def in_flight(self) -> int:
        """Offsets read and not finished."""
        return len(self._account)

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Records that have their fate, by environment and fate, since the start of the run."""
        return self._account.counts

    @property
    def open_groups(self) -> int:
        return len(self._open)

    @property
    def next_deadline_ms(self) -> int | None:
        """Stream time at which something is due if nothing else happens; None when nothing is."""
        return self._deadlines.next_ms

    def take(self, *, snapshot: bool = False) -> Output:
        """The effects since the last call and the state they lead to, to be committed together."""
        partly = self._delivery.partly_delivered() if snapshot else None
        return self._account.take(self.position, self._clocks, self.batch_number, self._memory.since_ms, partly)

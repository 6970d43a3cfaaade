"""The fold: a pure function from the records of one partition of `rollouts` to batches, drops and state.

It has no clock, no I/O and no randomness: stream time is the running maximum of append times, and every other input is
a record, such as a mark. Running, restoring, replaying and verifying all apply this function to the log.

These rules make restoring exact; each is needed (docs/decisions/0002-the-log-is-the-state.md). An offset that opened
or joined a group finishes only with its group; other offsets finish alone. Every record that is read again advances
stream time, and marks apply again, but only unfinished offsets are admitted, and finished groups are not consulted.
Reading a record again has no effects.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import Change, MarkOutcome, content_outcome, mark_outcome
from rollstream.consumers.grouping.core.drop_rules import (
    Clocks,
    Rejection,
    content_of,
    foreign_rejection,
    value_rejection,
)
from rollstream.consumers.grouping.core.effects import Effects, InputRecord
from rollstream.consumers.grouping.core.group_lifecycle import GroupLifecycle
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.core.offset_tracker import OffsetTracker
from rollstream.consumers.grouping.core.plug_ins import BUILT_IN, PlugIns
from rollstream.consumers.grouping.core.task_state import Replay, TaskState
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.records import FateCount, Mark
from rollstream.topics.wire import codec


class Fold:
    """State of one partition, advanced one record at a time."""

    def __init__(
        self,
        state: TaskState,
        plug_ins: PlugIns = BUILT_IN,
        skips: Mapping[int, str] = MappingProxyType({}),
        change: Change | None = None,
        rewards: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Start from `state`. Call `replay` with the records from its watermark to its position, then `resume`.

        `plug_ins` are the makers and estimators that a configuration may name. `skips` gives records that become dead
        letters without being decoded, with the reasons by offset. It has no effect below the position, because the
        state names the records that were skipped there. `change` alters the configurations that marks put in force.
        `rewards` replaces rewards, by offset.
        """
        self.partition = state.partition
        self.partitions = state.partitions
        self.position = state.watermark
        self._plug_ins = plug_ins
        self._change = change
        self._rewards = rewards
        self._skips = skips
        self._replay = Replay(state)
        self._tracker = OffsetTracker(state)
        self._groups = GroupLifecycle(state, self._replay, self._tracker, plug_ins)
        if self._replay.is_empty:
            self.resume()

    # ------------------------------------------------------------------ reading

    def replay(self, record: InputRecord) -> None:
        """Read a record again while restoring.

        Raises StateRefused if the record has an effect, because log and state then disagree.
        """
        self._replay.check_offset(record.offset)
        self._read(record, self._admit_again)
        if self._tracker.pending.has_fates:
            raise self._replay.unexpected_effect(record.offset)

    def resume(self) -> None:
        """End restoring. Raises StateRefused unless every unfinished offset was read again and the clocks agree."""
        self.position = self._replay.end(self._groups.clocks)
        self._tracker.resume(self.position)
        self._groups.forget_finished()

    def apply(self, record: InputRecord) -> None:
        """Read the next record. Its effects are part of the next `prepare_commit`."""
        if self.replaying:
            raise StateRefused(f"rollouts[{self.partition}] is still being restored; call resume first")
        self._read(record, self._admit)

    def _read(self, record: InputRecord, admit: Callable[[InputRecord, Clocks], None]) -> None:
        if record.offset < self.position:
            raise StateRefused(
                f"offset {record.offset} of rollouts[{self.partition}] was read already (position {self.position})"
            )
        before = self._groups.clocks
        if record.timestamp_ms > before.stream_time_ms:
            self._groups.advance_time(record.timestamp_ms)
        self.position = record.offset + 1
        if self.replaying:
            if not self._replay.is_skipped(record.offset):
                admit(record, before)
        elif record.offset in self._skips:
            self._count_read("", 0)
            self._tracker.skip(record, self._skips[record.offset])
        else:
            admit(record, before)
        self._groups.cut("size")

    def _count_read(self, environment: str, tokens: int) -> None:
        if not self.replaying:
            self._tracker.count_read(environment, tokens)

    # ------------------------------------------------------------------ admission

    def _admit(self, record: InputRecord, before: Clocks) -> None:
        """Apply the content of a record; `before` holds the clocks before it was read."""
        if record.rollout is None and (foreign := foreign_rejection(record)) is not None:
            self._count_read("", 0)
            self._tracker.drop(record.offset, foreign)
            return
        try:
            content = content_of(record, self._rewards.get(record.offset), replaying=self.replaying)
        except RecordError as error:
            self._count_read("", 0)
            self._tracker.dead_letter(record, str(error))
            return
        value = content.value
        rejection = value_rejection(
            record, content, self.partition, self.partitions, self.config, replaying=self.replaying
        )
        if isinstance(value, Mark):
            self._admit_mark(record, value)
            return
        if isinstance(value, HeldRollout):
            self._count_read(value.environment, value.length)
        elif rejection is not None:
            self._count_read(value.environment, 0)
        if rejection is not None:
            self._tracker.drop(record.offset, rejection, value)
        elif isinstance(value, HeldRollout):
            self._groups.join(record, value, before)
        else:
            self._groups.cancel(record, value, before)

    def _admit_again(self, record: InputRecord, before: Clocks) -> None:
        """Apply a record that is read again. If its offset was already finished, only a mark has an effect."""
        if self._replay.meet(record.offset):
            self._admit(record, before)
            if record.offset not in self._tracker:
                raise self._replay.finished_too_early(record.offset)
            return
        if codec.kind_of(record.value) == "Mark":
            try:
                mark = codec.decode_as(Mark, record.value)
            except RecordError:
                return  # The record went to dead letters when it was first read.
            outcome = self._mark_outcome(record, mark)
            if not outcome.problem:
                self._obey(mark, outcome.config)

    # ------------------------------------------------------------------ marks

    def content_outcome(self, mark: Mark) -> MarkOutcome:
        """Return the effect that a mark with a valid signature would have as the next record.

        Raises StateRefused as `configuration_marks.content_outcome` does.
        """
        return content_outcome(mark, self.config, self.policy_version, self._plug_ins)

    def _mark_outcome(self, record: InputRecord, mark: Mark) -> MarkOutcome:
        return mark_outcome(
            record, mark, self.partition, self.config, self.policy_version, self._plug_ins, self._change
        )

    def _admit_mark(self, record: InputRecord, mark: Mark) -> None:
        outcome = self._mark_outcome(record, mark)
        if outcome.problem:
            self._count_read("", 0)
            self._tracker.drop(record.offset, Rejection("invalid", outcome.problem))
            return
        self._tracker.finish_control(record.offset)
        self._obey(mark, outcome.config)

    def _obey(self, mark: Mark, config: GroupingConfig | None) -> None:
        if config is not None:
            self._groups.configure(config)
        if mark.policy_version > self.policy_version:
            self._groups.advance_policy(mark.policy_version)
        if mark.kind == "drain":
            self._groups.cancel_open()
            self._groups.drain()

    def drain(self) -> None:
        """Cut batches of all rollouts that the batch maker holds. Unlike a drain mark, this leaves open groups open."""
        self._groups.drain()

    # ------------------------------------------------------------------ state

    @property
    def stream_time_ms(self) -> int:
        """Highest append time that was read, -1 before the first record."""
        return self._groups.clocks.stream_time_ms

    @property
    def policy_version(self) -> int:
        """Highest policy version that a mark has named, -1 before the first."""
        return self._groups.clocks.policy_version

    @property
    def config(self) -> GroupingConfig:
        """Configuration in force."""
        return self._groups.clocks.config

    @property
    def replaying(self) -> bool:
        """Whether the fold is being restored."""
        return not self._replay.ended

    @property
    def changed(self) -> bool:
        """Whether there is anything to commit: records read since the last `prepare_commit`."""
        return self.position != self._tracker.pending.begin

    @property
    def has_batches(self) -> bool:
        """Whether a batch was cut since the last `prepare_commit`."""
        return bool(self._tracker.pending.batches)

    @property
    def batch_number(self) -> int:
        """Number of the next batch."""
        return self._groups.batch_number

    @property
    def in_flight(self) -> int:
        """Number of offsets that were read and are not finished."""
        return len(self._tracker)

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Counts of records that have reached their fate since the start of the run, by environment and fate."""
        return self._tracker.counts

    @property
    def open_groups(self) -> int:
        return self._groups.open_groups

    @property
    def held_bytes(self) -> int:
        """Memory that unfinished groups take, as grouping.capacity_bytes counts it."""
        return self._groups.held_bytes

    @property
    def next_deadline_ms(self) -> int | None:
        """Stream time of the next deadline; None if there is none."""
        return self._groups.next_deadline_ms

    def prepare_commit(self, *, snapshot: bool = False) -> Effects:
        """Return the effects since the last call and the state they lead to, to be committed together."""
        groups = self._groups
        delivered = groups.partly_delivered() if snapshot else None
        return self._tracker.prepare_commit(
            self.position, groups.clocks, groups.batch_number, groups.remembered_since_ms, groups.rate_levels, delivered
        )

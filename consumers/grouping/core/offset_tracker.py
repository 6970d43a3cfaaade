"""Unfinished offsets of a fold, the fates of its finished offsets, and the journal record that names both.

Every offset that is read is entered once, either as unfinished or with its fate. An unfinished offset gets one fate.
"""

from collections import deque
from collections.abc import Iterable

from rollstream.consumers.grouping.core.drop_rules import Clocks, Rejection
from rollstream.consumers.grouping.core.effects import (
    CORE_VERSION,
    DeadLetter,
    Effects,
    EncodedBatch,
    InputRecord,
    PendingEffects,
)
from rollstream.consumers.grouping.core.groups import Group
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.core.task_journal import FateCounts, split_record
from rollstream.consumers.grouping.core.task_state import TaskState
from rollstream.topics.records import (
    Drop,
    FateCount,
    FinishedGroup,
    FinishedOffsets,
    GroupCancelled,
    JournalRecord,
    RateLevel,
)
from rollstream.topics.records.fates import (
    BATCHED,
    CONTROL,
    DEAD_LETTERED,
    DETAIL_LIMIT,
    DROPPED,
    READ,
    REASON_LIMIT,
    Fate,
    clip,
    dropped_for,
)
from rollstream.topics.records.journal import to_ranges
from rollstream.topics.wire.validation import NAME_LIMIT


class OffsetTracker:
    """Unfinished offsets, counts by fate, and the effects that are not committed yet."""

    def __init__(self, state: TaskState) -> None:
        self._partition = state.partition
        self._partitions = state.partitions
        self._topic_id = state.topic_id
        self._sequence = state.sequence
        self._counts = FateCounts(state.counts)
        self._produced = FateCounts(state.produced)
        self._unfinished: dict[int, Clocks] = {}
        self._order: deque[int] = deque()
        self._skipped = sorted(state.skipped)
        self.pending = PendingEffects(begin=state.position)

    def __len__(self) -> int:
        return len(self._unfinished)

    def __contains__(self, offset: int) -> bool:
        return offset in self._unfinished

    def resume(self, position: int) -> None:
        """Forget the effects of a replay: they were committed when the records were first read."""
        self.pending = PendingEffects(begin=position)

    # ------------------------------------------------------------------ entries

    def count_read(self, environment: str, tokens: int) -> None:
        """Count a record that is read for the first time, unless it is a valid mark or cancellation."""
        self._produced.add(clip(environment, NAME_LIMIT), READ, tokens)

    def admit(self, offset: int, before: Clocks) -> None:
        """Enter an offset that opened or joined a group; `before` holds the clocks before it was read."""
        self._unfinished[offset] = before
        self._order.append(offset)
        if len(self._order) > 64 + 4 * len(self._unfinished):
            # Many finished offsets may follow the offset of a group that stays open.
            self._order = deque(offset for offset in self._order if offset in self._unfinished)
        self.pending.admitted.append(offset)

    def finish_control(self, offset: int, environment: str = "") -> None:
        """Finish a mark or a cancellation."""
        self._finish(offset, CONTROL, environment)

    def dead_letter(self, record: InputRecord, error: str) -> None:
        """Finish a record that becomes a dead letter."""
        self.pending.dead_letters.append(DeadLetter(record, clip(error, DETAIL_LIMIT)))
        self._finish(record.offset, DEAD_LETTERED, "")

    def skip(self, record: InputRecord, reason: str) -> None:
        """Finish a record that an operator skips."""
        self._skipped.append(record.offset)
        self.dead_letter(record, f"skipped: {reason}")

    def drop(self, offset: int, verdict: Rejection, value: object = None, age_ms: int = 0) -> None:
        """Finish a dropped offset; `value` is its content, if it could be decoded."""
        measured = None
        if isinstance(value, HeldRollout):
            # An invalid rollout may hold NaN, which would spoil the sums.
            measured = value if verdict.reason != "invalid" else None
            drop = Drop(
                offset=offset,
                reason=clip(verdict.reason, REASON_LIMIT),
                detail=clip(verdict.detail, DETAIL_LIMIT),
                uid=clip(value.uid, NAME_LIMIT),
                environment=clip(value.environment, NAME_LIMIT),
                policy_version=value.policy_version,
                lowest_version=value.lowest_version,
                age_ms=age_ms,
                tokens=value.length,
            )
        else:
            environment = clip(value.environment, NAME_LIMIT) if isinstance(value, GroupCancelled) else ""
            detail = clip(verdict.detail, DETAIL_LIMIT)
            drop = Drop(offset=offset, reason=verdict.reason, detail=detail, environment=environment, age_ms=age_ms)
        self.pending.drops.append(drop)
        self._finish(offset, DROPPED, drop.environment, drop.tokens, measured, dropped_for(drop.reason))

    def finish_group(self, group: Group, fates: dict[int, str], detail: str, now_ms: int) -> None:
        """Finish every record of a group; `fates` holds BATCHED or a drop reason for each offset of its members."""
        key = group.key
        for member in group.members.values():
            offset, rollout = member.source.offset, member.rollout
            if fates[offset] == BATCHED:
                self._finish(offset, BATCHED, key.environment, rollout.length, rollout)
            else:
                self.drop(offset, Rejection(fates[offset], detail), rollout, now_ms - member.append_ms)
        for member in group.cancelled_members:
            verdict = Rejection("cancelled", "cancelled after it had come")
            self.drop(member.source.offset, verdict, member.rollout, now_ms - member.append_ms)
        for offset in group.control_offsets:
            self.finish_control(offset, key.environment)
        self.pending.finished_groups.append(
            FinishedGroup(
                environment=key.environment,
                example_id=key.example_id,
                policy_version=key.policy_version,
                group_id=key.group_id,
                sealed_ms=group.supersedes_ms,
                finished_ms=now_ms,
            )
        )

    def add_batch(self, batch: EncodedBatch) -> None:
        """Add a batch that was cut; its rows finish with their groups."""
        self.pending.batches.append(batch)
        self.pending.delivered += batch.source_offsets

    def _finish(
        self,
        offset: int,
        fate: Fate,
        environment: str,
        tokens: int = 0,
        measured: HeldRollout | None = None,
        counted_as: str = "",
    ) -> None:
        self._unfinished.pop(offset, None)
        self.pending.finished.setdefault(fate, []).append(offset)
        self._counts.add(environment, counted_as or fate, tokens, measured)

    # ------------------------------------------------------------------ the journal

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Counts of records that have reached their fate since the start of the run, by environment and fate."""
        return self._counts.records()

    def prepare_commit(
        self,
        position: int,
        now: Clocks,
        batch_number: int,
        remembered_since_ms: int,
        rates: tuple[RateLevel, ...],
        snapshot: Iterable[int] | None,
    ) -> Effects:
        """Return the effects since the last call, with their journal record or its parts.

        For a snapshot, `snapshot` holds the offsets that a batch carries though their groups are not finished.
        """
        pending, self.pending = self.pending, PendingEffects(begin=position)
        while self._order and self._order[0] not in self._unfinished:
            self._order.popleft()
        watermark = self._order[0] if self._order else position
        before = self._unfinished.get(watermark, now)
        delivered = (o for o in pending.delivered if o in self._unfinished) if snapshot is None else snapshot
        journal = JournalRecord(
            partition=self._partition,
            sequence=self._sequence,
            core_version=CORE_VERSION,
            topic_id=self._topic_id,
            partitions=self._partitions,
            begin=pending.begin,
            position=position,
            watermark=watermark,
            watermark_stream_time_ms=before.stream_time_ms,
            watermark_policy_version=before.policy_version,
            watermark_generation=before.config.generation,
            watermark_configuration=before.config.to_json(),
            stream_time_ms=now.stream_time_ms,
            policy_version=now.policy_version,
            generation=now.config.generation,
            remembered_since_ms=remembered_since_ms,
            batch_number=batch_number,
            admitted=to_ranges(o for o in pending.admitted if o in self._unfinished),
            finished=tuple(FinishedOffsets(fate=f, runs=to_ranges(o)) for f, o in sorted(pending.finished.items())),
            drops=tuple(pending.drops),
            finished_groups=tuple(pending.finished_groups),
            batch_ids=tuple(b.batch_id for b in pending.batches),
            counts=self._counts.journal_entries(whole=snapshot is not None),
            produced=self._produced.journal_entries(whole=snapshot is not None),
            snapshot=snapshot is not None,
            unfinished=to_ranges(self._unfinished if snapshot is not None else ()),
            delivered=to_ranges(delivered),
            skipped=tuple(self._skipped),
            rates=rates,
        )
        self._skipped = [offset for offset in self._skipped if offset >= watermark]
        records = split_record(journal)
        self._sequence += len(records)
        return Effects(journal, tuple(pending.batches), tuple(pending.dead_letters), records)

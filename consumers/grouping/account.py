"""The account of one fold: which offsets are unfinished, what became of the others, and the record that says so.

Every offset read is entered once, as unfinished or with its fate, and an unfinished one gets its fate once.
"""

from collections import deque
from collections.abc import Iterable

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
from consumers.grouping.counts import Counts
from consumers.grouping.groups import Group
from consumers.grouping.judging import Clocks, Verdict
from consumers.grouping.parts import in_parts
from consumers.grouping.runs import to_runs
from consumers.grouping.state import TaskState
from topics.records import (
    Drop,
    FateCount,
    FinishedGroup,
    FinishedOffsets,
    GroupCancelled,
    JournalRecord,
    Rollout,
    TrainingBatch,
)
from topics.validation import NAME_LIMIT

DETAIL_LIMIT = 300
_REASON_LIMIT = 64
"""Batch makers may make up reasons."""


def clip(text: str, limit: int) -> str:
    """The text, cut to `limit` characters: what a record says of itself must not outgrow the journal."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


class Account:
    """Offsets, counts and the changes since the last commit."""

    def __init__(self, state: TaskState) -> None:
        self._partition = state.partition
        self._partitions = state.partitions
        self._topic_id = state.topic_id
        self._sequence = state.sequence
        self._counts = Counts(state.counts)
        self._produced = Counts(state.produced)
        self._unfinished: dict[int, Clocks] = {}
        self._order: deque[int] = deque()
        self._skipped = sorted(state.skipped)
        self.changes = Changes(begin=state.position)

    def __len__(self) -> int:
        return len(self._unfinished)

    def __contains__(self, offset: int) -> bool:
        return offset in self._unfinished

    def resume(self, position: int) -> None:
        """Forget what re-reading noted as changes: it was committed long ago."""
        self.changes = Changes(begin=position)

    # ------------------------------------------------------------------ entries

    def read(self, environment: str, tokens: int) -> None:
        """A record that was meant as a rollout was read for the first time."""
        self._produced.add(clip(environment, NAME_LIMIT), "read", tokens)

    def admit(self, offset: int, before: Clocks) -> None:
        """An offset opened or joined a group; `before` are the clocks as they were before it was read."""
        self._unfinished[offset] = before
        self._order.append(offset)
        if len(self._order) > 64 + 4 * len(self._unfinished):
            # One group may stay open while any number of others come and go.
            self._order = deque(offset for offset in self._order if offset in self._unfinished)
        self.changes.admitted.append(offset)

    def control(self, offset: int, environment: str = "") -> None:
        """An offset has done what it was for."""
        self._finish(offset, CONTROL, environment)

    def dead_letter(self, record: Record, error: str) -> None:
        """A record means nothing."""
        self.changes.dead_letters.append(DeadLetter(record, clip(error, DETAIL_LIMIT)))
        self._finish(record.offset, DEAD_LETTERED, "")

    def skip(self, offset: int, reason: str) -> None:
        """An offset was left out unread."""
        self._skipped.append(offset)
        self.drop(offset, Verdict("skipped", reason))

    def drop(self, offset: int, verdict: Verdict, value: object = None, age_ms: int = 0) -> None:
        """An offset leaves with a reason; `value` is what it held, where it could be decoded."""
        measured = None
        if isinstance(value, Rollout):
            # What is invalid may hold numbers that are none.
            measured = value if verdict.reason != "invalid" else None
            drop = Drop(
                offset=offset,
                reason=clip(verdict.reason, _REASON_LIMIT),
                detail=clip(verdict.detail, DETAIL_LIMIT),
                uid=clip(value.uid, NAME_LIMIT),
                environment=clip(value.environment, NAME_LIMIT),
                policy_version=value.policy_version,
                lowest_version=value.lowest_version,
                age_ms=age_ms,
                tokens=len(value.tokens),
            )
        else:
            environment = clip(value.environment, NAME_LIMIT) if isinstance(value, GroupCancelled) else ""
            detail = clip(verdict.detail, DETAIL_LIMIT)
            drop = Drop(offset=offset, reason=verdict.reason, detail=detail, environment=environment, age_ms=age_ms)
        self.changes.drops.append(drop)
        self._finish(offset, DROPPED, drop.environment, drop.tokens, measured, f"{DROPPED}:{drop.reason}")

    def end(self, group: Group, fates: dict[int, str], detail: str, now_ms: int) -> None:
        """Every record of a group has its fate: `fates` by offset for members, batched or a drop reason."""
        key = group.key
        for member in group.members.values():
            offset, rollout = member.source.offset, member.rollout
            if fates[offset] == BATCHED:
                self._finish(offset, BATCHED, key.environment, len(rollout.tokens), rollout)
            else:
                self.drop(offset, Verdict(fates[offset], detail), rollout, now_ms - member.append_ms)
        for member in group.cancelled_members:
            verdict = Verdict("cancelled", "cancelled after it had come")
            self.drop(member.source.offset, verdict, member.rollout, now_ms - member.append_ms)
        for offset in group.control_offsets:
            self.control(offset, key.environment)
        self.changes.finished_groups.append(
            FinishedGroup(
                environment=key.environment,
                example_id=key.example_id,
                policy_version=key.policy_version,
                group_id=key.group_id,
                sealed_ms=group.sealed_ms,
                finished_ms=now_ms,
            )
        )

    def batch(self, batch: TrainingBatch) -> None:
        """A batch was cut; its rows finish with their groups."""
        self.changes.batches.append(batch)
        self.changes.delivered += batch.source_offsets.tolist()

    def _finish(
        self,
        offset: int,
        fate: str,
        environment: str,
        tokens: int = 0,
        measured: Rollout | None = None,
        counted_as: str = "",
    ) -> None:
        self._unfinished.pop(offset, None)
        self.changes.finished.setdefault(fate, []).append(offset)
        self._counts.add(environment, counted_as or fate, tokens, measured)

    # ------------------------------------------------------------------ the journal

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Records that have their fate, by environment and fate, since the start of the run."""
        return self._counts.records()

    def take(
        self, position: int, now: Clocks, batch_number: int, remembered_since_ms: int, snapshot: Iterable[int] | None
    ) -> Output:
        """The changes since the last call, and their journal record or records.

        `snapshot` holds the offsets batched of groups not over, where the record shall be a snapshot.
        """
        changes, self.changes = self.changes, Changes(begin=position)
        while self._order and self._order[0] not in self._unfinished:
            self._order.popleft()
        watermark = self._order[0] if self._order else position
        before = self._unfinished.get(watermark, now)
        self._skipped = [offset for offset in self._skipped if offset >= watermark]
        delivered = (o for o in changes.delivered if o in self._unfinished) if snapshot is None else snapshot
        journal = JournalRecord(
            partition=self._partition,
            sequence=self._sequence,
            core_version=CORE_VERSION,
            topic_id=self._topic_id,
            partitions=self._partitions,
            begin=changes.begin,
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
            admitted=to_runs(o for o in changes.admitted if o in self._unfinished),
            finished=tuple(FinishedOffsets(fate=f, runs=to_runs(o)) for f, o in sorted(changes.finished.items())),
            drops=tuple(changes.drops),
            finished_groups=tuple(changes.finished_groups),
            batch_ids=tuple(b.batch_id for b in changes.batches),
            counts=self._counts.take(whole=snapshot is not None),
            produced=self._produced.take(whole=snapshot is not None),
            snapshot=snapshot is not None,
            unfinished=to_runs(self._unfinished if snapshot is not None else ()),
            delivered=to_runs(delivered),
            skipped=tuple(self._skipped),
        )
        records = in_parts(journal)
        self._sequence += len(records)
        return Output(journal, tuple(changes.batches), tuple(changes.dead_letters), records)

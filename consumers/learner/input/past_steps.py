"""Finds the batches of steps on record at the offsets in their records. Needs no JAX.

All missing and changed batches are reported at once, before training starts.
"""

from collections.abc import Sequence
from contextlib import closing

from rollstream.consumers.batch_reader import IndexedBatch
from rollstream.consumers.learner.input.batch_selection import StepPlan
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep
from rollstream.topics.records.learner import taken_rows, trained_rows
from rollstream.topics.wire.catalogue import topic_name

_MOST_NAMED = 5


def batches_of(kafka: KafkaConfig, position: int, steps: Sequence[LearnerStep]) -> dict[int, StepPlan]:
    """Plans of consecutive steps on record, by step; `position` is the index position before the first.

    Raises TopicError, which names batches that are gone or have changed, and batches that the steps read past but do
    not name; the latter are allowed with a rollout buffer, which may still hold them.
    """
    if not steps:
        return {}
    input_run = steps[0].input_run
    first = min((use.index_offset for step in steps for use in step.uses), default=position)
    entries = index_between(kafka, input_run, min(first, position), steps[-1].position)
    beginnings = {p: low for p, (low, _end) in topic_admin.bounds(kafka, topic_name(input_run, "batches")).items()}
    wrong: list[str] = []
    plans = {}
    named = set()
    for step in steps:
        trained: dict[int, IndexedBatch] = {}
        drawn = step.stream_time_ms >= 0
        rows = trained_rows(step.uses) if drawn else taken_rows(step.uses)
        for use in step.uses:
            named.add(use.index_offset)
            entry = entries.get(use.index_offset)
            name = f"batch {use.batch_id} of step {step.step}"
            if entry is None:
                wrong.append(f"{name} is no longer at offset {use.index_offset} of batch-index")
            elif entry.batch_id != use.batch_id or not _fits(use, entry):
                wrong.append(
                    f"{name} had {use.rows} rollouts; offset {use.index_offset} of batch-index now names "
                    f"{entry.batch_id} with {entry.rollouts} rollouts"
                )
            elif use.index_offset in rows and entry.offset < beginnings[entry.partition]:
                wrong.append(f"{name} was deleted from batches[{entry.partition}]")
            elif use.index_offset in rows:
                trained[use.index_offset] = IndexedBatch(entry, use.index_offset)
        plans[step.step] = StepPlan(
            uses=step.uses,
            trained=tuple(trained[at] for at in sorted(trained)),
            lags=(0,) * len(trained),
            position=step.position,
            wait_s=0.0,
            rows=tuple(None if len(rows[at]) == trained[at].entry.rollouts else rows[at] for at in sorted(trained)),
            stream_time_ms=step.stream_time_ms,
            checked=True,
        )
    if all(step.stream_time_ms < 0 for step in steps):
        skimmed = (at for at in entries.keys() - named if at >= position)
        wrong += [f"no step names batch {entries[at].batch_id}" for at in sorted(skimmed)]
    if wrong:
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise TopicError(
            f"steps {steps[0].step} to {steps[-1].step} cannot be executed again from run {input_run}: "
            f"{'; '.join(wrong[:_MOST_NAMED])}{more}. Begin at a later checkpoint"
        )
    return plans


def _fits(use: BatchUse, entry: BatchIndexEntry) -> bool:
    """Whether a batch has the rows that a use names, either all rows or some by number."""
    if not use.row_numbers:
        return use.rows == entry.rollouts
    return use.rows == len(use.row_numbers) and use.row_numbers[-1] < entry.rollouts


def index_between(kafka: KafkaConfig, run: str, first: int, end: int) -> dict[int, BatchIndexEntry]:
    """Entries that batch-index still holds from offset `first` up to, not including, `end`.

    Unreadable records are skipped and logged, as by an IndexReader.
    """
    topic = topic_name(run, "batch-index")
    low, high = topic_admin.bounds(kafka, topic)[0]
    entries: dict[int, BatchIndexEntry] = {}
    if max(first, low) >= min(end, high):
        return entries
    with closing(read_to_end(kafka, topic, start={0: max(first, low)})) as messages:
        for message, entry in SkippedRecords("learner").records(BatchIndexEntry, messages):
            if message.offset >= end:
                break
            entries[message.offset] = entry
    return entries

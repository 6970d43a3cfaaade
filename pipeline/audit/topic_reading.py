"""Reads a run's topics for tools: unreadable and invalid records are skipped, counted and named instead of failing.

At its end, each tool reports the records that it skipped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets, journal_record
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end, record_at
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, JournalRecord, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata
from rollstream.topics.wire.validation import batch_problems, decode_journal, entry_problems

Index = dict[str, tuple[int, BatchIndexEntry]]
"""Entry of each batch with its offset in the index, in the order in which learners read them."""
R = TypeVar("R", BatchIndexEntry, TrainingBatch)
_PROBLEMS: Mapping[type, Callable[[Any], list[str]]] = {BatchIndexEntry: entry_problems, TrainingBatch: batch_problems}


def valid_records(
    cls: type[R], messages: Iterable[KafkaRecord], skipped: SkippedRecords
) -> Iterator[tuple[KafkaRecord, R]]:
    """Yield batches whose parts fit together, or entries that can name a batch, each with its message."""
    for message, record in skipped.records(cls, messages):
        if problems := _PROBLEMS[cls](record):
            skipped.skip(message, problems[0])
        else:
            yield message, record


def read_index(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> Index:
    """Read the index entries of a run. If a batch has two entries, the first counts."""
    index: Index = {}
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "batches"))
    for message, entry in valid_records(BatchIndexEntry, read_to_end(kafka, topic_name(run, "batch-index")), skipped):
        name = entry.batch_id
        if entry.partition >= partitions:
            skipped.skip(message, f"batch {name} is of a partition that the run does not have")
        elif name in index:
            skipped.skip(message, f"batch {name} has an entry already, at offset {index[name][0]}")
        else:
            index[name] = (message.offset, entry)
    return index


def read_batches(
    kafka: KafkaConfig, run: str, skipped: SkippedRecords, partition: int | None = None, **reading: str
) -> Iterator[TrainingBatch]:
    """Yield the batches of a run, or of one partition; `reading` is passed to `read_to_end`."""
    numbers = None if partition is None else [partition]
    messages = read_to_end(kafka, topic_name(run, "batches"), partitions=numbers, **reading)  # type: ignore[arg-type]
    return (batch for _message, batch in valid_records(TrainingBatch, messages, skipped))


def batch_at(message: KafkaRecord) -> TrainingBatch:
    """Decode a batch from its record. Raises RecordError if it is invalid."""
    skipped = SkippedRecords(logged=False)
    for _message, batch in valid_records(TrainingBatch, [message], skipped):
        return batch
    raise RecordError(str(skipped.first[0]))


def read_journal(
    kafka: KafkaConfig, run: str, partition: int, skipped: SkippedRecords
) -> list[tuple[int, JournalRecord]]:
    """Read the journal of a partition with offsets, oldest first.

    Raises StateRefused for a record that may be a journal record but cannot be read.
    """
    messages = read_to_end(kafka, topic_name(run, "journal"), partitions=[partition])
    records = ((message.offset, journal_record(message, skipped)) for message in messages)
    return [(offset, record) for offset, record in records if record is not None]


def committed_positions(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Iterator[GroupPosition]:
    """Yield the committed state of each partition of `rollouts`. Raises StateRefused if a partition has none."""
    topic = topic_name(run, "rollouts")
    positions = committed_offsets(kafka, grouper.group_id(run), topic, topic_admin.partitions_of(kafka, topic))
    lacking = [committed.partition for committed in positions if committed.offset < 0]
    if len(lacking) == len(positions):
        raise StateRefused(f"run {run} has no grouping state; prepare it with `rollstream topics apply`")
    if lacking:
        raise StateRefused(
            f"{topic}[{lacking[0]}] has no grouping state; if the partition was added after the run began, `rollstream "
            "fork` the run, else `rollstream role group recover`"
        )
    yield from positions


def committed_tasks(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Iterator[tuple[int, JournalRecord]]:
    """Yield each partition of `rollouts` with its committed journal record. Raises StateRefused if there is none."""
    for committed in committed_positions(kafka, run, grouper):
        yield committed.partition, _journal_at(kafka, run, committed)


def _journal_at(kafka: KafkaConfig, run: str, committed: GroupPosition) -> JournalRecord:
    """Fetch the journal record that a committed offset names; one transaction commits the record and the offset."""
    partition, topic = committed.partition, topic_name(run, "journal")
    at = CommitMetadata.decode(committed.metadata, f"{committed.topic}[{partition}]").journal
    message = record_at(kafka, topic, partition, at, isolation="read_uncommitted")
    if message is None:
        raise StateRefused(f"{topic}[{partition}] does not hold offset {at}, which the committed offset names")
    return decode_journal(message.value)

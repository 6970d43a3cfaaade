"""Reads a run's topics for tools: unreadable and invalid records are skipped, counted and named instead of failing.

At its end, each tool reports the records that it skipped.
"""

from collections.abc import Iterator

from rollstream.consumers.grouping.process.bootstrap import journal_record
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, JournalRecord, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.validation import batch_problems, entry_problems

Index = dict[str, tuple[int, BatchIndexEntry]]
"""Entry of each batch with its offset in the index, in the order in which learners read them."""


def read_index(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> Index:
    """Read the index entries of a run. If a batch has two entries, the first counts."""
    index: Index = {}
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "batches"))
    for message, entry in skipped.records(BatchIndexEntry, read_to_end(kafka, topic_name(run, "batch-index"))):
        with skipped.passing(message):
            _refuse(entry_problems(entry))
            if entry.partition >= partitions:
                raise RecordError(f"batch {entry.batch_id} is of a partition that the run does not have")
            if entry.batch_id in index:
                raise RecordError(f"batch {entry.batch_id} has an entry already, at offset {index[entry.batch_id][0]}")
            index[entry.batch_id] = (message.offset, entry)
    return index


def read_batches(
    kafka: KafkaConfig, run: str, skipped: SkippedRecords, partition: int | None = None, **reading: str
) -> Iterator[TrainingBatch]:
    """Yield the batches of a run, or of one partition; `reading` is passed to `read_to_end`."""
    numbers = None if partition is None else [partition]
    messages = read_to_end(kafka, topic_name(run, "batches"), partitions=numbers, **reading)  # type: ignore[arg-type]
    for message, batch in skipped.records(TrainingBatch, messages):
        with skipped.passing(message):
            _refuse(batch_problems(batch))
            yield batch


def batch_at(message: KafkaRecord) -> TrainingBatch:
    """Decode a batch from its record. Raises RecordError if it is invalid."""
    skipped = SkippedRecords(logged=False)
    batch = skipped.decode(TrainingBatch, message)
    if batch is None:
        raise RecordError(str(skipped.first[0]))
    problems = batch_problems(batch)
    if problems:
        raise RecordError(f"{message.topic}[{message.partition}] offset {message.offset}: {problems[0]}")
    return batch


def read_journal(
    kafka: KafkaConfig, run: str, partition: int, skipped: SkippedRecords
) -> list[tuple[int, JournalRecord]]:
    """Read the journal of a partition with offsets, oldest first.

    Raises StateRefused for a record that may be a journal record but cannot be read.
    """
    messages = read_to_end(kafka, topic_name(run, "journal"), partitions=[partition])
    records = ((message.offset, journal_record(message, skipped)) for message in messages)
    return [(offset, record) for offset, record in records if record is not None]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise RecordError(problems[0])

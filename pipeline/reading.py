"""What a run's topics hold, as tools read it: a record that is none, or makes no sense, ends no tool.

Each is passed over, counted and named; whoever reads says so when it is done.
"""

from collections.abc import Iterator

from confluent_kafka import Message

from consumers.grouping.bootstrap import journal_record
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.records import BatchIndexEntry, JournalRecord, TrainingBatch
from topics.skipped import SkippedRecords
from topics.validation import batch_problems, entry_problems

Index = dict[str, tuple[int, BatchIndexEntry]]
"""Entry of each batch with its offset in the index, in the order learners follow."""


def read_index(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> Index:
    """The index of a run. Of two entries of a batch the first counts."""
    found: Index = {}
    partitions = clients.partitions_of(kafka, topic_name(run, "batches"))
    for message, entry in skipped.records(BatchIndexEntry, clients.read_to_end(kafka, topic_name(run, "batch-index"))):
        with skipped.passing(message):
            _refuse(entry_problems(entry))
            if entry.partition >= partitions:
                raise RecordError(f"batch {entry.batch_id} is of a partition the run does not have")
            if entry.batch_id in found:
                raise RecordError(f"batch {entry.batch_id} has an entry already, at offset {found[entry.batch_id][0]}")
            found[entry.batch_id] = (message.offset() or 0, entry)
    return found


def read_batches(
    kafka: KafkaConfig, run: str, skipped: SkippedRecords, partition: int | None = None, **reading: str
) -> Iterator[TrainingBatch]:
    """Batches of a run, or of one partition; `reading` goes to `clients.read_to_end`."""
    numbers = None if partition is None else [partition]
    messages = clients.read_to_end(kafka, topic_name(run, "batches"), partitions=numbers, **reading)  # type: ignore[arg-type]
    for message, batch in skipped.records(TrainingBatch, messages):
        with skipped.passing(message):
            _refuse(batch_problems(batch))
            yield batch


def batch_at(message: Message) -> TrainingBatch:
    """The batch in a record that an entry names. Raises RecordError where it is none."""
    skipped = SkippedRecords(logged=False)
    batch = skipped.decode(TrainingBatch, message)
    if batch is None:
        raise RecordError(str(skipped.first[0]))
    problems = batch_problems(batch)
    if problems:
        raise RecordError(f"{message.topic()}[{message.partition()}] offset {message.offset()}: {problems[0]}")
    return batch


def read_journal(
    kafka: KafkaConfig, run: str, partition: int, skipped: SkippedRecords
) -> list[tuple[int, JournalRecord]]:
    """The journal of a partition with its offsets, oldest first. Raises StateRefused for what may be one of ours and
    cannot be read."""
    messages = clients.read_to_end(kafka, topic_name(run, "journal"), partitions=[partition])
    records = ((message.offset() or 0, journal_record(message, skipped)) for message in messages)
    return [(offset, record) for offset, record in records if record is not None]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise RecordError(problems[0])

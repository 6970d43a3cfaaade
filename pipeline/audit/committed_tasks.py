"""The committed state of each grouping task: its position in `rollouts`, and the journal record committed with it."""

from collections.abc import Iterator

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import record_at
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.records import JournalRecord
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata
from rollstream.topics.wire.validation import decode_journal


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

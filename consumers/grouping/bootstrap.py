"""Generation 0 of a run's grouping, and the way back when its committed offsets are lost.

Both write offsets in a transaction together with, or derived from, the journal; neither ever guesses a position.
"""

import logging

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from consumers.grouping import state
from consumers.grouping.config import GrouperConfig, GroupingConfig
from consumers.grouping.state import CommitMetadata
from topics import clients
from topics.catalogue import topic_name
from topics.codec import MAGIC, decode_as, encode
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, RecordError, StateRefused
from topics.keys import encode_key
from topics.logs import event
from topics.records import JournalRecord
from topics.skipped import SkippedRecords
from topics.transactional_ids import transactional_id

logger = logging.getLogger(__name__)
_TIMEOUT_S = 30.0


def initialise(kafka: KafkaConfig, run: str, grouping: GroupingConfig, grouper: GrouperConfig) -> bool:
    """Write generation 0 where nothing was written yet: an empty state a partition, and offset 0 committed.

    Returns whether it did; False when the run has its state already. Raises StateRefused when only one of offsets and
    journal exists, or the group has members: then something was lost, and guessing would lose or repeat rollouts.
    """
    rollouts, journal = topic_name(run, "rollouts"), topic_name(run, "journal")
    group = grouper.group_id(run)
    partitions = clients.partitions_of(kafka, rollouts)
    committed = committed_offsets(kafka, group, rollouts, partitions)
    written = {message.partition() or 0 for message in clients.read_to_end(kafka, journal)}
    if all(tp.offset >= 0 for tp in committed) and len(written) == partitions:
        return False
    if any(tp.offset >= 0 for tp in committed) or written:
        lost = [tp.partition for tp in committed if tp.offset < 0]
        raise StateRefused(
            f"run {run} has journal records on partitions {sorted(written)} and no offsets of group {group} on {lost}; "
            f"offsets were lost: commit them again with `rollstream group recover`"
        )
    if _members(kafka, group):
        raise StateRefused(f"group {group} has members and no offsets; stop them before `rollstream topics apply`")
    topic_id = clients.topic_ids(kafka, [rollouts])[rollouts]
    records = [state.initial(p, partitions, topic_id, grouping) for p in range(partitions)]
    _commit(kafka, run, group, {r.partition: (r, None) for r in records})
    event(logger, "grouping_initialised", run=run, partitions=partitions, generation=grouping.generation)
    return True


def recover(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> dict[int, int]:
    """Commit each partition's position again from the end of its journal; returns the positions.

    Raises StateRefused when the group has members (they know better) or a partition has no journal.
    """
    group = grouper.group_id(run)
    if _members(kafka, group):
        raise StateRefused(
            f"group {group} has members; stop them, wait out kafka.session_timeout_s ({kafka.session_timeout_s:g} s), "
            f"and repeat `rollstream group recover`"
        )
    partitions = clients.partitions_of(kafka, topic_name(run, "rollouts"))
    last: dict[int, tuple[JournalRecord, CommitMetadata | None]] = {}
    snapshots: dict[int, int] = {}
    oldest: dict[int, int] = {}
    skipped = SkippedRecords("recover")
    for message in clients.read_to_end(kafka, topic_name(run, "journal")):
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        record = journal_record(message, skipped)
        if record is None:
            continue
        oldest.setdefault(partition, offset)
        if record.snapshot and record.part == 0:
            snapshots[partition] = offset
        if partition in snapshots:
            last[partition] = (record, CommitMetadata(offset, snapshots[partition], oldest[partition]))
    missing = sorted(set(range(partitions)) - set(last))
    if missing:
        raise StateRefused(f"journal partitions {missing} of run {run} hold no snapshot; start a new run")
    _commit(kafka, run, group, last)
    return {partition: record.position for partition, (record, _metadata) in last.items()}


def journal_record(message: Message, skipped: SkippedRecords) -> JournalRecord | None:
    """The record of a message of `journal`; None for foreign bytes, which no record of ours is missing for.

    Raises StateRefused for what may be one of ours, which a sum over the journal must not go without.
    """
    if not (message.value() or b"").startswith(MAGIC):
        return skipped.decode(JournalRecord, message)
    try:
        return decode_as(JournalRecord, message.value())
    except RecordError as error:
        raise StateRefused(
            f"journal[{message.partition()}] offset {message.offset()} cannot be read ({error}); where a newer release "
            f"wrote it, run that release: grouping processes of one run must read each other's journal"
        ) from error


def committed_offsets(kafka: KafkaConfig, group: str, topic: str, partitions: int) -> list[TopicPartition]:
    """Committed offsets with their metadata, pending transactions awaited; offset is negative where there is none."""
    consumer: Consumer = clients.reader(kafka, group=group)
    try:
        wanted = [TopicPartition(topic, p) for p in range(partitions)]
        return clients.retrying(lambda: list(consumer.committed(wanted, 10.0)), f"reading offsets of group {group}")
    finally:
        consumer.close()


def _members(kafka: KafkaConfig, group: str) -> int:
    client = clients.admin(kafka)

    def count() -> int:
        try:
            description = client.describe_consumer_groups([group])[group].result(_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            raise
        idle = description.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
        return 0 if idle else len(description.members)

    return clients.retrying(count, f"describing group {group}")


def _commit(
    kafka: KafkaConfig, run: str, group: str, records: dict[int, tuple[JournalRecord, CommitMetadata | None]]
) -> None:
    """Commit positions in one transaction; a record without metadata is new, and written in the same transaction."""
    producer = clients.transactional_producer(kafka, transactional_id(run, "grouper", "bootstrap"))
    consumer = clients.reader(kafka, group=group)
    written: dict[int, int] = {}

    def delivered(_error: KafkaError | None, message: Message) -> None:
        written[message.partition() or 0] = -1 if (offset := message.offset()) is None else offset

    try:
        producer.init_transactions(_TIMEOUT_S)
        producer.begin_transaction()
        for partition, (record, metadata) in records.items():
            if metadata is None:
                producer.produce(
                    topic_name(run, "journal"), encode(record), encode_key(partition), partition, on_delivery=delivered
                )
        producer.flush(_TIMEOUT_S)
        offsets = []
        for partition, (record, known) in records.items():
            at = written.get(partition, -1)
            metadata = known or CommitMetadata(at, at, at)
            if metadata.journal < 0:
                raise BrokerUnavailable(f"the journal of run {run} could not be written; is the broker up?")
            offsets.append(TopicPartition(topic_name(run, "rollouts"), partition, record.position, metadata.encode()))
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), _TIMEOUT_S)
        producer.commit_transaction(_TIMEOUT_S)
    except KafkaException as error:
        raise BrokerUnavailable(f"offsets of group {group} cannot be committed: {error.args[0].str()}") from error
    finally:
        consumer.close()

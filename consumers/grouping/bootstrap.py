"""Generation 0 of a run's grouping, and the way back when its committed offsets are lost.

Both write offsets in a transaction together with, or derived from, the journal; neither ever guesses a position. Both
take their turn first, under one transactional id: what they look at is theirs to change until they commit.
"""

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from consumers.grouping import state
from consumers.grouping.config import GrouperConfig, GroupingConfig
from consumers.grouping.decisions import Decision, decide
from consumers.grouping.restored import adopted, check_nothing_beyond
from consumers.grouping.state import CommitMetadata
from topics import clients, hanging
from topics.catalogue import topic_name
from topics.codec import MAGIC, decode_as, encode
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, RecordError, StateRefused
from topics.headers import header
from topics.keys import encode_key
from topics.logs import event
from topics.open_transactions import await_decided, undecided
from topics.records import JournalRecord
from topics.skipped import SkippedRecords
from topics.transactional_ids import earlier_id, fence, transactional_id

logger = logging.getLogger(__name__)
T = TypeVar("T")
WRITER = "rollstream.writer"
"""Header of a journal record: the transactional id it was written under, which `recover` fences if it is undecided."""
_UNWRITTEN = -1
"""Offset of a journal record that is written in the transaction that commits it."""
_REST_S = (0.5, 1.5)
"""How long whoever lost its turn rests before it takes another, at least and at most."""


def initialise(kafka: KafkaConfig, run: str, grouping: GroupingConfig, grouper: GrouperConfig) -> bool:
    """Write generation 0 where nothing was written yet: an empty state a partition, and offset 0 committed.

    Returns whether it did; False when the run has its state already. Raises StateRefused when only one of offsets and
    journal exists, or the group has members: then something was lost, and guessing would lose or repeat rollouts.
    """
    group = grouper.group_id(run)
    return _in_turn(kafka, run, group, lambda producer: _initialise(producer, kafka, run, grouping, grouper))


def _initialise(
    producer: Producer, kafka: KafkaConfig, run: str, grouping: GroupingConfig, grouper: GrouperConfig
) -> bool:
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
    if members(kafka, group):
        raise StateRefused(f"group {group} has members and no offsets; stop them before `rollstream topics apply`")
    topic_id = clients.topic_ids(kafka, [rollouts])[rollouts]
    records = [state.initial(p, partitions, topic_id, grouping) for p in range(partitions)]
    _commit(producer, kafka, run, group, {r.partition: (r, None) for r in records})
    event(logger, "grouping_initialised", run=run, partitions=partitions, generation=grouping.generation)
    return True


def recover(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, patience_s: float | None = None, *, restored: bool = False
) -> dict[int, int]:
    """Commit each partition's position again from the end of its journal; returns the positions.

    `restored` says that the topics are those of an archive, record for record: a record that names them is added to
    each journal, in the same transaction. Without it grouping refuses to go on on topics that it was not written for.

    A process that was paused within a transaction is fenced first: committed later, it would double batches. Raises
    StateRefused when the group has members (they know better) or a partition has no journal, DeadlineExceeded when the
    end of the journal is not decided within `patience_s` (kafka.patience_s by default).
    """
    group = grouper.group_id(run)
    if members(kafka, group):
        raise StateRefused(
            f"group {group} has members; stop them, wait out kafka.session_timeout_s ({kafka.session_timeout_s:g} s), "
            f"and repeat `rollstream group recover`"
        )
    return _in_turn(kafka, run, group, lambda producer: _recover(producer, kafka, run, grouper, patience_s, restored))


def _recover(
    producer: Producer, kafka: KafkaConfig, run: str, grouper: GrouperConfig, patience_s: float | None, restored: bool
) -> dict[int, int]:
    group, journal = grouper.group_id(run), topic_name(run, "journal")
    partitions = clients.partitions_of(kafka, topic_name(run, "rollouts"))
    _fence_writers(kafka, run, journal)
    await_decided(kafka, journal, "no offsets were committed", patience_s)
    ends = clients.bounds(kafka, journal)
    last: dict[int, tuple[JournalRecord, CommitMetadata | None]] = {}
    snapshots: dict[int, int] = {}
    oldest: dict[int, int] = {}
    skipped = SkippedRecords("recover")
    for message in clients.read_to_end(kafka, journal):
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

    if restored:
        rollouts = topic_name(run, "rollouts")
        topic_id = clients.topic_ids(kafka, [rollouts])[rollouts]
        theirs = {p: record for p, (record, _metadata) in last.items() if record.topic_id != topic_id}
        check_nothing_beyond(kafka, run, theirs)
        for partition, record in theirs.items():
            metadata = CommitMetadata(_UNWRITTEN, snapshots[partition], oldest[partition])
            last[partition] = (adopted(kafka, run, record, topic_id), metadata)

    def unchanged() -> None:
        # From here on no member sees an offset before this transaction is over; one that came before has written.
        if members(kafka, group) or clients.bounds(kafka, journal) != ends:
            raise StateRefused(f"a process of group {group} started meanwhile; stop it, and repeat `group recover`")

    _commit(producer, kafka, run, group, last, unchanged)
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
    doing = f"reading offsets of group {group}"
    try:
        wanted = [TopicPartition(topic, p) for p in range(partitions)]
        return clients.committed(kafka, consumer, wanted, doing)
    except BrokerUnavailable as error:
        raise BrokerUnavailable(f"{error}; {hanging.open_on_offsets(kafka, group)}") from error
    finally:
        consumer.close()


def members(kafka: KafkaConfig, group: str) -> int:
    """How many members a consumer group has."""
    client = clients.admin(kafka)

    def count() -> int:
        try:
            description = client.describe_consumer_groups([group])[group].result(kafka.patience_s)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            raise
        idle = description.state in (ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD)
        return 0 if idle else len(description.members)

    return clients.retrying(count, f"describing group {group}", kafka.patience_s)


def _in_turn(kafka: KafkaConfig, run: str, group: str, work: Callable[[Producer], T]) -> T:
    """What `work` returns, given a producer whose start ended everybody else's turn, and aborted what they had begun.

    Whoever loses its turn so takes another a while later, and then finds what the other did.
    """
    identity = transactional_id(run, "grouper", "bootstrap")
    deadline = time.monotonic() + kafka.patience_s
    while True:
        producer = clients.transactional_producer(kafka, identity, logger=logger)
        try:
            producer.init_transactions(kafka.patience_s)
            try:
                return work(producer)
            except StateRefused:
                # Offsets and journal may differ because they were written between looking at the one and the other.
                _assert_turn(producer, kafka, run, group)
                raise
        except (KafkaException, SystemError) as error:
            reason = error.args[0]
            if not _turn_lost(reason) or time.monotonic() > deadline:
                raise BrokerUnavailable(f"offsets of run {run} cannot be committed: {reason}") from error
            event(logger, "turn_lost", run=run, error=str(reason))
            time.sleep(random.uniform(*_REST_S))


def _assert_turn(producer: Producer, kafka: KafkaConfig, run: str, group: str) -> None:
    """Raise KafkaException where somebody else's turn began: an offset that is then aborted asks the coordinator."""
    consumer = clients.reader(kafka, group=group)
    producer.begin_transaction()
    try:
        nobodys = [TopicPartition(topic_name(run, "rollouts"), 0, 0)]
        producer.send_offsets_to_transaction(nobodys, consumer.consumer_group_metadata(), kafka.patience_s)
    except KafkaException as error:
        if _turn_lost(error.args[0]):
            raise
    finally:
        consumer.close()
    producer.abort_transaction(kafka.patience_s)


def _turn_lost(reason: KafkaError | str) -> bool:
    if isinstance(reason, KafkaError):
        # What follows a fatal error tells its cause in its text only.
        return decide(reason) is Decision.LEAVE or (reason.code() == KafkaError._FATAL and "fenced" in reason.str())
    # The client lost the exception of a fatal error on its way, and nearly all of them are this one.
    return True


def _fence_writers(kafka: KafkaConfig, run: str, journal: str) -> None:
    """Abort what grouping processes left undecided in the journal: they are told when they go on."""
    names: set[str] = set()
    for partition, part in undecided(kafka, journal).items():
        tail = clients.read_to_end(
            kafka, journal, partitions=[partition], start={partition: part.start}, isolation="read_uncommitted"
        )
        names.update(_writer(message) for message in tail)
    ours = {name for name in names if name.startswith(f"{transactional_id(run, 'grouper')}/")}
    if ours != names:
        # Earlier releases did not say who writes; ordinals are counted from 0, as a rule.
        ours.update(earlier_id(run, "grouper", n) for n in range(clients.partitions_of(kafka, journal)))
    for name in sorted(ours - {transactional_id(run, "grouper", "bootstrap")}):
        fence(kafka, name)
        event(logger, "writer_fenced", transactional_id=name)


def _writer(message: Message) -> str:
    return header(message, WRITER) or ""


def _commit(
    producer: Producer,
    kafka: KafkaConfig,
    run: str,
    group: str,
    records: dict[int, tuple[JournalRecord, CommitMetadata | None]],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Commit positions in one transaction; a record without metadata, or whose metadata say that it is unwritten, is
    new, and written in the same transaction.

    `check` is called before the commit; what it raises aborts. Raises KafkaException.
    """
    consumer = clients.reader(kafka, group=group)
    written: dict[int, int] = {}
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append(error)
        else:
            written[message.partition() or 0] = message.offset() or 0

    producer.begin_transaction()
    try:
        for partition, (record, metadata) in records.items():
            if metadata is None or metadata.journal == _UNWRITTEN:
                journal, key = topic_name(run, "journal"), encode_key(partition)
                clients.produce(producer, journal, encode(record), key, partition=partition, on_delivery=delivered)
        producer.flush(kafka.patience_s)
        if failed:
            raise KafkaException(failed[0])
        offsets = []
        for partition, (record, known) in records.items():
            metadata = known
            if metadata is None or metadata.journal == _UNWRITTEN:
                if partition not in written:
                    raise BrokerUnavailable(f"the journal of run {run} could not be written; is the broker up?")
                at = written[partition]
                metadata = CommitMetadata(at, at, at) if metadata is None else metadata._replace(journal=at)
            offsets.append(
                TopicPartition(
                    topic_name(run, "rollouts"),
                    partition,
                    record.position,
                    metadata.encode(),
                    leader_epoch=record.leader_epoch,
                )
            )
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), kafka.patience_s)
        check()
        producer.commit_transaction(kafka.patience_s)
    except BaseException:
        # Nothing is left open; where that cannot be done, the error under way says more.
        with suppress(KafkaException, SystemError):
            producer.abort_transaction(kafka.patience_s)
        raise
    finally:
        consumer.close()

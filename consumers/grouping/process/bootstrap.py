"""Start of a run's grouping with generation 0, and recovery of its committed offsets if they are lost.

Both commit offsets in a transaction, either together with journal records or derived from them; neither ever guesses a
position. They share one transactional id and so fence each other: only one of them at a time can change the state.

A journal names its topic by Kafka's topic id, so that grouping never continues on the rollouts of another topic. To
adopt a journal that was restored from an archive, the operator declares that the new topics have the same content as
the old topics; this is checked as far as possible.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import BrokerUnavailable, RecordError, StateRefused
from rollstream.topics.kafka import hanging_transactions, topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.groups import members
from rollstream.topics.kafka.open_transactions import await_decided, undecided
from rollstream.topics.kafka.reader import Reader, read_to_end, record_before
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, fence, transactional_id
from rollstream.topics.logs import event
from rollstream.topics.records import NO_OFFSETS, JournalRecord, batch_numbers
from rollstream.topics.wire.catalogue import name_in_run, topic_name
from rollstream.topics.wire.codec import encode, is_frame
from rollstream.topics.wire.commit_metadata import CommitMetadata
from rollstream.topics.wire.keys import decode_key, encode_key
from rollstream.topics.wire.validation import decode_journal

logger = logging.getLogger(__name__)


def adopted(kafka: KafkaConfig, run: str, record: JournalRecord, topic_id: str) -> JournalRecord:
    """Return the journal record that follows `record` and only changes the topic's id to `topic_id`.

    Raises StateRefused if the topic does not hold all offsets that the journal refers to.
    """
    rollouts, partition = topic_name(run, "rollouts"), record.partition
    begin, end = topic_admin.bounds(kafka, rollouts, [partition])[partition]
    if not begin <= record.watermark <= record.position <= end:
        raise StateRefused(
            f"{rollouts}[{partition}] holds offsets {begin} to {end - 1}, but its journal was written for "
            f"{record.watermark} to {record.position - 1}; restore the run from its archive"
        )
    before = record_before(kafka, rollouts, partition, record.position)
    epoch = None if before is None else before.leader_epoch
    return replace(
        record,
        sequence=record.sequence + 1,
        topic_id=topic_id,
        begin=record.position,
        admitted=NO_OFFSETS,
        finished=(),
        drops=(),
        finished_groups=(),
        batch_ids=(),
        snapshot=False,
        unfinished=NO_OFFSETS,
        delivered=NO_OFFSETS,
        part=0,
        parts=1,
        leader_epoch=-1 if epoch is None else epoch,
    )


def check_nothing_beyond(kafka: KafkaConfig, run: str, journal: Mapping[int, JournalRecord]) -> None:
    """Raise StateRefused if there are batches or dead letters newer than the last journal record of their partition.

    The archive was then made while a grouping process was writing, and grouping would write these records again.
    """
    skipped = SkippedRecords("adopt")
    for message in read_to_end(kafka, topic_name(run, "batches")):
        with skipped.passing(message):
            partition, number = batch_numbers(str((*decode_key(message.key), "")[0]))
            if partition in journal and number >= journal[partition].batch_number:
                raise _beyond(run, f"batch {partition}-{number}")
    for message in read_to_end(kafka, topic_name(run, "dead-letters")):
        names = ("topic", "partition", "offset")
        topic, *place = (message.header(f"__streams.errors.{name}") or "" for name in names)
        source, offset = map(decimal_number, place)
        if name_in_run(topic) == "rollouts" and source is not None and offset is not None:
            last = journal.get(source)
            if last is not None and offset >= last.position:
                raise _beyond(run, f"the dead letter of rollouts[{source}] offset {offset}")


def _beyond(run: str, what: str) -> StateRefused:
    return StateRefused(
        f"run {run} holds {what}, which its journal does not contain: it was archived while grouping was running. "
        f"Archive it again after its grouping processes have ended, and restore it into a run of another name"
    )


T = TypeVar("T")
WRITER = "rollstream.writer"
"""Header of a journal record with the transactional id of its writer, which `recover` fences if the record's
transaction is undecided."""
_UNWRITTEN = -1
"""Stands for the offset of a journal record that the committing transaction itself writes."""
_REST_S = (0.5, 1.5)
"""Shortest and longest pause of a fenced process before it tries again."""


def initialise(kafka: KafkaConfig, run: str, grouping: GroupingConfig, grouper: GrouperConfig) -> bool:
    """Write generation 0 if nothing was written yet: an empty state and committed offset 0 for each partition.

    Returns False if the run already has state. Raises StateRefused if only one of offsets and journal exists, or if the
    group has members: state was then lost, and a guess would lose or repeat rollouts.
    """
    group = grouper.group_id(run)
    return in_turn(kafka, run, group, lambda producer: _initialise(producer, kafka, run, grouping, grouper))


def _initialise(
    producer: TransactionalProducer,
    kafka: KafkaConfig,
    run: str,
    grouping: GroupingConfig,
    grouper: GrouperConfig,
) -> bool:
    rollouts, journal = topic_name(run, "rollouts"), topic_name(run, "journal")
    group = grouper.group_id(run)
    partitions = topic_admin.partitions_of(kafka, rollouts)
    committed = committed_offsets(kafka, group, rollouts, partitions)
    written = {message.partition for message in read_to_end(kafka, journal)}
    if all(tp.offset >= 0 for tp in committed) and len(written) == partitions:
        return False
    if any(tp.offset >= 0 for tp in committed) or written:
        lost = [tp.partition for tp in committed if tp.offset < 0]
        if not lost:
            missing = sorted(set(range(partitions)) - written)
            raise StateRefused(
                f"group {group} has offsets, but journal has no records on partitions {missing}: they were deleted; "
                f"restore the run from an archive (`rollstream restore`), or start another run"
            )
        raise StateRefused(
            f"run {run} has journal records on partitions {sorted(written)} but no offsets of group {group} on {lost}; "
            f"offsets were lost: commit them again with `rollstream role group recover`"
        )
    if members(kafka, group):
        raise StateRefused(f"group {group} has members but no offsets; stop them before `rollstream topics apply`")
    topic_id = topic_admin.topic_ids(kafka, [rollouts])[rollouts]
    records = [task_state.initial_record(p, partitions, topic_id, grouping) for p in range(partitions)]
    _commit(producer, kafka, run, group, {r.partition: (r, None) for r in records})
    event(logger, "grouping_initialised", run=run, partitions=partitions, generation=grouping.generation)
    return True


def recover(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, patience_s: float | None = None, *, restored: bool = False
) -> dict[int, int]:
    """Commit each partition's position again from the end of its journal, and return the positions.

    `restored` declares that the topics equal the archived topics, record for record. The same transaction then adds a
    record with the new topic id to each journal; otherwise grouping would refuse topics that the journal was not
    written for.

    A process that was paused within a transaction is fenced first, because its later commit would duplicate batches.
    Raises StateRefused if the group has members or a partition has no journal, and DeadlineExceeded if a transaction at
    the end of the journal stays open for `patience_s` (kafka.patience_s by default).
    """
    group = grouper.group_id(run)
    if members(kafka, group):
        raise StateRefused(
            f"group {group} has members; stop them, wait out kafka.session_timeout_s ({kafka.session_timeout_s:g} s), "
            f"and repeat `rollstream role group recover`"
        )
    return in_turn(kafka, run, group, lambda producer: _recover(producer, kafka, run, grouper, patience_s, restored))


def _recover(
    producer: TransactionalProducer,
    kafka: KafkaConfig,
    run: str,
    grouper: GrouperConfig,
    patience_s: float | None,
    restored: bool,
) -> dict[int, int]:
    group, journal = grouper.group_id(run), topic_name(run, "journal")
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
    _fence_writers(kafka, run, journal)
    await_decided(kafka, journal, "no offsets were committed", patience_s)
    ends = topic_admin.bounds(kafka, journal)
    last: dict[int, tuple[JournalRecord, CommitMetadata | None]] = {}
    snapshots: dict[int, int] = {}
    oldest: dict[int, int] = {}
    skipped = SkippedRecords("recover")
    for message in read_to_end(kafka, journal):
        partition, offset = message.partition, message.offset
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
        topic_id = topic_admin.topic_ids(kafka, [rollouts])[rollouts]
        theirs = {p: record for p, (record, _metadata) in last.items() if record.topic_id != topic_id}
        check_nothing_beyond(kafka, run, theirs)
        for partition, record in theirs.items():
            metadata = CommitMetadata(_UNWRITTEN, snapshots[partition], oldest[partition])
            last[partition] = (adopted(kafka, run, record, topic_id), metadata)

    def unchanged() -> None:
        # From here on, new members get no offsets before this transaction ends. A member that got them earlier is still
        # in the group or has written to the journal.
        if members(kafka, group) or topic_admin.bounds(kafka, journal) != ends:
            raise StateRefused(f"a process of group {group} has started; stop it, and repeat `group recover`")

    _commit(producer, kafka, run, group, last, unchanged)
    return {partition: record.position for partition, (record, _metadata) in last.items()}


def journal_record(message: KafkaRecord, skipped: SkippedRecords) -> JournalRecord | None:
    """Decode a message of `journal`; None for other bytes, which are not part of the journal.

    Raises StateRefused if the message may be a journal record but cannot be decoded, because the state would be
    incomplete without it.
    """
    if not is_frame(message.value):
        return skipped.decode(JournalRecord, message)
    try:
        return decode_journal(message.value)
    except RecordError as error:
        raise StateRefused(
            f"journal[{message.partition}] offset {message.offset} cannot be read ({error}); if a newer release "
            f"wrote it, run that release: every grouping process of a run must be able to read the whole journal"
        ) from error


def committed_offsets(kafka: KafkaConfig, group: str, topic: str, partitions: int) -> list[GroupPosition]:
    """Return the committed offsets with metadata once pending transactions end; an offset is negative if missing."""
    return _committed(kafka, group, topic, range(partitions))


def committed_offset(
    kafka: KafkaConfig,
    group: str,
    topic: str,
    partition: int,
    reader: Reader | None = None,
    timeout_s: float | None = None,
) -> GroupPosition:
    """Return the committed offset of one partition as `committed_offsets` does, whatever is pending in others.

    An existing `reader`, created for the group, may be passed. Raises BrokerUnavailable after `timeout_s`,
    kafka.patience_s by default.
    """
    [committed] = _committed(kafka, group, topic, [partition], reader, timeout_s)
    return committed


def _committed(
    kafka: KafkaConfig,
    group: str,
    topic: str,
    partitions: Sequence[int],
    reader: Reader | None = None,
    timeout_s: float | None = None,
) -> list[GroupPosition]:
    with Reader(kafka, group=group) if reader is None else nullcontext(reader) as source:
        try:
            return source.committed(topic, partitions, f"reading offsets of group {group}", timeout_s)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(f"{error}; {hanging_transactions.open_on_offsets(kafka, group)}") from error


def in_turn(
    kafka: KafkaConfig, run: str, group: str, work: Callable[[TransactionalProducer], T], role: str = "grouper"
) -> T:
    """Return the result of `work`, whose producer fenced all earlier producers of the role, and aborted their
    transactions.

    A process that is fenced tries again later, and then finds that the other process has done the work.
    """
    identity = transactional_id(run, role, "bootstrap")
    deadline = time.monotonic() + kafka.patience_s
    while True:
        producer = TransactionalProducer(kafka, identity, logger=logger)
        try:
            producer.start()
            try:
                return work(producer)
            except StateRefused:
                # Offsets and journal may differ because another process wrote them between the two reads.
                _assert_turn(producer, kafka, run, group)
                raise
        except Stalled as stalled:
            raise BrokerUnavailable(f"offsets of run {run} cannot be committed: {stalled}") from stalled
        except TransactionFailed as failed:
            if not failed.taken_over or time.monotonic() > deadline:
                raise BrokerUnavailable(f"offsets of run {run} cannot be committed: {failed.reason}") from failed
            event(logger, "turn_lost", run=run, error=failed.reason)
            time.sleep(random.uniform(*_REST_S))
        finally:
            producer.close()


def _assert_turn(producer: TransactionalProducer, kafka: KafkaConfig, run: str, group: str) -> None:
    """Raise TransactionFailed if another process fenced this one.

    To find out, offsets are sent in a transaction that is then aborted.
    """
    nobodys = [GroupPosition(topic_name(run, "rollouts"), 0, 0)]
    with Reader(kafka, group=group) as reader:
        try:
            with producer.transaction(commit=False) as transaction:
                transaction.send_offsets(nobodys, reader.group_metadata())
        except TransactionFailed as failed:
            if failed.taken_over:
                raise


def _fence_writers(kafka: KafkaConfig, run: str, journal: str) -> None:
    """Abort the undecided transactions of grouping processes in the journal; the processes find out later."""
    names: set[str] = set()
    for partition, part in undecided(kafka, journal).items():
        tail = read_to_end(
            kafka, journal, partitions=[partition], start={partition: part.start}, isolation="read_uncommitted"
        )
        names.update(message.header(WRITER) or "" for message in tail)
    ours = {name for name in names if name.startswith(f"{transactional_id(run, 'grouper')}/")}
    for name in sorted(ours - {transactional_id(run, "grouper", "bootstrap")}):
        fence(kafka, name)
        event(logger, "writer_fenced", transactional_id=name)


def _commit(
    producer: TransactionalProducer,
    kafka: KafkaConfig,
    run: str,
    group: str,
    records: dict[int, tuple[JournalRecord, CommitMetadata | None]],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Commit positions in one transaction, which also writes the records that have no metadata, or whose metadata mark
    them as unwritten.

    `check` is called before the commit; an exception from it aborts the transaction. Raises TransactionFailed or
    Stalled.
    """
    journal, written = topic_name(run, "journal"), dict[int, int]()

    def delivered(delivery: Delivery) -> None:
        written[delivery.partition] = delivery.offset

    with Reader(kafka, group=group) as reader, producer.transaction() as transaction:
        for partition, (record, metadata) in records.items():
            if metadata is None or metadata.journal == _UNWRITTEN:
                value, key = encode(record), encode_key(partition)
                transaction.send(journal, value, key, partition=partition, on_delivery=delivered)
        transaction.flush(kafka.patience_s)
        positions = []
        for partition, (record, known) in records.items():
            metadata = known
            if metadata is None or metadata.journal == _UNWRITTEN:
                at = written[partition]
                metadata = CommitMetadata(at, at, at) if metadata is None else metadata._replace(journal=at)
            positions.append(
                GroupPosition(
                    topic_name(run, "rollouts"), partition, record.position, metadata.encode(), record.leader_epoch
                )
            )
        transaction.send_offsets(positions, reader.group_metadata())
        check()

"""Moves the unfinished records of a run to its successor, a run with another number of partitions.

A transaction copies unfinished records to the successor's `rollouts`, gives their offsets the fate `moved` in the
journal of this run, and commits its position. So each record is in exactly one run at any time, and a command that was
killed can be repeated to continue after the last transaction. The records of a group are in one partition of each run,
and keep their order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.core.fate_counts import FateCounts
from rollstream.consumers.grouping.core.journal_splitting import split_record
from rollstream.consumers.grouping.core.task_state import JournalAccumulator, TaskState
from rollstream.consumers.grouping.process.bootstrap import committed_offset, in_turn, journal_record
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import decode, encode
from rollstream.topics.commit_metadata import CommitMetadata
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.fates import MOVED, MOVED_CONTROL, clip
from rollstream.topics.kafka.groups import members
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition, Headers, KafkaRecord
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.skipping_reader import records_between
from rollstream.topics.kafka.transactions import TransactionalProducer
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import to_ranges
from rollstream.topics.records import FinishedOffsets, GroupCancelled, JournalRecord, Rollout
from rollstream.topics.run_splits import MOVED_APPENDED, MOVED_FROM
from rollstream.topics.validation import NAME_LIMIT

TRANSACTION_BYTES = 64 * 1024 * 1024
"""Size at which a transaction is full: it moves records until they have this many bytes."""


class CommittedState(NamedTuple):
    """A grouping task as its last transaction left it."""

    state: TaskState
    metadata: CommitMetadata
    generation: int
    """Generation of the configuration before the watermark."""


def committed_task(kafka: KafkaConfig, run: str, grouper: GrouperConfig, partition: int) -> CommittedState:
    """Read the state of a task. Raises StateRefused if none is committed, or it contradicts the journal."""
    topic, journal = topic_name(run, "rollouts"), topic_name(run, "journal")
    committed = committed_offset(kafka, grouper.group_id(run), topic, partition)
    if committed.offset < 0:
        raise StateRefused(f"run {run} has no grouping state; prepare it with `rollstream topics apply`")
    metadata = CommitMetadata.decode(committed.metadata, f"{topic}[{partition}]")
    added, skipped = JournalAccumulator(), SkippedRecords("split")
    for message in records_between(kafka, journal, partition, metadata.snapshot, metadata.journal + 1):
        record = None if message is None else journal_record(message, skipped)
        if record is not None:
            added.add(record)
    state = added.state()
    if added.last is None or state.position != committed.offset:
        raise StateRefused(
            f"offset {committed.offset} is committed for {topic}[{partition}], but its journal record says "
            f"{state.position}; another program committed it: commit again with `rollstream role group recover`"
        )
    return CommittedState(state, metadata, added.last.watermark_generation)


def move_unfinished(
    kafka: KafkaConfig,
    run: str,
    grouper: GrouperConfig,
    partition: int,
    successor: str,
    transaction_bytes: int = TRANSACTION_BYTES,
) -> int:
    """Move every unfinished record of a partition to `rollouts` of another run; return the number of moved records.

    No grouping process of the run may be running, and `rollouts` must be closed to writers. Raises StateRefused if a
    process joins the group, or if a batch carries members of an unfinished group.
    """
    group = grouper.group_id(run)
    return in_turn(
        kafka,
        run,
        group,
        lambda producer: _move(producer, kafka, run, grouper, partition, successor, transaction_bytes),
    )


def _move(
    producer: TransactionalProducer,
    kafka: KafkaConfig,
    run: str,
    grouper: GrouperConfig,
    partition: int,
    successor: str,
    transaction_bytes: int,
) -> int:
    task = committed_task(kafka, run, grouper, partition)
    if task.state.delivered:
        raise StateRefused(
            f"rollouts[{partition}] of run {run} holds groups of which a batch carries only some members, the first at "
            f"offset {min(task.state.delivered)}; they cannot be moved"
        )
    moved = 0
    while task.state.unfinished:
        taken = _take(kafka, run, task.state, transaction_bytes)
        with Reader(kafka, group=grouper.group_id(run)) as reader, producer.transaction() as transaction:
            written: list[int] = []

            def delivered(delivery: Delivery, written: list[int] = written) -> None:
                written.append(delivery.offset)

            for message in taken:
                headers = _headers(run, message)
                transaction.send(topic_name(successor, "rollouts"), message.value, message.key, headers=headers)
            records = moved_records(task, taken)
            for record in records:
                transaction.send(
                    topic_name(run, "journal"),
                    encode(record),
                    encode_key(partition),
                    partition=partition,
                    on_delivery=delivered,
                )
            transaction.flush(kafka.patience_s)
            metadata = CommitMetadata(max(written), min(written), task.metadata.oldest)
            place = GroupPosition(topic_name(run, "rollouts"), partition, task.state.position, metadata.encode())
            transaction.send_offsets([place], reader.group_metadata())
            if members(kafka, grouper.group_id(run)):
                raise StateRefused(f"a grouping process of run {run} has started; stop it, and split again")
        moved += len(taken)
        task = committed_task(kafka, run, grouper, partition)
    return moved


def _take(kafka: KafkaConfig, run: str, state: TaskState, limit_bytes: int) -> list[KafkaRecord]:
    """Read the first unfinished records of a partition, until they reach `limit_bytes`."""
    topic, wanted = topic_name(run, "rollouts"), sorted(state.unfinished)
    taken: list[KafkaRecord] = []
    size = 0
    for message in records_between(kafka, topic, state.partition, wanted[0], wanted[-1] + 1, state.hopped):
        if message is None or message.offset not in state.unfinished:
            continue
        if message.offset != wanted[len(taken)]:
            break
        taken.append(message)
        size += len(message.value or b"")
        if size >= limit_bytes:
            return taken
    if len(taken) < len(wanted):
        raise StateRefused(
            f"{topic}[{state.partition}] holds no record at offset {wanted[len(taken)]}, which is not in any batch; "
            f"restore the topic before the run is split"
        )
    return taken


def _headers(run: str, message: KafkaRecord) -> Headers:
    """Headers of a copy: the headers of the record, its original append time, and its run, partition and offset."""
    kept = tuple(pair for pair in message.headers or () if pair[0] != MOVED_FROM)
    appended = () if message.header(MOVED_APPENDED) else ((MOVED_APPENDED, str(message.timestamp_ms).encode()),)
    place = f"{run}:{message.partition}:{message.offset}".encode()
    return (*kept, *appended, (MOVED_FROM, place))


def moved_records(task: CommittedState, taken: Sequence[KafkaRecord]) -> tuple[JournalRecord, ...]:
    """Return the journal records that give these unfinished records the fate `moved`: a snapshot, in parts if large."""
    state = task.state
    offsets = {message.offset for message in taken}
    counts = FateCounts(state.counts)
    for environment, fate, tokens in map(_counted, taken):
        counts.add(environment, fate, tokens)
    # The watermark stays, even if every record is moved, because the clocks are only known at this offset.
    return split_record(
        JournalRecord(
            partition=state.partition,
            sequence=state.sequence,
            core_version=CORE_VERSION,
            topic_id=state.topic_id,
            partitions=state.partitions,
            begin=state.position,
            position=state.position,
            watermark=state.watermark,
            watermark_stream_time_ms=state.watermark_stream_time_ms,
            watermark_policy_version=state.watermark_policy_version,
            watermark_generation=task.generation,
            watermark_configuration=state.watermark_configuration,
            stream_time_ms=state.stream_time_ms,
            policy_version=state.policy_version,
            generation=state.generation,
            remembered_since_ms=state.remembered_since_ms,
            batch_number=state.batch_number,
            finished=(FinishedOffsets(fate=MOVED, runs=to_ranges(offsets)),),
            counts=counts.records(),
            produced=state.produced,
            snapshot=True,
            unfinished=to_ranges(state.unfinished - offsets),
            skipped=tuple(sorted(state.skipped)),
            hopped=tuple(to_ranges(state.hopped).tolist()),
            rates=state.rates,
        )
    )


def _counted(message: KafkaRecord) -> tuple[str, str, int]:
    """Return the environment and fate under which a moved record is counted, and its number of tokens."""
    value = decode(message.value)
    if isinstance(value, Rollout):
        return clip(value.environment, NAME_LIMIT), MOVED, len(value.tokens)
    environment = value.environment if isinstance(value, GroupCancelled) else ""
    return clip(environment, NAME_LIMIT), MOVED_CONTROL, 0

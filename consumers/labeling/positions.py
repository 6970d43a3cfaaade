"""Positions of labeling: 0 the first time, then the committed offset; lost ones are recovered from outcomes on the log.

A position that was lost, or that belongs to a topic that has since been created again, is refused: with a guessed
position, records would be labeled twice or never.

Labeled records and dead letters name their source. If the labeler left out records after the last of these sources, it
gets them again, and leaves them out again.
"""

import logging
from contextlib import closing

from rollstream.consumers.grouping.process.bootstrap import committed_offsets, in_turn
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import BrokerUnavailable, RecordError, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.groups import members
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, fence, transactional_id
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import name_in_run, topic_name

logger = logging.getLogger(__name__)

SOURCE = "rollstream.source"
"""Header of a labeled record: partition and offset of its source in `unlabelled`, joined by a colon."""
_PLACE = ("topic", "partition", "offset")


def source_of(message: KafkaRecord) -> tuple[int, int] | None:
    """Return the place of a labeled record's source in `unlabelled`; None if the record was not labeled.

    The place is a partition and an offset. Raises RecordError if the header does not hold both.
    """
    source = dict(message.header_pairs()).get(SOURCE)
    if source is None:
        return None
    text = source.decode(errors="replace")
    first, _, second = text.partition(":")
    partition, offset = decimal_number(first), decimal_number(second)
    if partition is None or offset is None:
        raise RecordError(f"its header {SOURCE} is {text[:40]!r}, which is not a partition and an offset in unlabelled")
    return partition, offset


def refused_of(message: KafkaRecord) -> tuple[int, int] | None:
    """Return the place in `unlabelled` of the record in a dead letter; None if the record is from another topic.

    The place is a partition and an offset. Raises RecordError if the headers do not hold both.
    """
    headers = dict(message.header_pairs())
    topic, partition, offset = (_text(headers.get(f"__streams.errors.{name}")) for name in _PLACE)
    if name_in_run(topic) != "unlabelled":
        return None
    try:
        return int(partition), int(offset)
    except ValueError as error:
        raise RecordError("its headers do not hold a partition and an offset in unlabelled") from error


def _text(header: str | bytes | None) -> str:
    return header.decode(errors="replace") if isinstance(header, bytes) else header or ""


def ensure_positions(kafka: KafkaConfig, run: str, group: str) -> str:
    """Commit the first positions of labeling if there are none; return the topic id of `unlabelled` for commits.

    Raises StateRefused if positions were lost or the topic was created again, TopicError if it is missing, and
    BrokerUnavailable.
    """
    topic = topic_name(run, "unlabelled")
    topic_id = topic_admin.topic_ids(kafka, [topic])[topic]
    partitions = topic_admin.partitions_of(kafka, topic)
    committed = committed_offsets(kafka, group, topic, partitions)
    if all(tp.offset < 0 for tp in committed):
        pruned = any(begin for begin, _end in topic_admin.bounds(kafka, topic).values())
        labeled = "already pruned" if pruned else _labeled(kafka, run)
        begin = LabelingProgress(topic_id=topic_id).encode()
        first = [GroupPosition(topic, p, 0, begin) for p in range(partitions)]
        in_turn(kafka, run, group, lambda producer: _initialize(producer, kafka, group, first, labeled), "labeller")
        committed = committed_offsets(kafka, group, topic, partitions)
    lost = [tp.partition for tp in committed if tp.offset < 0]
    if lost:
        raise StateRefused(
            f"group {group} has no positions in partitions {lost} of {topic}; commit them again with "
            "`rollstream role label recover`"
        )
    others = {LabelingProgress.decode(tp).topic_id for tp in committed} - {topic_id, ""}
    if others:
        raise StateRefused(
            f"the positions of group {group} belong to a topic {topic} of id {', '.join(sorted(map(str, others)))}, "
            f"which was deleted; the present topic has id {topic_id}. Choose another run name, or delete the group"
        )
    return topic_id


def _labeled(kafka: KafkaConfig, run: str) -> str:
    """Return the partition and offset of one labeled record's source, joined by a colon; empty if there is none."""
    for name in ("trajectories", "rollouts"):
        for message in read_to_end(kafka, topic_name(run, name)):
            source = message.header(SOURCE)
            if source is not None:
                return source
    return ""


def _initialize(
    producer: TransactionalProducer, kafka: KafkaConfig, group: str, first: list[GroupPosition], labeled: str
) -> None:
    """Commit the first positions, unless another process has committed positions.

    `labeled` names a labeled record. Labels are searched for before the producer has fenced all others, so a process
    that wrote one in the meantime has committed its positions before they are read here. Raises StateRefused if
    positions were lost.
    """
    topic = first[0].topic
    if any(place.offset >= 0 for place in committed_offsets(kafka, group, topic, len(first))):
        return
    if labeled:
        raise StateRefused(
            f"group {group} has no positions in {topic}, but a record ({labeled}) was labeled: the positions were "
            f"lost. Commit them again with `rollstream role label recover`"
        )
    with Reader(kafka, group=group) as reader, producer.transaction() as transaction:
        transaction.send_offsets(first, reader.group_metadata())
        if members(kafka, group):
            raise StateRefused(
                f"group {group} has members but no positions in {topic}; stop them, and start this again"
            )
    event(logger, "labeling_initialized", topic=topic, partitions=len(first))


_OUTPUTS = {"trajectories": source_of, "rollouts": source_of, "dead-letters": refused_of}


def recover(kafka: KafkaConfig, run: str, config: LabelingConfig, patience_s: float | None = None) -> dict[int, int]:
    """Commit lost positions of labeling again; return the positions of all partitions.

    Committed positions stay if they belong to this topic and are not lower than the outcomes require. One ordinal per
    partition is fenced first, because a process that was paused within a transaction would commit later. Raises
    StateRefused if the group has members, DeadlineExceeded if open transactions in the output topics do not end within
    `patience_s` (kafka.patience_s by default), and BrokerUnavailable.
    """
    group = config.group_id(run)
    _refuse_members(kafka, group)
    try:
        with closing(TransactionalProducer(kafka, transactional_id(run, "labeller", "bootstrap"))) as producer:
            producer.start()
            return _recover(producer, kafka, run, group, patience_s)
    except (TransactionFailed, Stalled) as error:
        raise BrokerUnavailable(
            f"positions of group {group} cannot be committed: {error}; repeat `rollstream role label recover`"
        ) from error


def _recover(
    producer: TransactionalProducer, kafka: KafkaConfig, run: str, group: str, patience_s: float | None
) -> dict[int, int]:
    topic = topic_name(run, "unlabelled")
    topic_id = topic_admin.topic_ids(kafka, [topic])[topic]
    begins = {p: begin for p, (begin, _end) in topic_admin.bounds(kafka, topic).items()}
    for ordinal in begins:
        fence(kafka, transactional_id(run, "labeller", ordinal))
    for name in _OUTPUTS:
        await_decided(kafka, topic_name(run, name), "no positions were committed", patience_s)
    made = {name: _sources(kafka, run, name, begins) for name in _OUTPUTS}
    positions = []
    for place in committed_offsets(kafka, group, topic, len(begins)):
        p = place.partition
        labeled, refused = made["trajectories"][p] | made["rollouts"][p], made["dead-letters"][p]
        position = max((offset + 1 for offset in labeled | refused), default=begins[p])
        progress = LabelingProgress.decode(place)
        if place.offset < max(position, begins[p]) or progress.topic_id not in ("", topic_id):
            read = read_to_end(kafka, topic, partitions=[p])
            records = {offset for message in read if (offset := message.offset) < position}
            progress = LabelingProgress(
                topic_id=topic_id,
                since=begins[p],
                labeled=len(labeled),
                left_out=len(records - labeled - refused),
                dead_lettered=len(refused),
            )
            place = GroupPosition(topic, p, position, progress.encode())
        positions.append(place)
    with Reader(kafka, group=group) as reader, producer.transaction() as transaction:
        transaction.send_offsets(positions, reader.group_metadata())
        # From here on, no member sees a position before this transaction ends. A member that saw one earlier is either
        # still in the group, or has written records that the second check finds.
        _refuse_members(kafka, group)
        if {name: _sources(kafka, run, name, begins) for name in _OUTPUTS} != made:
            raise StateRefused("a process has labeled records; stop it, and repeat `rollstream role label recover`")
    return {place.partition: place.offset for place in positions}


def _refuse_members(kafka: KafkaConfig, group: str) -> None:
    if members(kafka, group):
        raise StateRefused(
            f"group {group} has members; stop them, wait out kafka.session_timeout_s ({kafka.session_timeout_s:g} s), "
            f"and repeat `rollstream role label recover`"
        )


def _sources(kafka: KafkaConfig, run: str, name: str, begins: dict[int, int]) -> dict[int, set[int]]:
    """Return the offsets, by partition of `unlabelled`, of existing records whose outcome is in topic `name`."""
    offsets: dict[int, set[int]] = {p: set() for p in begins}
    skipped = SkippedRecords("label-recover")
    for message in read_to_end(kafka, topic_name(run, name)):
        with skipped.passing(message):
            place = _OUTPUTS[name](message)
            if place is not None and place[0] in offsets and place[1] >= begins[place[0]]:
                offsets[place[0]].add(place[1])
    return offsets

"""Positions of labeling: offset 0 the first time, the committed offset afterwards.

A position that was lost, or that belongs to a topic that has since been created again, is refused: with a guessed
position, records would be labeled twice or never.
"""

import logging

from rollstream.consumers.grouping.process.bootstrap import committed_offsets, in_turn
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.groups import members
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.transactions import TransactionalProducer
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

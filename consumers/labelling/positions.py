"""Where labelling begins: at offset 0 the first time, from what was committed ever after.

A position that was lost, or that is of a topic since created again, is refused: whoever guesses labels twice or never.
"""

import logging
from dataclasses import dataclass

from confluent_kafka import KafkaException, Message, TopicPartition

from consumers.grouping.bootstrap import committed_offsets
from topics import clients
from topics.catalogue import name_in_run, topic_name
from topics.config import KafkaConfig
from topics.errors import RecordError, StateRefused
from topics.headers import header, header_pairs
from topics.logs import event
from topics.transactional_ids import transactional_id

logger = logging.getLogger(__name__)
SOURCE = "rollstream.source"
"""Header of a labelled trajectory: partition and offset it has in `unlabelled`, joined by a colon."""
_TIMEOUT_S = 30.0
_PLACE = ("topic", "partition", "offset")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is committed with the position of a partition: what became of its records below that."""

    topic_id: str
    """Id of the topic that the position is one of."""
    since: int = 0
    """Offset that counting began at."""
    labelled: int = 0
    left_out: int = 0
    dead_lettered: int = 0

    def encode(self) -> str:
        """As the metadata of a committed offset."""
        return f"{self.topic_id} {self.since} {self.labelled} {self.left_out} {self.dead_lettered}"

    @classmethod
    def decode(cls, committed: TopicPartition) -> "Progress":
        """That of a committed offset; where it says nothing of counts, counting begins there."""
        topic_id, *numbers = (committed.metadata or "").split(" ")
        if len(numbers) != 4 or not all(number.isascii() and number.isdecimal() for number in numbers):
            return cls(topic_id=topic_id, since=max(committed.offset, 0))
        since, labelled, left_out, dead_lettered = map(int, numbers)
        return cls(topic_id=topic_id, since=since, labelled=labelled, left_out=left_out, dead_lettered=dead_lettered)


def source_of(message: Message) -> tuple[int, int] | None:
    """Partition and offset in `unlabelled` of what a trajectory was made of; None where its worker knew its rewards.

    Raises RecordError for a header that names no place.
    """
    source = dict(header_pairs(message)).get(SOURCE)
    if source is None:
        return None
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    partition, _, offset = text.partition(":")
    if not (partition + offset).isascii() or not (partition.isdecimal() and offset.isdecimal()):
        raise RecordError(f"its header {SOURCE} is {text[:40]!r}, which names no place in unlabelled")
    return int(partition), int(offset)


def refused_of(message: Message) -> tuple[int, int] | None:
    """Partition and offset in `unlabelled` of what a dead letter was; None for one of another topic.

    Raises RecordError for headers that name no place.
    """
    headers = dict(header_pairs(message))
    topic, partition, offset = (_text(headers.get(f"__streams.errors.{name}")) for name in _PLACE)
    if name_in_run(topic) != "unlabelled":
        return None
    try:
        return int(partition), int(offset)
    except ValueError as error:
        raise RecordError("names no partition and offset of unlabelled") from error


def _text(header: str | bytes | None) -> str:
    return header.decode(errors="replace") if isinstance(header, bytes) else header or ""


def ensure_positions(kafka: KafkaConfig, run: str, group: str) -> str:
    """Commit where labelling begins unless it has begun; returns the id of `unlabelled`, which commits carry.

    Raises StateRefused where positions were lost or the topic was created again, TopicError where it is missing.
    """
    topic = topic_name(run, "unlabelled")
    topic_id = clients.topic_ids(kafka, [topic])[topic]
    partitions = clients.partitions_of(kafka, topic)
    committed = committed_offsets(kafka, group, topic, partitions)
    if all(tp.offset < 0 for tp in committed):
        pruned = any(begin for begin, _end in clients.bounds(kafka, topic).values())
        labelled = "what was pruned" if pruned else _labelled(kafka, run)
        if labelled:
            raise StateRefused(
                f"group {group} has no positions in {topic}, but {labelled} was labelled: they were lost. Commit "
                f"them again with `rollstream label recover`"
            )
        try:
            begin = Progress(topic_id=topic_id).encode()
            _commit(kafka, run, group, [TopicPartition(topic, p, 0, begin) for p in range(partitions)])
            event(logger, "labelling_initialised", run=run, partitions=partitions)
        except KafkaException as error:
            # Another process began at the same time, or nobody did.
            event(logger, "labelling_not_initialised", level=logging.WARNING, error=error.args[0].str())
        committed = committed_offsets(kafka, group, topic, partitions)
    lost = [tp.partition for tp in committed if tp.offset < 0]
    if lost:
        raise StateRefused(
            f"group {group} has no positions in partitions {lost} of {topic}; commit them again with "
            "`rollstream label recover`"
        )
    others = {Progress.decode(tp).topic_id for tp in committed} - {topic_id, ""}
    if others:
        raise StateRefused(
            f"the positions of group {group} are those of a topic {topic} of id {', '.join(sorted(map(str, others)))}, "
            f"which was deleted; this one is {topic_id}. Take a run of another name, or delete the group"
        )
    return topic_id


def _labelled(kafka: KafkaConfig, run: str) -> str:
    """A source that was labelled; nothing where none was."""
    for message in clients.read_to_end(kafka, topic_name(run, "trajectories")):
        source = header(message, SOURCE)
        if source is not None:
            return source
    return ""


def _commit(kafka: KafkaConfig, run: str, group: str, positions: list[TopicPartition]) -> None:
    producer = clients.transactional_producer(kafka, transactional_id(run, "labeller", "bootstrap"))
    consumer = clients.reader(kafka, group=group)
    try:
        producer.init_transactions(_TIMEOUT_S)
        producer.begin_transaction()
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), _TIMEOUT_S)
        producer.commit_transaction(_TIMEOUT_S)
    finally:
        consumer.close()

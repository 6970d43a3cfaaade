"""The way back when positions of labelling are lost: they follow from what was made of the records, never from a guess.

A trajectory that was labelled and a record that was refused name their source. What the labeler left out after the
last of these is given to it again, and left out again.
"""

from contextlib import suppress

from confluent_kafka import KafkaException, Producer, TopicPartition

from consumers.grouping.bootstrap import committed_offsets, members
from consumers.labelling.config import LabellingConfig
from consumers.labelling.positions import Progress, refused_of, source_of
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, StateRefused
from topics.open_transactions import await_decided
from topics.skipped import SkippedRecords
from topics.transactional_ids import earlier_id, fence, transactional_id

_OUTPUTS = {"trajectories": source_of, "dead-letters": refused_of}


def recover(kafka: KafkaConfig, run: str, config: LabellingConfig, patience_s: float | None = None) -> dict[int, int]:
    """Commit lost positions of labelling again; returns the positions of all partitions.

    Positions that are there, of this topic and no lower, stay. Processes of as many ordinals as there are partitions
    are fenced first: one that was paused within a transaction would commit later. Raises StateRefused when the group
    has members, DeadlineExceeded when what was labelled is not decided within `patience_s` (kafka.patience_s by
    default), BrokerUnavailable.
    """
    group = config.group_id(run)
    _refuse_members(kafka, group)
    producer = clients.transactional_producer(kafka, transactional_id(run, "labeller", "bootstrap"))
    try:
        producer.init_transactions(kafka.patience_s)
        return _recover(producer, kafka, run, group, patience_s)
    except KafkaException as error:
        raise BrokerUnavailable(
            f"positions of group {group} cannot be committed: {error.args[0].str()}; repeat `rollstream label recover`"
        ) from error


def _recover(producer: Producer, kafka: KafkaConfig, run: str, group: str, patience_s: float | None) -> dict[int, int]:
    topic = topic_name(run, "unlabelled")
    topic_id = clients.topic_ids(kafka, [topic])[topic]
    begins = {p: begin for p, (begin, _end) in clients.bounds(kafka, topic).items()}
    for ordinal in begins:
        fence(kafka, transactional_id(run, "labeller", ordinal))
        fence(kafka, earlier_id(run, "labeller", ordinal))
    for name in _OUTPUTS:
        await_decided(kafka, topic_name(run, name), "no positions were committed", patience_s)
    made = {name: _sources(kafka, run, name, begins) for name in _OUTPUTS}
    positions = []
    for place in committed_offsets(kafka, group, topic, len(begins)):
        p = place.partition
        labelled, refused = made["trajectories"][p], made["dead-letters"][p]
        position = max((offset + 1 for offset in labelled | refused), default=begins[p])
        progress = Progress.decode(place)
        if place.offset < max(position, begins[p]) or progress.topic_id not in ("", topic_id):
            read = clients.read_to_end(kafka, topic, partitions=[p])
            records = {offset for message in read if (offset := message.offset() or 0) < position}
            progress = Progress(
                topic_id=topic_id,
                since=begins[p],
                labelled=len(labelled),
                left_out=len(records - labelled - refused),
                dead_lettered=len(refused),
            )
            place = TopicPartition(topic, p, position, progress.encode())
        positions.append(place)
    consumer = clients.reader(kafka, group=group)
    producer.begin_transaction()
    try:
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), kafka.patience_s)
        # From here on no member sees a position before this transaction is over; one that came before has written.
        _refuse_members(kafka, group)
        if {name: _sources(kafka, run, name, begins) for name in _OUTPUTS} != made:
            raise StateRefused("a process labelled meanwhile; end it, and repeat `rollstream label recover`")
        producer.commit_transaction(kafka.patience_s)
    except BaseException:
        # Where nothing can be aborted, the error under way says more.
        with suppress(KafkaException):
            producer.abort_transaction(kafka.patience_s)
        raise
    finally:
        consumer.close()
    return {place.partition: place.offset for place in positions}


def _refuse_members(kafka: KafkaConfig, group: str) -> None:
    if members(kafka, group):
        raise StateRefused(
            f"group {group} has members; stop them, wait out kafka.session_timeout_s ({kafka.session_timeout_s:g} s), "
            f"and repeat `rollstream label recover`"
        )


def _sources(kafka: KafkaConfig, run: str, name: str, begins: dict[int, int]) -> dict[int, set[int]]:
    """By partition of `unlabelled`, offsets of records that are there still and that a topic has the outcome of."""
    found: dict[int, set[int]] = {p: set() for p in begins}
    skipped = SkippedRecords("label-recover")
    for message in clients.read_to_end(kafka, topic_name(run, name)):
        with skipped.passing(message):
            place = _OUTPUTS[name](message)
            if place is not None and place[0] in found and place[1] >= begins[place[0]]:
                found[place[0]].add(place[1])
    return found

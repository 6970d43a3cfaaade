"""Recovery of lost labeling positions from the outcomes on the log, never from a guess.

Labeled records and dead letters name their source. If the labeler left out records after the last of these sources, it
gets them again, and leaves them out again.
"""

from contextlib import closing

from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.positions import refused_of, source_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.groups import members
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, fence, transactional_id
from rollstream.topics.wire.catalogue import topic_name

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

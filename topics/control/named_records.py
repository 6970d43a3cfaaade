"""Records of `control` about something with a name, such as a learner that was retired or forked into the run.

The newest record of a name is valid; a tombstone withdraws it.
"""

from typing import TypeVar

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ForkedLearner, RetiredLearner
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import decode_key, encode_key

R = TypeVar("R")


def read_named(kafka: KafkaConfig, run: str, kind: str, record_type: type[R]) -> dict[str, R]:
    """Return the records of a kind by name; none if the run has no topic `control`."""
    held: dict[str, R] = {}
    skipped = SkippedRecords(logged=False)
    try:
        for message in read_to_end(kafka, topic_name(run, "control")):
            note_named(held, kind, record_type, message, skipped)
    except TopicError:
        return {}
    return held


def write_named(kafka: KafkaConfig, run: str, kind: str, name: str, record: object | None) -> None:
    """Write the record of a name, or withdraw it. Raises TopicError if the run has no topic `control`."""
    topic = topic_name(run, "control")
    topic_admin.partitions_of(kafka, topic)
    with Sender(clients.producer(kafka)) as sender:
        sender.send(topic, None if record is None else encode(record), encode_key(kind, name), partition=0)


def note_named(
    held: dict[str, R], kind: str, record_type: type[R], message: KafkaRecord, skipped: SkippedRecords
) -> None:
    """Update `held` from a record of `control` with a key of a kind and a name; other kinds change nothing."""
    with skipped.passing(message):
        key = decode_key(message.key)
        if len(key) != 2 or key[0] != kind:
            return
        record = None if message.value is None else skipped.decode(record_type, message)
        if record is not None:
            held[str(key[1])] = record
        elif message.value is None:
            held.pop(str(key[1]), None)


FORKED = "forked"
"""First part of the key of a record of a forked learner; the second is its name."""


def forked_learners(kafka: KafkaConfig, run: str) -> dict[str, ForkedLearner]:
    """Return the learners forked into a run by name; none if the run has no topic `control`."""
    return read_named(kafka, run, FORKED, ForkedLearner)


def write_fork(kafka: KafkaConfig, run: str, learner: str, record: ForkedLearner | None) -> None:
    """Put a learner forked into `run` on record, or withdraw its record."""
    write_named(kafka, run, FORKED, learner, record)


RETIRED = "retired"
"""First part of the key of a record that retires a learner; the second is its name."""


def retired_learners(kafka: KafkaConfig, run: str) -> dict[str, RetiredLearner]:
    """Return the retired learners by name; none if the run has no topic `control`."""
    return read_named(kafka, run, RETIRED, RetiredLearner)


def note_retired(retired: dict[str, RetiredLearner], message: KafkaRecord, skipped: SkippedRecords) -> None:
    """Update `retired` from a record of `control`; other kinds of records change nothing."""
    note_named(retired, RETIRED, RetiredLearner, message, skipped)

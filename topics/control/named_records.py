"""Records of `control` about something with a name. The newest record of a name is valid; a tombstone withdraws it."""

from typing import TypeVar

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
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

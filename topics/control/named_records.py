"""Records of `control`, each of a kind and about something with a name.

The newest record of a name is valid; a tombstone withdraws it.

A paused partition of `rollouts` changes no batch: its records are read later, as after a stop of the grouping process.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, Generic, TypeVar

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.follower import TopicFollower, read_then_follow
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.sender import Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import PausedPartition
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import decode_key, encode_key

R = TypeVar("R")
RETIRED = "retired"
"""First part of the key of a record that retires a learner; the second is its name."""
FORKED = "forked"
"""First part of the key of a record of a forked learner; the second is its name. It is on record before the learner's
first step is on `steps`, so that `rollstream prune` keeps the batches that it has yet to read."""
EXCLUDED = "excluded"
"""First part of the key of a batch that learners leave out; the second is its id."""
_AT_ONCE = 500


def read_named(kafka: KafkaConfig, run: str, kind: str, record_type: type[R]) -> dict[str, R]:
    """Return the records of a kind by name; none if the run has no topic `control`."""
    held: dict[str, R] = {}
    skipped = SkippedRecords(logged=False)
    with suppress(TopicError):
        for message in read_to_end(kafka, topic_name(run, "control")):
            note_named(held, kind, record_type, message, skipped)
    return held


def write(
    kafka: KafkaConfig, run: str, kind: str, records: Mapping[str, object | None], remedy: str = "run this again"
) -> None:
    """Write records of a kind; each key of `records` is a name, and None withdraws its record.

    `remedy` ends the error if some are not written. Raises TopicError if the run has no topic `control`,
    BrokerUnavailable or DeliveryError.
    """
    topic = topic_name(run, "control")
    topic_admin.partitions_of(kafka, topic)
    with Sender(clients.producer(kafka), remedy=remedy) as sender:
        for name, record in records.items():
            value = None if record is None else encode(record)
            sender.send(topic, value, encode_key(kind, name), partition=0, name=f"the record {kind} of {name}")


def named(message: KafkaRecord, kinds: Mapping[str, type], skipped: SkippedRecords) -> tuple[str, str, Any] | None:
    """Return kind, name and record, None for a tombstone; return None for an invalid record, or one of another kind.

    `kinds` has the type of record of each kind.
    """
    with skipped.passing(message):
        key = decode_key(message.key)
        if len(key) == 2 and key[0] in kinds:
            kind, name = map(str, key)
            record = None if message.value is None else skipped.decode(kinds[kind], message)
            if record is not None or message.value is None:
                return kind, name, record
    return None


def note_named(
    held: dict[str, R], kind: str, record_type: type[R], message: KafkaRecord, skipped: SkippedRecords
) -> None:
    """Update `held` from a record of `control`; other kinds change nothing."""
    if found := named(message, {kind: record_type}, skipped):
        put(held, *found[1:])


def put(held: dict[str, R], name: str, record: R | None) -> None:
    """Note the record of a name; None withdraws it."""
    if record is None:
        held.pop(name, None)
    else:
        held[name] = record


class ControlWatch(Closing, Generic[R]):
    """Follows the records of a kind."""

    def __init__(
        self, kafka: KafkaConfig, run: str, kind: str, record_type: type[R], reader: str = "", *, required: bool = True
    ) -> None:
        """Read the present records. Raises BrokerUnavailable, and TopicError if the run has no topic `control`, unless
        it is not `required`. With the name of a `reader`, skipped records are logged."""
        self.records: dict[str, R] = {}
        """Records in force, by name."""
        self.skipped = SkippedRecords(reader, logged=bool(reader))
        self._kind, self._type = kind, record_type
        self._follower: TopicFollower | None = None
        # The present records are read first; otherwise a withdrawn one would return for a moment.
        with nullcontext() if required else suppress(TopicError):
            self._follower = read_then_follow(kafka, topic_name(run, "control"), self._note)

    def poll(self, wait_s: float = 0.0) -> bool:
        """Process new records; return whether there were any. Raises TopicError or BrokerUnavailable."""
        messages = self._follower.poll(_AT_ONCE, wait_s) if self._follower else []
        for message in messages:
            self._note(message)
        return bool(messages)

    def close(self) -> None:
        """Stop following."""
        if self._follower is not None:
            self._follower.close()

    def _note(self, message: KafkaRecord) -> None:
        note_named(self.records, self._kind, self._type, message, self.skipped)


PAUSED = "paused"
"""First part of the key of a record that pauses a partition; the second is its number."""
REASON_LIMIT = 300
"""Largest number of characters of a reason."""


def pause(kafka: KafkaConfig, run: str, partition: int, reason: str) -> None:
    """Record that grouping must stop reading a partition. Raises ConfigurationError if there is no such partition, or
    if the reason is empty or too long."""
    if not 0 < len(reason.strip()) <= REASON_LIMIT:
        raise ConfigurationError(
            f"give a reason with --reason, of 1 to {REASON_LIMIT} characters: the next operator reads it"
        )
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
    if not 0 <= partition < partitions:
        raise ConfigurationError(f"topic rollouts of run {run} has partitions 0 to {partitions - 1}, not {partition}")
    record = PausedPartition(partition=partition, reason=reason.strip(), wall_time=time.time())
    write(kafka, run, PAUSED, {str(partition): record})


def resume(kafka: KafkaConfig, run: str, partition: int) -> None:
    """Let grouping read a partition again. Raises ConfigurationError if it is not paused."""
    paused = {record.partition for record in read_named(kafka, run, PAUSED, PausedPartition).values()}
    if partition not in paused:
        names = ", ".join(map(str, sorted(paused))) or "none"
        raise ConfigurationError(f"partition {partition} of run {run} is not paused; paused partitions: {names}")
    write(kafka, run, PAUSED, {str(partition): None})

"""Partitions of `rollouts` that grouping does not read for a while, as recorded on the topic `control`.

A pause changes no batch: the records of a paused partition are read later, as after a stop of the grouping process.
"""

import time
from contextlib import suppress

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
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

_PAUSED = "paused"
"""First part of the key of a record that pauses a partition; the second is its number."""
REASON_LIMIT = 300
"""Largest number of characters of a reason."""


class PauseWatch(Closing):
    """Follows the paused partitions of a run."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Read the present state; nothing is paused in a run without the topic `control`."""
        self.paused: dict[int, PausedPartition] = {}
        """Records of the paused partitions, by number."""
        self._skipped = SkippedRecords(logged=False)
        self._follower: TopicFollower | None = None
        # The present records are read first; otherwise a pause that is over would return for a moment.
        with suppress(TopicError):
            self._follower = read_then_follow(kafka, topic_name(run, "control"), self._note)

    def poll(self) -> None:
        """Process the records written since the last call."""
        for message in self._follower.poll(100, 0.0) if self._follower else ():
            self._note(message)

    def close(self) -> None:
        """Stop following."""
        if self._follower is not None:
            self._follower.close()

    def _note(self, message: KafkaRecord) -> None:
        note_paused(self.paused, message, self._skipped)


def paused_partitions(kafka: KafkaConfig, run: str) -> dict[int, PausedPartition]:
    """Return the partitions that are paused now, by number; none if the run has no topic `control`."""
    paused: dict[int, PausedPartition] = {}
    skipped = SkippedRecords(logged=False)
    with suppress(TopicError):
        for message in read_to_end(kafka, topic_name(run, "control")):
            note_paused(paused, message, skipped)
    return paused


def note_paused(paused: dict[int, PausedPartition], message: KafkaRecord, skipped: SkippedRecords) -> None:
    """Update `paused` from a record of `control`; other kinds of records change nothing."""
    with skipped.passing(message):
        key = decode_key(message.key)
        if len(key) != 2 or key[0] != _PAUSED:
            return
        record = None if message.value is None else skipped.decode(PausedPartition, message)
        if record is not None:
            paused[record.partition] = record
        elif message.value is None and (partition := decimal_number(str(key[1]))) is not None:
            paused.pop(partition, None)


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
    _write(kafka, run, partition, encode(record))


def resume(kafka: KafkaConfig, run: str, partition: int) -> None:
    """Let grouping read a partition again. Raises ConfigurationError if it is not paused."""
    paused = paused_partitions(kafka, run)
    if partition not in paused:
        names = ", ".join(map(str, sorted(paused))) or "none"
        raise ConfigurationError(f"partition {partition} of run {run} is not paused; paused partitions: {names}")
    _write(kafka, run, partition, None)


def _write(kafka: KafkaConfig, run: str, partition: int, value: bytes | None) -> None:
    topic = topic_name(run, "control")
    topic_admin.partitions_of(kafka, topic)
    with Sender(clients.producer(kafka)) as sender:
        sender.send(topic, value, encode_key(_PAUSED, str(partition)), partition=0, name="the pause")

"""Writes a run that has only batches, made from another run's log under other settings or rewards, for a learner.

The new run also has the policy versions of the other run, which decide staleness, but no rollouts and no journal.
"""

from collections.abc import Iterable, Sequence

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.files.stored_arrays import StoredArrays
from rollstream.topics.kafka import clients, provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.records import BatchIndexEntry, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

_TIMEOUT_S = 60.0
_REMEDY = "delete the topics of the run, and write into it again"

TimedEntry = tuple[int, BatchIndexEntry]
"""Time at which a batch was cut, and its entry."""


def prepare(kafka: KafkaConfig, run: str, into: str, topics: TopicsConfig) -> None:
    """Create the topics of `into` with these settings, and copy the policy versions of `run`.

    Raises ConfigurationError if `into` is `run` itself, and TopicError if `into` has records already.
    """
    if into == run:
        raise ConfigurationError(f"--into {into} is the run that is read; name another")
    if begun := first_record(kafka, into, ("batches", "policies", "steps", "rollouts")):
        raise TopicError(f"run {into} has {begun} already; name another run with --into")
    provisioning.apply(kafka, topics, into)
    policies = read_to_end(kafka, topic_name(run, "policies"))
    _write(kafka, topic_name(into, "policies"), ((message.key, message.value) for message in policies))


def first_record(kafka: KafkaConfig, run: str, topics: Iterable[str]) -> str:
    """Return the first of these topics of a run that has a record, by its name in the run; empty if none has."""
    existing = {description.topic for description in provisioning.describe(kafka, run)}
    for name in topics:
        topic = topic_name(run, name)
        if topic in existing and next(iter(read_to_end(kafka, topic)), None) is not None:
            return name
    return ""


class BatchWriter:
    """Writes the batches of one partition."""

    def __init__(self, kafka: KafkaConfig, run: str, into: str) -> None:
        self._sender = Sender(clients.producer(kafka), remedy=_REMEDY)
        self._topic = topic_name(into, "batches")
        self._entries: list[TimedEntry] = []
        self._kafka, self._run, self._into = kafka, run, into

    def write(self, batch: TrainingBatch) -> None:
        """Copy the stored arrays of a batch and send it; its entry is known once the batch is acknowledged."""
        if names := {entry.array.stored for entry in batch.token_arrays if entry.array.stored}:
            # Whoever reads the batch finds out which of them are missing.
            source = StoredArrays.of(self._run, self._kafka.arrays)
            StoredArrays.of(self._into, self._kafka.arrays).copy_from(source, names)

        def delivered(delivery: Delivery) -> None:
            self._entries.append((batch.cut_ms, BatchIndexEntry.of(batch, delivery.offset)))

        value, key, name = encode(batch), encode_key(batch.batch_id), f"batch {batch.batch_id}"
        self._sender.send(self._topic, value, key, partition=batch.partition, name=name, on_delivery=delivered)

    def close(self) -> list[TimedEntry]:
        """Wait until all batches are acknowledged, and return their index entries."""
        self._sender.flush(_TIMEOUT_S)
        return self._entries


def write_index(kafka: KafkaConfig, into: str, entries: Sequence[TimedEntry]) -> None:
    """Write the index of all partitions' batches, in the order in which they were cut."""
    ordered = (entry for _time, entry in sorted(entries, key=_in_order))
    _write(kafka, topic_name(into, "batch-index"), ((encode_key(entry.batch_id), encode(entry)) for entry in ordered))


def _in_order(timed: TimedEntry) -> tuple[int, int, int]:
    return timed[0], timed[1].partition, timed[1].offset


def _write(kafka: KafkaConfig, topic: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
    """Write keys and values to a topic of one partition."""
    sender = Sender(clients.producer(kafka), remedy=_REMEDY)
    for key, value in records:
        sender.send(topic, value, key, partition=0)
    sender.flush(_TIMEOUT_S)

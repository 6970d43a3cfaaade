"""One transaction of a grouping process: batches, dead letters, journal, offsets, and the index entries last.

How it is exactly once is said in `consumers.transactions`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from confluent_kafka import Consumer, TopicPartition

from consumers.grouping.bootstrap import WRITER
from consumers.grouping.changes import DeadLetter, Output
from consumers.grouping.restore import Journal
from consumers.transactions import ExactlyOnce, Refused
from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import RecordTooLarge
from topics.keys import encode_key
from topics.records import BatchIndexEntry, TrainingBatch


class Part(NamedTuple):
    """What one task adds to a transaction."""

    output: Output
    journal: Journal
    leader_epoch: int = -1
    """Of the last record read; -1 where it is unknown."""


class TransactionPublisher(ExactlyOnce[Part]):
    """Publishes outputs of tasks, exactly once."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str, ordinal: int, consumer: Consumer) -> None:
        """`group` is the full name of the consumer group `consumer` is a member of."""
        super().__init__(kafka, run, group, "grouper", ordinal, consumer, topic_name(run, "rollouts"))

    def _write(self, parts: Sequence[Part]) -> list[TopicPartition]:
        offsets: dict[tuple[str, object], int] = {}
        for part in parts:
            output = part.output
            for batch in output.batches:
                self._produce(
                    "batches", encode(batch), encode_key(batch.batch_id), batch.partition, batch.batch_id, offsets
                )
            for letter in output.dead_letters:
                self._produce_dead_letter(self._refused(output.journal.partition, letter))
            partition = output.journal.partition
            for record in output.records:
                record = replace(record, leader_epoch=part.leader_epoch)
                name = f"{partition}-{record.sequence}"
                self._produce("journal", encode(record), encode_key(partition), partition, name, offsets)
        self._flush()
        commits = []
        for part in parts:
            journal = part.output.journal
            for batch in part.output.batches:
                entry = index_entry(batch, offsets["batches", batch.batch_id])
                self._produce("batch-index", encode(entry), encode_key(batch.batch_id), 0, batch.batch_id, offsets)
            # The last of them tells; the list is never empty.
            [*_, metadata] = [
                part.journal.written(offsets["journal", f"{record.partition}-{record.sequence}"], record)
                for record in part.output.records
            ]
            commits.append(
                TopicPartition(
                    self._topic, journal.partition, journal.position, metadata.encode(), leader_epoch=part.leader_epoch
                )
            )
        return commits

    def _produce(
        self, topic: str, value: bytes, key: bytes, partition: int, name: object, offsets: dict[tuple[str, object], int]
    ) -> None:
        if len(value) > self._kafka.max_record_bytes:
            raise RecordTooLarge(
                f"{topic} record {name} has {len(value)} bytes, the limit is kafka.max_record_bytes "
                f"{self._kafka.max_record_bytes}; lower grouping.batch_bytes or raise the limit"
            )

        def delivered(offset: int) -> None:
            offsets[topic, name] = offset

        headers: dict[str, str | bytes | None] = {WRITER: self._id} if topic == "journal" else {}
        self._enqueue(topic_name(self._run, topic), value, key, partition, headers, delivered)

    def _refused(self, partition: int, letter: DeadLetter) -> Refused:
        offset, timestamp_ms, key, value = letter.record
        # A stand-in for a record nobody could decompress has no time.
        why = letter.error if timestamp_ms >= 0 else clients.UNREADABLE
        return Refused(self._topic, partition, offset, key, value, why)


def index_entry(batch: TrainingBatch, offset: int) -> BatchIndexEntry:
    """The index entry of a batch that lies at `offset` of its partition of batches."""
    return BatchIndexEntry(
        batch_id=batch.batch_id,
        partition=batch.partition,
        offset=offset,
        rollouts=len(batch),
        tokens=len(batch.tokens),
        trained_tokens=int(batch.loss_mask.sum()),
        lowest_version=int(batch.lowest_versions.min()),
        highest_version=int(batch.highest_versions.max()),
        size_bytes=sum(array.nbytes for array in (batch.tokens, batch.loss_mask, batch.logprobs, batch.advantages)),
        digest=batch.digest,
    )

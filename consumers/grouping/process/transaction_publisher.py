"""Transactions of a grouping process: batches, dead letters, journal, offsets, and the index entries last.

`rollstream.consumers.transactions` explains how this is exactly once.
"""

from collections.abc import Sequence
from dataclasses import replace

from rollstream.consumers.grouping.core.effects import DeadLetter
from rollstream.consumers.grouping.core.grouping_task import TaskCommit
from rollstream.consumers.grouping.process.bootstrap import WRITER
from rollstream.consumers.transactions import ExactlyOnce, Refused
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordTooLarge
from rollstream.topics.kafka.reader import Poller
from rollstream.topics.kafka.records import UNREADABLE, GroupPosition
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.transactions import Transaction
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key


class TransactionPublisher(ExactlyOnce[TaskCommit]):
    """Publishes the effects of tasks, exactly once."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str, ordinal: int, member: Poller) -> None:
        """`group` is the full name of the consumer group that `member` belongs to."""
        super().__init__(kafka, run, group, "grouper", ordinal, member, topic_name(run, "rollouts"))
        self.batch_offsets: dict[str, int] = {}
        """Offsets in `batches` of the batches of the latest transaction, by id."""

    def _write(self, transaction: Transaction, commits: Sequence[TaskCommit]) -> list[GroupPosition]:
        deliveries: dict[tuple[str, str], Delivery] = {}
        for commit in commits:
            effects = commit.effects
            partition = effects.journal.partition
            for batch in effects.encoded:
                key = encode_key(batch.batch_id)
                self._send(transaction, "batches", batch.frame, key, partition, batch.batch_id, deliveries)
            for letter in effects.dead_letters:
                self._send_dead_letter(transaction, self._refused(partition, letter))
            for record in effects.records:
                record = replace(record, leader_epoch=commit.leader_epoch)
                name = f"{partition}-{record.sequence}"
                self._send(transaction, "journal", encode(record), encode_key(partition), partition, name, deliveries)
        self._flush(transaction)
        positions = []
        offsets = {place: transaction.offset_of(delivery) for place, delivery in deliveries.items()}
        self.batch_offsets = {name: offset for (topic, name), offset in offsets.items() if topic == "batches"}
        for commit in commits:
            journal = commit.effects.journal
            for batch in commit.effects.encoded:
                entry = replace(batch.entry, offset=offsets["batches", batch.batch_id])
                key = encode_key(batch.batch_id)
                self._send(transaction, "batch-index", encode(entry), key, 0, batch.batch_id, deliveries)
            # The metadata of the last record is committed; the list is never empty.
            [*_, metadata] = [
                commit.journal.add_written(offsets["journal", f"{record.partition}-{record.sequence}"], record)
                for record in commit.effects.records
            ]
            positions.append(
                GroupPosition(
                    self._topic,
                    journal.partition,
                    journal.position,
                    metadata.encode(),
                    leader_epoch=commit.leader_epoch,
                )
            )
        return positions

    def _send(
        self,
        transaction: Transaction,
        topic: str,
        value: bytes,
        key: bytes,
        partition: int,
        name: str,
        deliveries: dict[tuple[str, str], Delivery],
    ) -> None:
        if len(value) > self._kafka.max_record_bytes:
            raise RecordTooLarge(
                f"{topic} record {name} has {len(value)} bytes, but the limit is kafka.max_record_bytes "
                f"{self._kafka.max_record_bytes}; lower grouping.batch_bytes or raise the limit"
            )

        def delivered(delivery: Delivery) -> None:
            deliveries[topic, name] = delivery

        headers = {WRITER: self._id} if topic == "journal" else None
        transaction.send(
            topic_name(self._run, topic), value, key, partition=partition, headers=headers, on_delivery=delivered
        )

    def _refused(self, partition: int, letter: DeadLetter) -> Refused:
        record = letter.record
        why = letter.error if record.readable else UNREADABLE
        return Refused(self._topic, partition, record.offset, record.key, record.value, why)

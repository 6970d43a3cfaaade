"""Commits tasks in transactions, one at a time and at a pace, while the tasks read on; index entries come last.

With a batch, a transaction begins as soon as the previous one ends, because learners wait for it; without one it waits,
which keeps the number of transactions small. `rollstream.consumers.transactions` explains how this is exactly once.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rollstream.consumers.grouping.core.effects import DeadLetter, Effects
from rollstream.consumers.grouping.core.grouping_task import GroupingTask, TaskCommit
from rollstream.consumers.grouping.process.bootstrap import WRITER
from rollstream.consumers.grouping.process.grouping_metrics import GroupingFigures
from rollstream.consumers.transactions import ExactlyOnce, Refused
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordTooLarge
from rollstream.topics.kafka.reader import Poller
from rollstream.topics.kafka.records import UNREADABLE, GroupPosition
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.transactions import Transaction
from rollstream.topics.logs import event
from rollstream.topics.traces.spans import SPANS
from rollstream.topics.traces.stages import batch_committed
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)

GATHER_S = 0.005
"""How long a poll waits for further records after the first, because one poll per record would cost too much."""


class CommitPace:
    """Says when the next transaction is due, and how long the next poll may wait for its first record."""

    def __init__(self, interval_s: float, most_records: int, clock: Callable[[], float] | None = None) -> None:
        """Effects without a batch wait up to `interval_s`; after `most_records`, a transaction begins in any case."""
        self._interval_s, self._most, self._clock = interval_s, most_records, clock or time.monotonic
        self._records = 0
        self._since_s: float | None = None
        self._begun_s = self._clock()

    def passed(self, records: int) -> None:
        """Count records that were read and are not yet part of a transaction."""
        if records:
            self._records += records
            self._since_s = self._clock() if self._since_s is None else self._since_s

    def is_due(self, *, batches: bool, free: bool) -> bool:
        """Whether to begin a transaction, given that there is something to commit.

        `batches` says whether that includes a batch, and `free` whether the previous transaction has ended. Once
        `most_records` have been read, a transaction is due even if the previous one has not ended.
        """
        if self._since_s is None:
            self._since_s = self._clock()
        if self._records >= self._most:
            return True
        return free and (batches or self._clock() - self._since_s >= self._interval_s)

    def wait_s(self, *, batches: bool, free: bool) -> float:
        """How long a poll may wait for its first record; `batches` says whether a batch waits for its transaction.

        While a transaction is in progress, the wait is a quarter of the time that it has taken so far. The next
        transaction then begins soon after a fast one ends, and a transaction that hangs costs few polls.
        """
        now_s = self._clock()
        if self._since_s is None:
            wait_s = self._interval_s
        elif free:
            wait_s = 0.0 if batches else self._since_s + self._interval_s - now_s
        else:
            wait_s = (now_s - self._begun_s) / 4
        return min(self._interval_s, max(GATHER_S, wait_s))

    def begun(self) -> None:
        """Note that a transaction has begun with all records read so far."""
        self._records, self._since_s, self._begun_s = 0, None, self._clock()


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


class Committer:
    """The transaction in progress, if there is one."""

    def __init__(self, run: str, group: str, publisher: TransactionPublisher, figures: GroupingFigures) -> None:
        """`group` is the full name of the consumer group."""
        self._run, self._group = run, group
        self._publisher = publisher
        self._figures = figures
        self._publishing: list[TaskCommit] = []
        """Parts of the transaction that was begun."""

    @property
    def done(self) -> bool:
        """Whether `settle` would return without waiting."""
        return self._publisher.done

    def begin(self, tasks: Iterable[GroupingTask], *, closing: bool = False) -> None:
        """Settle the last transaction, then begin one with the effects of these tasks, if there are any tasks.

        Raises OwnershipLost or Fenced as `settle` does.
        """
        self.settle()
        commits = [task.prepare_commit(closing=closing) for task in tasks]
        if commits:
            self._publishing = commits
            self._publisher.begin(commits)

    def settle(self) -> None:
        """Wait for the transaction in progress.

        Raises OwnershipLost if it was aborted and partitions may belong to another process, and Fenced if another
        process runs under the same ordinal.
        """
        commits, self._publishing = self._publishing, []
        self._publisher.settle()
        if commits:
            self._figures.committed([commit.effects for commit in commits], self._publisher.latest_s)
        for commit in commits:
            _report(commit.effects)
            for batch in commit.effects.batches if SPANS.enabled else ():
                offset = self._publisher.batch_offsets.get(batch.batch_id, -1)
                batch_committed(self._run, self._group, batch, offset, self._publisher.latest_s)


def _report(effects: Effects) -> None:
    for batch in effects.encoded:
        event(logger, "batch", batch=batch.batch_id, rollouts=batch.entry.rollouts, cut=batch.cut)
    for letter in effects.dead_letters:
        event(
            logger,
            "dead_letter",
            level=logging.WARNING,
            partition=effects.journal.partition,
            offset=letter.record.offset,
            error=letter.error,
        )

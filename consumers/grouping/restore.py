"""Restoring a task from Kafka: committed offset and metadata, the journal it names, then the log from the watermark.

Refuses, with the remedy, whatever contradicts itself; never guesses a position.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, Message, TopicPartition

from consumers.grouping import state
from consumers.grouping.bootstrap import committed_offsets
from consumers.grouping.changes import CORE_VERSION, Record
from consumers.grouping.config import GrouperConfig
from consumers.grouping.fold import Fold
from consumers.grouping.makers import makers_of
from consumers.grouping.state import CommitMetadata
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, StateRefused
from topics.logs import event
from topics.records import JournalRecord

logger = logging.getLogger(__name__)
_COARSE_MS = 1000


@dataclass
class Journal:
    """Where a task's journal stands: what the metadata of its next commit is made of.

    Noting a record whose transaction is then aborted and sent again does no harm: pointers only ever lie too low.
    """

    newest: int
    snapshot: int
    horizon: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Where the groups still remembered are told of, oldest first: first and last finishing time, and first offset, of
    up to a second of stream time. Coarse, so that it stays small whatever the rate of transactions."""

    def written(self, offset: int, record: JournalRecord) -> CommitMetadata:
        """Note a record just written at `offset`; returns the metadata to commit with it."""
        self.newest = offset
        if record.snapshot and record.part == 0:
            self.snapshot = offset
        self.note(offset, record)
        oldest = self.horizon[0][2] if self.horizon else offset
        return CommitMetadata(self.newest, self.snapshot, min(oldest, self.snapshot))

    def note(self, offset: int, record: JournalRecord) -> None:
        """Keep in mind which groups the record says are finished, and forget with it what it forgets."""
        if record.finished_groups:
            first_ms, last_ms = record.finished_groups[0].finished_ms, record.finished_groups[-1].finished_ms
            if self.horizon and last_ms - self.horizon[-1][0] < _COARSE_MS:
                began_ms, _, first_offset = self.horizon[-1]
                self.horizon[-1] = (began_ms, last_ms, first_offset)
            else:
                self.horizon.append((first_ms, last_ms, offset))
        while self.horizon and self.horizon[0][1] < record.remembered_since_ms:
            self.horizon.popleft()


def records_of(message: Message) -> Record:
    """A message of `rollouts` as the fold takes it."""
    offset = message.offset()
    assert offset is not None
    return Record(offset, message.timestamp()[1], message.key(), message.value())


def restore_task(
    kafka: KafkaConfig, run: str, partition: int, partitions: int, topic_id: str, grouper: GrouperConfig
) -> tuple[Fold, Journal]:
    """The fold of a partition as its last committed transaction left it, and where its journal stands.

    Raises StateRefused when offsets, journal and log do not belong together, with the remedy.
    """
    began = time.monotonic()
    rollouts, journal_topic = topic_name(run, "rollouts"), topic_name(run, "journal")
    group = grouper.group_id(run)
    where = f"{rollouts}[{partition}] by group {group}"
    committed = committed_offsets(kafka, group, rollouts, partitions)[partition]
    if committed.offset < 0:
        raise StateRefused(
            f"no offset is committed for {where}; a new run is prepared by `rollstream topics apply`, an old one whose "
            f"offsets expired by `rollstream group recover`"
        )
    metadata = CommitMetadata.decode(committed.metadata, where)
    journal = Journal(metadata.journal, metadata.snapshot)
    records: list[JournalRecord] = []
    for message in _range(
        kafka, journal_topic, partition, min(metadata.oldest, metadata.snapshot), metadata.journal + 1
    ):
        record = decode_as(JournalRecord, message.value())
        records.append(record)
        journal.note(message.offset() or 0, record)
    restored = state.restore(records)
    if restored.position != committed.offset:
        raise StateRefused(
            f"offset {committed.offset} is committed for {where}, its journal record says {restored.position}; another "
            f"program committed it: commit again with `rollstream group recover`"
        )
    if restored.topic_id != topic_id:
        raise StateRefused(
            f"{rollouts} was deleted and created again since the journal was written (id {topic_id}, was "
            f"{restored.topic_id}); its rollouts are gone: start a run of another name"
        )
    if restored.partitions != partitions:
        raise StateRefused(
            f"{rollouts} has {partitions} partitions, the journal was written for {restored.partitions}; keys "
            f"have moved: start a run of another name"
        )
    if records[-1].core_version > CORE_VERSION:
        raise StateRefused(
            f"the journal of {where} was written by core version {records[-1].core_version}, this is {CORE_VERSION}; "
            f"upgrade rollstream"
        )
    fold = Fold(restored, makers_of(grouper.makers))
    read = 0
    if fold.replaying:
        for message in _range(kafka, rollouts, partition, restored.watermark, restored.position):
            fold.replay(records_of(message))
            read += 1
        fold.resume()
    event(
        logger,
        "task_restored",
        partition=partition,
        position=restored.position,
        watermark=restored.watermark,
        unfinished=len(restored.unfinished),
        journal_records=len(records),
        records_read_again=read,
        seconds=round(time.monotonic() - began, 3),
    )
    return fold, journal


def _range(
    kafka: KafkaConfig, topic: str, partition: int, start: int, stop: int, timeout_s: float = 60.0
) -> Iterator[Message]:
    """Committed records at offsets start to stop - 1. A transaction shows on its partitions at different instants, so
    an end of partition before `stop` is waited out. Raises DeadlineExceeded when nothing comes for `timeout_s`."""
    consumer = clients.reader(kafka, fetch_wait_ms=10)
    try:
        clients.follow(consumer, kafka, [TopicPartition(topic, partition, start)])
        deadline = time.monotonic() + timeout_s
        position = {partition: start}
        while True:
            for message in clients.with_unreadable(consumer, consumer.consume(500, 0.05), position):
                error = message.error()
                if error is None:
                    offset = message.offset()
                    assert offset is not None
                    if offset < stop:
                        yield message
                        deadline = time.monotonic() + timeout_s
                    if offset >= stop - 1:
                        return
                elif error.code() == KafkaError._PARTITION_EOF:
                    if (message.offset() or 0) >= stop:
                        return
                else:
                    clients.raise_for(error, f"restoring from {topic}[{partition}]")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{topic}[{partition}] did not show offset {stop - 1} within {timeout_s:g} s; a transaction may be "
                    f"open, or the broker lost records"
                )
    finally:
        consumer.close()

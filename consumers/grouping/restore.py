"""Restoring a task from Kafka: committed offset and metadata, the journal it names, then the log from the watermark.

Goes on a little at a time, so that whoever restores can keep polling, and can say how far it is. Refuses, with the
remedy, whatever contradicts itself; never guesses a position.
"""

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field

from confluent_kafka import KafkaError, Message, TopicPartition

from consumers.grouping.bootstrap import committed_offsets, journal_record
from consumers.grouping.changes import CORE_VERSION, Record
from consumers.grouping.config import GrouperConfig
from consumers.grouping.fold import Fold
from consumers.grouping.makers import makers_of
from consumers.grouping.skips import asked_for
from consumers.grouping.state import CommitMetadata, JournalSum, TaskState
from topics import clients, hanging
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, StateRefused
from topics.logs import event
from topics.records import JournalRecord
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)
_COARSE_MS = 1000
_TELL_EVERY_S = 5.0


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
    leader_epoch: int = -1
    """Of the record before the position, as it was when the task was restored; -1 where it is unknown."""

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


@dataclass
class Progress:
    """How far a restore is; what is to be read is known once offsets were asked for, and counts offsets."""

    journal_read: int = 0
    journal_to_read: int = 0
    records_read: int = 0
    records_to_read: int = 0
    seconds: float = 0.0


class Restoration:
    """Restores the fold of a partition as its last committed transaction left it."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        partition: int,
        partitions: int,
        topic_id: str,
        grouper: GrouperConfig,
        skipped: SkippedRecords,
    ) -> None:
        self.partition = partition
        self.progress = Progress()
        self.restored: tuple[Fold, Journal] | None = None
        """The fold, and where its journal stands; set at the end."""
        self._kafka, self._run, self._grouper = kafka, run, grouper
        self._partitions, self._topic_id = partitions, topic_id
        self._skipped = skipped
        self._began = self._told = time.monotonic()
        self._reading = self._read()

    def step(self, for_s: float) -> bool:
        """Go on for about `for_s` seconds; whether it is done.

        Raises StateRefused when offsets, journal and log do not belong together, with the remedy.
        """
        until = time.monotonic() + for_s
        for _ in self._reading:
            now = time.monotonic()
            self.progress.seconds = now - self._began
            if now - self._told >= _TELL_EVERY_S:
                self._told = now
                event(logger, "task_restoring", partition=self.partition, **asdict(self.progress))
            if now >= until:
                return False
        return True

    def close(self) -> None:
        """Give up, where it is not done."""
        self._reading.close()

    def _read(self) -> Generator[None]:
        journal, added = yield from self._read_journal()
        restored = added.state()
        self._check(restored, added)
        self._check_end(restored.position, journal.leader_epoch)
        skips = asked_for(self._kafka, self._run, self.partition)
        fold = Fold(restored, makers_of(self._grouper.makers), skips)
        if fold.replaying:
            self.progress.records_to_read = restored.position - restored.watermark
            topic = topic_name(self._run, "rollouts")
            for message in _range(self._kafka, topic, self.partition, restored.watermark, restored.position):
                if message is not None:
                    fold.replay(records_of(message))
                    self.progress.records_read += 1
                yield
            fold.resume()
        event(
            logger,
            "task_restored",
            partition=self.partition,
            position=restored.position,
            watermark=restored.watermark,
            unfinished=len(restored.unfinished),
            journal_records=self.progress.journal_read,
            records_read_again=self.progress.records_read,
            seconds=round(time.monotonic() - self._began, 3),
        )
        self.restored = fold, journal

    def _read_journal(self) -> Generator[None, None, tuple[Journal, JournalSum]]:
        committed = committed_offsets(self._kafka, self._group, self._rollouts, self._partitions)[self.partition]
        if committed.offset < 0:
            raise StateRefused(
                f"no offset is committed for {self._where}; a new run is prepared by `rollstream topics apply`, an old "
                f"one whose offsets expired by `rollstream group recover`"
            )
        metadata = CommitMetadata.decode(committed.metadata, self._where)
        journal, added = Journal(metadata.journal, metadata.snapshot), JournalSum()
        start, stop = min(metadata.oldest, metadata.snapshot), metadata.journal + 1
        self.progress.journal_to_read = stop - start
        for message in _range(self._kafka, topic_name(self._run, "journal"), self.partition, start, stop):
            if message is not None:
                record = journal_record(message, self._skipped)
                if record is not None:
                    added.add(record)
                    journal.note(message.offset() or 0, record)
                self.progress.journal_read += 1
            yield
        journal.leader_epoch = -1 if added.last is None else added.last.leader_epoch
        if added.last is not None and added.last.position != committed.offset:
            raise StateRefused(
                f"offset {committed.offset} is committed for {self._where}, its journal record says "
                f"{added.last.position}; another program committed it: commit again with `rollstream group recover`"
            )
        return journal, added

    def _check(self, restored: TaskState, added: JournalSum) -> None:
        if restored.topic_id != self._topic_id:
            raise StateRefused(
                f"{self._rollouts} was deleted and created again since the journal was written (id {self._topic_id}, "
                f"was {restored.topic_id}); its rollouts are gone: start a run of another name, or, where the run was "
                f"restored from an archive, have grouping go on with `rollstream group adopt`"
            )
        if restored.partitions != self._partitions:
            raise StateRefused(
                f"{self._rollouts} has {self._partitions} partitions, the journal was written for "
                f"{restored.partitions}; keys have moved: start a run of another name"
            )
        if added.last is not None and added.last.core_version > CORE_VERSION:
            raise StateRefused(
                f"the journal of {self._where} was written by core version {added.last.core_version}, this is "
                f"{CORE_VERSION}; upgrade rollstream"
            )

    def _check_end(self, position: int, leader_epoch: int) -> None:
        """Refuse a log whose end was cut off since it was read: what was written there since would never be read."""
        found = clients.last_before(self._kafka, self._rollouts, self.partition, position)
        if found is None or leader_epoch < 0 or found.leader_epoch() in (None, leader_epoch):
            return
        raise StateRefused(
            f"{self._rollouts}[{self.partition}] was cut off before offset {position} and written again since it was "
            f"read (leader epoch {found.leader_epoch()}, {leader_epoch} when it was read); what is new there would "
            f"never be read: restore the topic, or start a new run"
        )

    @property
    def _group(self) -> str:
        return self._grouper.group_id(self._run)

    @property
    def _rollouts(self) -> str:
        return topic_name(self._run, "rollouts")

    @property
    def _where(self) -> str:
        return f"{self._rollouts}[{self.partition}] by group {self._group}"


def restore_task(
    kafka: KafkaConfig, run: str, partition: int, partitions: int, topic_id: str, grouper: GrouperConfig
) -> tuple[Fold, Journal]:
    """Restore a partition's fold in one go. Raises StateRefused as `Restoration` does."""
    restoration = Restoration(kafka, run, partition, partitions, topic_id, grouper, SkippedRecords())
    while not restoration.step(_TELL_EVERY_S):
        pass
    assert restoration.restored is not None
    return restoration.restored


def _range(kafka: KafkaConfig, topic: str, partition: int, start: int, stop: int) -> Iterator[Message | None]:
    """Committed records at offsets start to stop - 1, and None while none comes.

    A transaction shows on its partitions at different instants, so an end of partition before `stop` is waited out.
    Raises DeadlineExceeded when nothing comes for kafka.patience_s, within which a transaction that stands open ends.
    """
    timeout_s = kafka.patience_s
    consumer = clients.reader(kafka, fetch_wait_ms=10)
    try:
        clients.follow(consumer, kafka, [TopicPartition(topic, partition, start)])
        deadline = time.monotonic() + timeout_s
        position = {partition: start}
        while True:
            for message in clients.with_unreadable(consumer, clients.at_hand(consumer, 500, 0.05), position):
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
            yield None
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{topic}[{partition}] did not show offset {stop - 1} within {timeout_s:g} s; "
                    f"{hanging.open_on(kafka, topic, [partition])}"
                )
    finally:
        consumer.close()

"""Restoring a task from Kafka: committed offset and metadata, the journal it names, then the log from the watermark.

A restore runs in short steps, so that its caller can keep polling and can report progress. It refuses contradictory
state with an error that names the remedy, and never guesses a position.
"""

import logging
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION, InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.consumers.grouping.core.task_state import JournalAccumulator, TaskState
from rollstream.consumers.grouping.process.bootstrap import committed_offset, journal_record
from rollstream.consumers.grouping.process.skipped_offsets import requested_skips
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, StateRefused
from rollstream.topics.kafka.reader import Reader, records_between
from rollstream.topics.kafka.records import GroupPosition, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata

logger = logging.getLogger(__name__)
_TELL_EVERY_S = 5.0
_ASK_S = 1.0
"""Longest call for a committed offset, in seconds."""


def records_of(message: KafkaRecord, rollout: HeldRollout | None = None) -> InputRecord:
    """Return a record of `rollouts` as the fold reads it; `rollout` is its content if it was read already."""
    return InputRecord(message.offset, message.timestamp_ms, message.key, message.value, rollout)


@dataclass
class RestoreProgress:
    """Progress of a restore, in offsets; a total is 0 until it is known."""

    journal_read: int = 0
    journal_to_read: int = 0
    records_read: int = 0
    records_to_read: int = 0
    seconds: float = 0.0


def reader_of_restores(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Reader:
    """Return a reader that successive restores share, because each client takes tens of milliseconds to connect."""
    return Reader(kafka, fetch_wait_ms=10, group=grouper.group_id(run))


class Restoration:
    """Restores the fold of a partition to its last committed transaction."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        partition: int,
        partitions: int,
        topic_id: str,
        grouper: GrouperConfig,
        skipped: SkippedRecords,
        reader: Reader,
        asking: Reader | None = None,
    ) -> None:
        """`reader` comes from `reader_of_restores`; no other restore may read with it until this one is done.

        `asking` is such a reader, which others may read with: it asks for positions. Each client would have to find the
        group's coordinator first, which takes some 90 ms.
        """
        self.partition = partition
        self.progress = RestoreProgress()
        self.restored: tuple[Fold, JournalPointers] | None = None
        """Fold and journal pointers, set at the end."""
        self._kafka, self._run, self._grouper = kafka, run, grouper
        self._partitions, self._topic_id = partitions, topic_id
        self._skipped, self._reader, self._asking = skipped, reader, asking or reader
        self._began = self._told = time.monotonic()
        self._reading = self._read()

    def step(self, for_s: float) -> bool:
        """Continue for about `for_s` seconds; return whether the restore is done.

        Raises StateRefused, with the remedy, if offsets, journal and log do not belong together.
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
        """Stop the restore if it is not done."""
        self._reading.close()

    def _read(self) -> Generator[None]:
        journal, added = yield from self._read_journal()
        restored = added.state()
        self.check(restored, added)
        skips = requested_skips(self._kafka, self._run, self.partition, self._reader)
        self._check_end(restored.position, journal.leader_epoch)
        fold = Fold(restored, load_plug_ins(self._grouper), skips)
        if fold.replaying:
            self.progress.records_to_read = restored.position - restored.watermark
            with closing(self._between(self._rollouts, restored.watermark, restored.position)) as read:
                for message in read:
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

    def _read_journal(self) -> Generator[None, None, tuple[JournalPointers, JournalAccumulator]]:
        committed = yield from self._committed()
        if committed.offset < 0:
            raise StateRefused(
                f"no offset is committed for {self._where}; prepare a new run with `rollstream topics apply`, and an "
                f"old run whose offsets expired with `rollstream role group recover`"
            )
        metadata = CommitMetadata.decode(committed.metadata, self._where)
        journal, added = JournalPointers(metadata.journal, metadata.snapshot), JournalAccumulator()
        start, stop = min(metadata.oldest, metadata.snapshot), metadata.journal + 1
        self.progress.journal_to_read = stop - start
        with closing(self._between(topic_name(self._run, "journal"), start, stop)) as read:
            for message in read:
                if message is not None:
                    record = journal_record(message, self._skipped)
                    if record is not None:
                        added.add(record)
                        journal.add_finished_groups(message.offset, record)
                    self.progress.journal_read += 1
                yield
        journal.leader_epoch = -1 if added.last is None else added.last.leader_epoch
        if added.last is not None and added.last.position != committed.offset:
            raise StateRefused(
                f"offset {committed.offset} is committed for {self._where}, but its journal record says "
                f"{added.last.position}; another program committed it: commit again with "
                "`rollstream role group recover`"
            )
        return journal, added

    def _committed(self) -> Generator[None, None, GroupPosition]:
        """Ask for the committed offset, in calls so short that the process can poll while a transaction stands open."""
        deadline = time.monotonic() + self._kafka.patience_s
        doing = f"reading offsets of group {self._group}"
        while time.monotonic() < deadline:
            try:
                return self._asking.committed(self._rollouts, [self.partition], doing, _ASK_S)[0]
            except AccessDenied:
                raise
            except BrokerUnavailable:
                yield
        return committed_offset(self._kafka, self._group, self._rollouts, self.partition, self._asking, _ASK_S)

    def check(self, restored: TaskState, added: JournalAccumulator) -> None:
        """Raise StateRefused if the state belongs to another topic, or was written by a newer core version."""
        if restored.topic_id != self._topic_id:
            raise StateRefused(
                f"{self._rollouts} was deleted and created again since the journal was written (id {self._topic_id}, "
                f"was {restored.topic_id}); its rollouts are gone: start a run of another name, or, if the run was "
                f"restored from an archive, continue grouping with `rollstream role group adopt`"
            )
        if restored.partitions != self._partitions:
            raise StateRefused(
                f"{self._rollouts} has {self._partitions} partitions, but the journal was written for "
                f"{restored.partitions}; keys have moved: start a run of another name"
            )
        if added.last is not None and added.last.core_version > CORE_VERSION:
            raise StateRefused(
                f"the journal of {self._where} was written by core version {added.last.core_version}, but this release "
                f"has {CORE_VERSION}; upgrade rollstream"
            )

    def _check_end(self, position: int, leader_epoch: int) -> None:
        """Refuse a log that was truncated below the position: records written there afterwards would never be read."""
        begin, end = self._asking.bounds(self._rollouts, [self.partition])[self.partition]
        if leader_epoch < 0 or not begin < position <= end:
            return
        with closing(self._between(self._rollouts, position - 1, position, wait=False)) as read:
            latest = next((message for message in read if message is not None), None)
        if latest is None or latest.leader_epoch in (None, leader_epoch):
            return
        raise StateRefused(
            f"{self._rollouts}[{self.partition}] was cut off before offset {position} and written again since it was "
            f"read (leader epoch {latest.leader_epoch}, {leader_epoch} when it was read); the new records there would "
            f"never be read: restore the topic, or start a new run"
        )

    def _between(self, topic: str, start: int, stop: int, *, wait: bool = True) -> Generator[KafkaRecord | None]:
        """Yield the records of this partition in a topic as `records_between` does."""
        return records_between(self._kafka, topic, self.partition, start, stop, wait=wait, reader=self._reader)

    @property
    def _group(self) -> str:
        return self._grouper.group_id(self._run)

    @property
    def _rollouts(self) -> str:
        return topic_name(self._run, "rollouts")

    @property
    def _where(self) -> str:
        return f"{self._rollouts}[{self.partition}] by group {self._group}"

"""Reads the journals of a run up to the records that the grouping processes committed with their positions."""

import contextlib
from collections.abc import Mapping

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import PATIENCE_S, HiddenRecords, TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import JournalRecord
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata


class Journals:
    """The journals of all partitions."""

    def __init__(self, kafka: KafkaConfig, run: str, partitions: int) -> None:
        self.tail = TopicTail(kafka, run, "journal")
        self.of = {number: PartitionJournal(number) for number in range(partitions)}

    @property
    def added(self) -> list[int]:
        """Partitions that were added after the run began: each partition of a run begins with a journal."""
        if not any(journal.sequence >= 0 for journal in self.of.values()):
            return []
        return [number for number, journal in self.of.items() if journal.sequence < 0 and not journal.hidden]

    def read(self, kafka: KafkaConfig, cut: Mapping[int, int], group: str, hidden: HiddenRecords, book: Ledger) -> None:
        """Read each journal up to its offset in `cut`, or else to its end, and report missing records."""
        tail = self.tail
        for journal in self.of.values():
            journal.hidden = False

        later = SkippedRecords("ledger", logged=False)

        def read() -> list[int]:
            nonlocal later
            later = SkippedRecords("ledger", logged=False)
            for message in tail.messages(cut):
                beyond = message.offset > cut.get(message.partition, message.offset)
                record = (later if beyond else tail.skipped).decode(JournalRecord, message)
                if record is not None and not beyond:
                    self._add(kafka, record, message.partition)
            return sorted(p for p, last in cut.items() if tail.position.get(p, 0) <= last)

        behind = read_until_complete(read)
        book.note_skipped(later)
        open_ends = hidden.parts("journal") if behind else {}
        for journal in self.of.values():
            for problem in journal.problems:
                book.problem(problem)
        for partition in behind:
            if partition in open_ends and open_ends[partition].start <= cut[partition] < open_ends[partition].end:
                self.of[partition].hidden = True
                book.undecide(f"journal[{partition}] offset {cut[partition]}", hidden.places("journal"))
            else:
                book.problem(
                    f"journal[{partition}] does not hold offset {cut[partition]}, which a commit of group {group} names"
                )
        for journal in self.of.values():
            if journal.sequence >= 0 and journal.base < 0:
                book.problem(f"journal[{journal.number}] holds no complete snapshot")
            elif journal.base >= 0:
                journal.check_counts(book.problem)

    def _add(self, kafka: KafkaConfig, record: JournalRecord, partition: int) -> None:
        journal = self.of[partition]
        begins = journal.sequence < 0 < record.sequence
        if begins and not topic_admin.bounds(kafka, self.tail.topic)[partition][0]:
            journal.problem(f"journal[{partition}] begins with sequence {record.sequence}, although nothing was pruned")
        journal.read(record)


def committed_cut(kafka: KafkaConfig, run: str, group: str, partitions: int) -> dict[int, int]:
    """Return the offset of the newest journal record that the group committed for each partition.

    Partitions without a commit are absent, and all are if the offsets cannot be read, for example because an open
    transaction hides one. The journals of absent partitions are read to the end.
    """
    offsets = {}
    with Reader(kafka, group=group) as reader:
        try:
            positions = reader.committed(
                topic_name(run, "rollouts"), range(partitions), f"reading offsets of group {group}", PATIENCE_S
            )
        except BrokerUnavailable:
            return {}
    for position in positions:
        if position.offset >= 0:
            # Ignore commits of other programs: grouping refuses them.
            with contextlib.suppress(StateRefused):
                offsets[position.partition] = CommitMetadata.decode(position.metadata, run).journal
    return offsets

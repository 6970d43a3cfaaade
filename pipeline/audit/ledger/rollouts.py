"""Compares records of `rollouts` with the journal: each record that was read has a fate, and each fate a record.

Records that the group has not read count as unread. The comparison also finds losses that counts do not show: records
that were deleted before they were read, and records that were written in place of records already read.
"""

from bisect import bisect_right
from collections.abc import Mapping

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import PATIENCE_S, HiddenRecords, TopicTail
from rollstream.pipeline.audit.offset_table import OffsetRuns
from rollstream.pipeline.audit.partition_journal import ROLLOUT, SEEN, PartitionJournal, code_of, codes
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records.fates import DEAD_LETTERED
from rollstream.topics.wire import codec

_END = 1 << 62
_IN_FLIGHT = code_of("in_flight")


class _LeaderEpochs:
    """The leader epochs of one partition's log, compared with the epochs under which grouping read its records."""

    def __init__(self, runs: list[tuple[int, int]], written_again: list[tuple[int, int, int]]) -> None:
        self.runs = runs
        """First offset and epoch of each sequence of records with the same epoch."""
        self._written_again = {epoch: (first, last) for epoch, first, last in written_again}

    def see(self, offset: int, epoch: int | None) -> None:
        """Process the next record of the log."""
        if epoch is not None and (not self.runs or self.runs[-1][1] != epoch):
            self.runs.append((offset, epoch))

    def compare(self, journal: PartitionJournal, end: int) -> None:
        """Compare the epochs that the journal names for offsets below `end`, and remove them from the journal."""
        for offset in [offset for offset in journal.leader_epochs if offset < end]:
            read_as = journal.leader_epochs.pop(offset)
            at = bisect_right(self.runs, offset, key=lambda run: run[0]) - 1
            if at >= 0 and journal.table[offset] & SEEN and self.runs[at][1] != read_as:
                first, epoch = self.runs[at]
                self._written_again[epoch] = first, max(offset, self._written_again.get(epoch, (0, 0))[1])

    @property
    def written_again(self) -> list[tuple[int, int, int]]:
        """By epoch, the first and last offset at which the log no longer holds the record that was read."""
        return [(epoch, *offsets) for epoch, offsets in self._written_again.items()]


class RolloutRecords:
    """The records of all partitions that have been read."""

    def __init__(self, kafka: KafkaConfig, run: str, partitions: int) -> None:
        self.tail = TopicTail(kafka, run, "rollouts")
        self._kafka = kafka
        self._epochs = {number: _LeaderEpochs([], []) for number in range(partitions)}

    def read(self, journals: Mapping[int, PartitionJournal], topic_id: str) -> None:
        """Read new records."""
        run = _Run(journals)
        for message in self.tail.messages():
            self._epochs[message.partition].see(message.offset, message.leader_epoch)
            run.add(message.partition, message.offset, _facts(message))
        run.write()
        for number, journal in journals.items():
            # Compare only within the same topic, because a topic that was created again counts epochs from 0.
            if journal.topic_id == topic_id:
                self._epochs[number].compare(journal, self.tail.position.get(number, 0))

    def judge(
        self,
        journals: Mapping[int, PartitionJournal],
        begins: Mapping[int, int],
        bounds: Mapping[int, tuple[int, int]],
        topic_id: str,
        hidden: HiddenRecords,
        result: Ledger,
    ) -> int:
        """Compare the records read with the journals; `begins` are the first offsets, determined before reading.

        Returns the number of rollouts among the records in flight.
        """
        in_flight = 0
        for number, journal in journals.items():
            records = _PartitionRecords(journal, bounds[number], result)
            records.check_fates()
            if journal.topic_id == topic_id:
                for _epoch, first, last in self._epochs[number].written_again:
                    result.problem(
                        f"rollouts[{number}] offsets {first} to {last} were read as other records: the log was cut off "
                        f"and written again (its leader epoch differs), and the records there now were never read"
                    )
            records.check_bounds(begins[number])
            records.check_missing()
            records.sum_up()
            in_flight += records.in_flight
        try:
            await_decided(self._kafka, self.tail.topic, "the ledger is incomplete", PATIENCE_S)
        except DeadlineExceeded:
            result.undecide("records that nobody has read yet", hidden.places("rollouts"))
        return in_flight


def _facts(message: KafkaRecord) -> int:
    return SEEN | ROLLOUT * (codec.kind_of(message.value) == "Rollout")


class _Run:
    """Consecutive records of one kind, which are written to a journal's table together."""

    def __init__(self, journals: Mapping[int, PartitionJournal]) -> None:
        self._journals = journals
        self._partition, self._first, self._stop, self._bits = 0, 0, 0, 0

    def add(self, partition: int, offset: int, bits: int) -> None:
        """Add the next record."""
        if (partition, offset, bits) != (self._partition, self._stop, self._bits):
            self.write()
            self._partition, self._first, self._bits = partition, offset, bits
        self._stop = offset + 1

    def write(self) -> None:
        """Write the records added."""
        if self._first < self._stop:
            self._journals[self._partition].table.set_bits(self._first, self._stop, self._bits)
        self._first = self._stop


class _PartitionRecords:
    """The records of one partition of `rollouts`, compared with its journal."""

    def __init__(self, journal: PartitionJournal, bounds: tuple[int, int], result: Ledger) -> None:
        self._journal, self._result = journal, result
        self._begin, self._end = bounds
        runs = journal.table.runs()
        # Ignore records that were deleted after they were read.
        seen = runs.where(runs.values & SEEN != 0).clipped(self._begin, _END)
        read = seen.clipped(0, journal.position)
        self._unread = seen.clipped(journal.position, _END)
        self._with_fate = read.where(codes(read.values) != 0)
        without = read.where(codes(read.values) == 0)
        self._nowhere = without.clipped(max(journal.base, 0), _END)
        known = journal.known()
        self._missing_there = known.where(known.values & SEEN == 0).clipped(self._begin, _END)
        self._deleted = known.clipped(0, self._begin)

    @property
    def in_flight(self) -> int:
        """Number of rollouts in flight."""
        runs = self._with_fate
        return runs.where((codes(runs.values) == _IN_FLIGHT) & (runs.values & ROLLOUT != 0)).total

    def check_fates(self) -> None:
        """Report records that were read but have no fate."""
        for offset, _fate in self._journal.named(self._nowhere):
            self._result.problem(f"rollouts[{self._journal.number}] offset {offset} was read but has no fate")

    def check_bounds(self, begin: int) -> None:
        """Report records that were deleted unread, and a log that ends below the position."""
        journal, end = self._journal, self._end
        # Hidden journal records may show that the records were read.
        if begin > journal.position and not journal.hidden:
            self._result.problem(
                f"rollouts[{journal.number}] begins at offset {begin}, and the group has read up to "
                f"{journal.position}: {begin - journal.position} offsets were deleted unread"
            )
        if end < journal.position:
            self._result.problem(
                f"rollouts[{journal.number}] ends at offset {end}, but was read up to {journal.position}"
            )

    def check_missing(self) -> None:
        """Report offsets with a fate that hold no record, unless they are finished and were deleted."""
        journal, deleted = self._journal, self._deleted
        for offset, _fate in journal.named(deleted.where(codes(deleted.values) == _IN_FLIGHT)):
            self._result.problem(f"rollouts[{journal.number}] offset {offset} is in flight and was deleted")
        for offset, fate in journal.named(self._missing_there):
            self._result.problem(f"rollouts[{journal.number}] offset {offset} is {fate} but holds no record")

    def sum_up(self) -> None:
        """Add the counts of the partition to the ledger."""
        journal, result = self._journal, self._result
        unread = self._unread.total
        deleted, settled = self._deleted.total, sum(journal.before.values())
        seen = self._with_fate.total + self._nowhere.total
        result.unread += unread
        result.pruned += settled + deleted
        result.produced += seen + deleted + settled + unread
        if settled or deleted:
            read = sum(count.rollouts for count in journal.produced)
            dead = journal.of_fate(DEAD_LETTERED).total
            result.rollouts += read - journal.before[DEAD_LETTERED] - dead
        else:
            result.rollouts += _rollouts(self._with_fate) + _rollouts(self._nowhere)
        result.rollouts += _rollouts(self._unread)


def _rollouts(runs: OffsetRuns) -> int:
    return runs.where(runs.values & ROLLOUT != 0).total

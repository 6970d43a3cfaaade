"""Compares the index with batches and journal: the index must name each batch once, in order, at its place.

Learners do not find a batch that no entry names, and would train twice on a batch that two entries name.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from rollstream.pipeline.audit.ledger.batch_table import BatchPlace, BatchTable
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import HiddenRecords, TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, batch_numbers
from rollstream.topics.wire.catalogue import topic_name

_MOST_NAMED = 20
_LARGEST = 1 << 62
Named = tuple[int, int, int, int]
"""The batch of an entry: the batch's partition and number, and its partition and offset in `batches`."""


class Entries:
    """The batches that entries of the index name, by offset."""

    def __init__(self) -> None:
        self.offsets, self._partitions, self._numbers = array("q"), array("q"), array("q")

    def add(self, offset: int, entry: BatchIndexEntry) -> None:
        """Add the next entry. Raises RecordError if its batch id is invalid."""
        partition, number = batch_numbers(entry.batch_id)
        if max(partition, number) >= _LARGEST:
            raise RecordError(f"batch id {entry.batch_id[:100]!r} has a number that is too large")
        self.offsets.append(offset)
        self._partitions.append(partition)
        self._numbers.append(number)

    def batch_at(self, offset: int) -> str | None:
        """Return the batch that the entry at an offset names; None if there is no entry."""
        at = bisect_left(self.offsets, offset)
        return self._named(at) if at < len(self.offsets) and self.offsets[at] == offset else None

    def between(self, begin: int, stop: int) -> Iterator[tuple[int, str]]:
        """Yield offset and batch of each entry from `begin` to before `stop`."""
        for at in range(bisect_left(self.offsets, begin), bisect_left(self.offsets, stop)):
            yield self.offsets[at], self._named(at)

    def from_offset(self, position: int) -> int:
        """Return the number of entries from a position on."""
        return len(self.offsets) - bisect_left(self.offsets, position)

    def _named(self, at: int) -> str:
        return f"{self._partitions[at]}-{self._numbers[at]}"


class BatchIndex:
    """The entries of a run's index that have been read."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "batch-index")
        self.entries = Entries()
        self._kafka, self._run = kafka, run
        self._open: dict[int, Named] = {}
        """By offset, entries of batches that no journal names yet."""
        self._unmatched: dict[int, Named] = {}
        """By offset, entries of batches that are not at the place that the entry names."""
        self._newest: dict[int, int] = {}
        """By partition, the number of the last batch that was named."""
        self._problems: list[tuple[int, str]] = []
        """Offsets of entries, and descriptions of their problems."""

    def check(
        self,
        journals: Mapping[int, PartitionJournal],
        table: BatchTable,
        places: Mapping[str, BatchPlace],
        cut: int,
        hidden: HiddenRecords,
        result: Ledger,
    ) -> None:
        """Read new entries, and compare the index with batches.

        `places` are the places of batches that are not in the table because a transaction hides them. Entries before
        offset `cut` were committed before the journal was read, so the journal must name their batches.
        """

        def read() -> list[str]:
            skipped = self.tail.skipped
            for message, entry in skipped.records(BatchIndexEntry, self.tail.messages()):
                with skipped.passing(message):
                    self.entries.add(message.offset, entry)
                    place = entry.partition, entry.offset
                    self._open[message.offset] = (*batch_numbers(entry.batch_id), *place)
            self._enter(journals, table)
            return _unnamed(journals, table)

        missing = read_until_complete(read)
        invisible = {entry.batch_id for entry in _hidden_entries(hidden)} if missing else set()
        for batch_id in sorted(invisible.intersection(missing)):
            result.undecide(f"entry of batch {batch_id} in batch-index", hidden.places("batch-index"))
        lost = [batch_id for batch_id in missing if batch_id not in invisible]
        if lost:
            begin = topic_admin.bounds(self._kafka, topic_name(self._run, "batch-index"))[0][0]
            result.problem(
                f"{len(lost)} batches have no entry in batch-index, which begins at offset {begin}, so no learner "
                f"finds them; the first is {lost[0]}"
            )
        for _offset, problem in sorted(self._judged(journals, table, places, cut), key=lambda problem: problem[0]):
            result.problem(problem)

    def _enter(self, journals: Mapping[int, PartitionJournal], table: BatchTable) -> None:
        """Note in the table the entries of batches that the journals name."""
        for offset, (partition, number, *_place) in sorted(self._open.items()):
            if partition not in journals or number >= journals[partition].batches:
                continue
            name, source = f"{partition}-{number}", f"batch-index offset {offset}"
            self._unmatched[offset] = self._open.pop(offset)
            first, newest = table.entry(partition, number), self._newest.get(partition, -1)
            if first is not None:
                self._problem(offset, f"{source} names batch {name}, which offset {first} already names")
                continue
            table.enter(partition, number, offset)
            if newest > number:
                self._problem(offset, f"{source} names batch {name} after batch {partition}-{newest}")
            self._newest[partition] = number
        for offset, (partition, number, *place) in [*self._unmatched.items()]:
            if table.place(partition, number) == tuple(place):
                del self._unmatched[offset]

    def _judged(
        self,
        journals: Mapping[int, PartitionJournal],
        table: BatchTable,
        places: Mapping[str, BatchPlace],
        cut: int,
    ) -> Iterator[tuple[int, str]]:
        for offset, (partition, number, *_place) in self._open.items():
            if offset < cut and not (partition in journals and journals[partition].hidden):
                yield offset, f"batch-index offset {offset} names batch {partition}-{number}, which no journal names"
        for offset, (partition, number, *place) in self._unmatched.items():
            name = f"{partition}-{number}"
            there = table.place(partition, number) or places.get(name)
            if there != tuple(place):
                where = f"it is at offset {there[1]}" if there else "batches does not hold it"
                yield (
                    offset,
                    f"batch-index offset {offset} names batch {name} at batches[{place[0]}] offset {place[1]}; {where}",
                )
        yield from self._problems

    def _problem(self, offset: int, text: str) -> None:
        if len(self._problems) < _MOST_NAMED:
            self._problems.append((offset, text))


def _unnamed(journals: Mapping[int, PartitionJournal], table: BatchTable) -> list[str]:
    """Return batches without an entry, in each partition from the first batch that the index or the journal names."""
    return [
        f"{partition}-{number}"
        for partition, journal in journals.items()
        for number in table.unnamed(partition, journal.base_batches, journal.batches)
    ]


def _hidden_entries(hidden: HiddenRecords) -> list[BatchIndexEntry]:
    messages = hidden.messages("batch-index")
    return [entry for _message, entry in SkippedRecords("ledger", logged=False).records(BatchIndexEntry, messages)]

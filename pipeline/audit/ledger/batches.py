"""Compares batches with the journal: both must name the same ids, each once, and the same batched offsets."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rollstream.consumers.grouping.selection_bias import RolloutMoments, batch_moments
from rollstream.pipeline.audit.ledger.batch_table import BatchPlace, BatchTable
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import HiddenRecords, TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import (
    CARRIED,
    CODES,
    DELIVERED,
    DELIVERED_BEFORE,
    PartitionJournal,
    code_of,
    codes,
)
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.reader import record_at
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import TrainingBatch, batch_numbers
from rollstream.topics.records.fates import BATCHED

_BATCHED, _IN_FLIGHT = code_of(BATCHED), code_of("in_flight")
_MOST_NAMED = 20
Untrained = Callable[[str], Iterable[int]]
"""Function from a batch id to the rows that a learner skipped and no learner trained on."""


@dataclass
class HiddenBatches:
    """Missing batches that an open transaction hides."""

    rows: dict[str, int] = field(default_factory=dict)
    places: dict[str, BatchPlace] = field(default_factory=dict)
    carried: dict[int, Counter[int]] = field(default_factory=dict)
    """By partition, the number of these batches that carry each offset."""


class RecordedBatches:
    """The batches of a run that have been read."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "batches")
        self.table = BatchTable()
        self._kafka = kafka
        self._waiting: dict[BatchPlace, tuple[int, int]] = {}
        """Partition and number, by place, of batches that were committed after the journals were read."""
        self._times: dict[tuple[int, int], int] = {}
        """Number of times that batches carry an offset of a partition, if it is more than once."""
        self._skipped_in: dict[str, dict[str, RolloutMoments]] = {}
        """Lengths and rewards of rollouts that learners skipped, by batch and environment."""
        self._odd: list[str] = []
        """Invalid batch ids in the journal."""
        self._evals_batched = 0
        self._problems: list[str] = []

    @property
    def skipped(self) -> dict[str, RolloutMoments]:
        """Lengths and rewards of skipped rollouts by environment; the sums do not depend on the order of reading."""
        moments: dict[str, RolloutMoments] = {}
        for _batch_id, by_environment in sorted(self._skipped_in.items()):
            for environment, skipped in by_environment.items():
                moments[environment] = moments.get(environment, RolloutMoments()) + skipped
        return moments

    def rows(self, batch_id: str) -> int | None:
        """Return the number of rows of a batch; None if `batches` does not hold it."""
        return self.table.rows(batch_id)

    def read(
        self,
        journals: Mapping[int, PartitionJournal],
        evals: set[str],
        untrained: Untrained,
        hidden: HiddenRecords,
        result: Ledger,
    ) -> HiddenBatches:
        """Read new batches up to the journals' ends, and report missing batches.

        `evals` are uids of evaluation rollouts.
        """
        self._expect(journals)
        skipped = self.tail.skipped

        def add(message: KafkaRecord) -> None:
            batch = skipped.decode(TrainingBatch, message)
            if batch is not None:
                with skipped.passing(message):
                    self._add(batch, (message.partition, message.offset), journals, evals, untrained)

        def read() -> list[str]:
            for message in self.tail.messages():
                add(message)
            return [*self.table.missing(), *self._odd]

        self._take_waiting(journals, add)
        missing = read_until_complete(read)
        hidden_batches = self._hidden(missing, hidden, result) if missing else HiddenBatches()
        for problem in self._problems:
            result.problem(problem)
        result.evals_batched += self._evals_batched
        for batch_id in sorted(set(missing) - hidden_batches.rows.keys()):
            result.problem(f"batch {batch_id} is in the journal but not in batches")
        for number, journal in journals.items():
            self._compare_offsets(number, journal, hidden_batches.carried.get(number, Counter()), result)
        result.batches = sum(journal.batches for journal in journals.values())
        return hidden_batches

    def measure_again(self, batch_ids: Iterable[str], untrained: Untrained) -> None:
        """Measure the skipped rows of batches that were read before their steps."""
        for batch_id in sorted(batch_ids):
            if not untrained(batch_id):
                # Learners train on all rows of most batches, and fetching each batch one by one would be slow.
                self._skipped_in.pop(batch_id, None)
                continue
            place = self.table.place(*batch_numbers(batch_id))
            message = None if place is None else record_at(self._kafka, self.tail.topic, *place)
            batch = None if message is None else SkippedRecords(logged=False).decode(TrainingBatch, message)
            if batch is not None:
                self._measure_skipped(batch, untrained)

    def _expect(self, journals: Mapping[int, PartitionJournal]) -> None:
        for partition, journal in journals.items():
            for batch_id in journal.batch_ids:
                number = decimal_number(batch_id.partition("-")[2])
                if number is not None and number < journal.batches and batch_id == f"{partition}-{number}":
                    self.table.expect(partition, number)
                else:
                    self._odd.append(batch_id)
            journal.batch_ids.clear()

    def _take_waiting(self, journals: Mapping[int, PartitionJournal], add: Callable[[KafkaRecord], None]) -> None:
        """Read again the waiting batches that the journals include by now."""
        for place, (partition, number) in sorted(self._waiting.items()):
            if number < journals[partition].batches:
                del self._waiting[place]
                message = record_at(self._kafka, self.tail.topic, *place)
                if message is not None:
                    add(message)

    def _add(
        self,
        batch: TrainingBatch,
        place: BatchPlace,
        journals: Mapping[int, PartitionJournal],
        evals: set[str],
        untrained: Untrained,
    ) -> None:
        """Add a batch. Raises RecordError if it cannot belong to the run."""
        journal = journals.get(batch.partition)
        if journal is None:
            raise RecordError(
                f"batch {batch.batch_id} is of partition {batch.partition}, but there are {len(journals)} partitions"
            )
        numbers = batch_numbers(batch.batch_id)
        if numbers != (batch.partition, batch.number):
            raise RecordError(
                f"batch {batch.batch_id} has number {batch.number} and partition {batch.partition} in its other fields"
            )
        if batch.number >= journal.batches:
            self._waiting[place] = numbers  # The batch was committed after the journal was read.
            return
        if self.table.place(*numbers) is not None:
            self._problem(f"batch {batch.batch_id} is in batches twice")
        self.table.found(*numbers, place, len(batch))
        for uid in evals.intersection(batch.uids):
            self._evals_batched += 1
            self._problem(f"rollout {uid} of evals is in batch {batch.batch_id}")
        if self.table.is_expected(*numbers):
            self._carry(journal, batch)
        elif batch.number >= journal.base_batches:
            self._problem(f"batch {batch.batch_id} is in batches but not in the journal")
        self._measure_skipped(batch, untrained)

    def _carry(self, journal: PartitionJournal, batch: TrainingBatch) -> None:
        offsets, counts = np.unique(batch.source_offsets, return_counts=True)
        for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
            before = bool(journal.table.set_bits_at(offset, CARRIED) & CARRIED)
            if count + before > 1:
                place = journal.number, offset
                self._times[place] = self._times.get(place, int(before)) + count

    def _hidden(self, missing: Iterable[str], hidden: HiddenRecords, result: Ledger) -> HiddenBatches:
        """Return the missing batches that an open transaction hides, and report them as undecided."""
        batches, wanted = HiddenBatches(), set(missing)
        messages = hidden.messages("batches")
        for message, batch in SkippedRecords("ledger", logged=False).records(TrainingBatch, messages):
            if batch.batch_id in wanted:
                wanted.remove(batch.batch_id)
                batches.places[batch.batch_id] = message.partition, message.offset
                batches.rows[batch.batch_id] = len(batch)
                batches.carried.setdefault(batch.partition, Counter()).update(batch.source_offsets.tolist())
                result.undecide(f"batch {batch.batch_id}", hidden.places("batches"))
        return batches

    def _compare_offsets(self, number: int, journal: PartitionJournal, undecided: Counter[int], result: Ledger) -> None:
        """Report offsets that are batched only in the journal, only in a batch, or in several batches."""
        runs = journal.table.runs()
        fates = codes(runs.values)
        batched = (fates == _BATCHED) | ((fates == _IN_FLIGHT) & (runs.values & DELIVERED != 0))
        named, carried = batched & (runs.values & DELIVERED_BEFORE == 0), runs.values & CARRIED != 0
        without = (offset for offset in runs.where(named & ~carried).offsets() if offset not in undecided)
        apart = dict.fromkeys(islice(without, _MOST_NAMED), "the journal but in no batch")
        alone = [*islice(runs.where(carried & ~named).offsets(), _MOST_NAMED)]
        alone += [offset for offset in undecided if not _is_named(journal.table[offset])]
        apart |= dict.fromkeys(alone, "a batch but not in the journal")
        for offset, place in sorted(apart.items()):
            result.problem(f"rollouts[{number}] offset {offset} is batched in {place}")
        several = {offset: times for (partition, offset), times in self._times.items() if partition == number}
        for offset, times in undecided.items():
            known = several.get(offset, int(journal.table[offset] & CARRIED != 0))
            if known + times > 1:
                several[offset] = known + times
        for offset, times in sorted(several.items()):
            result.problem(f"rollouts[{number}] offset {offset} is in batches {times} times")

    def _measure_skipped(self, batch: TrainingBatch, untrained: Untrained) -> None:
        """Measure the rows of a batch that learners skipped. Raises RecordError for incomplete rows."""
        rows = [row for row in sorted(untrained(batch.batch_id)) if row < len(batch)]
        try:
            moments = batch_moments(batch, rows)
        except IndexError as error:
            raise RecordError(f"batch {batch.batch_id} has rows without tokens, reward or group") from error
        self._skipped_in.pop(batch.batch_id, None)
        if moments:
            self._skipped_in[batch.batch_id] = moments

    def _problem(self, text: str) -> None:
        if len(self._problems) < _MOST_NAMED:
            self._problems.append(text)


def _is_named(value: int) -> bool:
    batched = value & CODES == _BATCHED or (value & CODES == _IN_FLIGHT and bool(value & DELIVERED))
    return batched and not value & DELIVERED_BEFORE

"""Compares batches with the journal: the same ids, each once, made of exactly the offsets that it calls batched."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rollstream.consumers.grouping.selection_bias import RolloutMoments, batch_moments
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import IN_FLIGHT, PartitionJournal
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.fates import BATCHED
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import TrainingBatch


@dataclass
class RecordedBatches:
    """Content of the topic `batches` up to the cut."""

    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows by batch id."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Partition and offset by batch id."""
    skipped_in: dict[str, dict[str, RolloutMoments]] = field(default_factory=dict)
    """Lengths and rewards of rollouts that learners skipped, by batch and environment."""

    @property
    def skipped(self) -> dict[str, RolloutMoments]:
        """The same by environment, summed in an order that does not depend on the order of reading."""
        moments: dict[str, RolloutMoments] = {}
        for _batch_id, by_environment in sorted(self.skipped_in.items()):
            for environment, skipped in by_environment.items():
                moments[environment] = moments.get(environment, RolloutMoments()) + skipped
        return moments


def check_batches(
    kafka: KafkaConfig,
    run: str,
    journals: Mapping[int, PartitionJournal],
    evals: set[str],
    untrained: Mapping[str, Collection[int]],
    hidden: HiddenRecords,
    result: Ledger,
) -> RecordedBatches:
    """Compare batches with the journal: the same ids, made of exactly the batched offsets and of no evaluation rollout.

    `evals` are uids of evaluation rollouts, `untrained` the rows that learners skipped, by batch id.
    """
    check = _BatchCheck(journals, evals, untrained, result)
    tail, skipped = TopicTail(kafka, run, "batches"), SkippedRecords("ledger", logged=False)

    def read() -> set[str]:
        for message, batch in skipped.records(TrainingBatch, tail.messages()):
            with skipped.passing(message):
                check.add(batch, (message.partition, message.offset))
        return check.missing

    if read_until_complete(read):
        check.add_hidden(hidden)
    result.note_skipped(skipped)
    check.report_missing()
    check.compare_offsets()
    result.batches = sum(journal.batches - journal.first_batch for journal in journals.values())
    return check.batches


class _BatchCheck:
    """Collects the batches of a run, then compares them with its journals."""

    def __init__(
        self,
        journals: Mapping[int, PartitionJournal],
        evals: set[str],
        untrained: Mapping[str, Collection[int]],
        result: Ledger,
    ) -> None:
        self.batches = RecordedBatches()
        self._journals, self._evals, self._untrained, self._result = journals, evals, untrained, result
        self._expected = {batch_id for journal in journals.values() for batch_id in journal.batch_ids}
        self._carried: dict[int, Counter[int]] = {partition: Counter() for partition in journals}
        """By partition, how many batches carry each offset."""

    @property
    def missing(self) -> set[str]:
        """Batches of the journal that were not found."""
        return self._expected - self.batches.rows.keys()

    def add(self, batch: TrainingBatch, place: tuple[int, int]) -> None:
        """Add a batch at a partition and offset. Raises RecordError if it cannot belong to the run."""
        journal = self._journals.get(batch.partition)
        if journal is None:
            raise RecordError(f"batch {batch.batch_id} is of partition {batch.partition}, of {len(self._journals)}")
        if batch.number >= journal.batches:
            return  # Committed after the cut.
        if batch.batch_id in self.batches.rows:
            self._result.problem(f"batch {batch.batch_id} is in batches twice")
        self.batches.rows[batch.batch_id], self.batches.places[batch.batch_id] = len(batch), place
        self._refuse_evaluations(batch)
        if batch.batch_id in self._expected:
            self._carried[batch.partition].update(batch.source_offsets.tolist())
        elif batch.number >= journal.base_batches:
            self._result.problem(f"batch {batch.batch_id} is in batches and not in the journal")
        self._measure_skipped(batch)

    def add_hidden(self, hidden: HiddenRecords) -> None:
        """Add missing batches that an open transaction hides, as undecided."""
        messages = hidden.messages("batches")
        for message, batch in SkippedRecords("ledger", logged=False).records(TrainingBatch, messages):
            if batch.batch_id in self.missing:
                self.batches.places[batch.batch_id] = message.partition, message.offset
                self.batches.rows[batch.batch_id] = len(batch)
                self._carried[batch.partition].update(batch.source_offsets.tolist())
                self._result.undecide(f"batch {batch.batch_id}", hidden.places("batches"))

    def report_missing(self) -> None:
        """Report every batch of the journal that was not found."""
        for batch_id in sorted(self.missing):
            self._result.problem(f"batch {batch_id} is in the journal and not in batches")

    def compare_offsets(self) -> None:
        """Report offsets that only the journal or only a batch calls batched, and those in several batches."""
        for number, journal in self._journals.items():
            carried, in_flight = self._carried[number], journal.offsets(IN_FLIGHT)
            named = (journal.offsets(BATCHED) | (journal.delivered & in_flight)) - journal.delivered_before
            for offset in sorted(named.symmetric_difference(carried)):
                place = "journal and no batch" if offset in named else "a batch and not the journal"
                self._result.problem(f"rollouts[{number}] offset {offset} is batched in {place}")
            for offset, times in carried.items():
                if times > 1:
                    self._result.problem(f"rollouts[{number}] offset {offset} is in {times} batches")

    def _refuse_evaluations(self, batch: TrainingBatch) -> None:
        for uid in self._evals.intersection(batch.uids):
            self._result.evals_batched += 1
            self._result.problem(f"rollout {uid} of evals is in batch {batch.batch_id}")

    def _measure_skipped(self, batch: TrainingBatch) -> None:
        """Measure the rows of a batch that learners skipped. Raises RecordError for rows that do not exist."""
        rows = [row for row in self._untrained.get(batch.batch_id, ()) if row < len(batch)]
        try:
            moments = batch_moments(batch, rows)
        except IndexError as error:
            raise RecordError(f"batch {batch.batch_id} has rows without tokens, reward or group") from error
        if moments:
            self.batches.skipped_in[batch.batch_id] = moments

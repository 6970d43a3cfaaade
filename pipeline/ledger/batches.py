"""Batches against the journal: the same ones, each once, made of exactly the offsets that it calls batched."""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from consumers.grouping.changes import BATCHED
from consumers.grouping.selection import Kind, measured
from pipeline.journals import IN_FLIGHT, PartitionJournal
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.hidden import Hidden
from pipeline.ledger.tail import Tail
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.records import TrainingBatch
from topics.skipped import SkippedRecords


@dataclass
class Batches:
    """What the topic `batches` holds up to the cut."""

    rows: dict[str, int] = field(default_factory=dict)
    """By batch id."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Partition and offset by batch id."""
    skipped_in: dict[str, dict[str, Kind]] = field(default_factory=dict)
    """Lengths and rewards of what learners skipped, by batch and environment."""

    @property
    def skipped(self) -> dict[str, Kind]:
        """The same by environment; a sum of floats that does not depend on which partition was read first."""
        found: dict[str, Kind] = {}
        for _batch_id, kinds in sorted(self.skipped_in.items()):
            for environment, kind in kinds.items():
                found[environment] = found.get(environment, Kind()) + kind
        return found


def check_batches(
    kafka: KafkaConfig,
    run: str,
    journals: dict[int, PartitionJournal],
    evals: set[str],
    untrained: Mapping[str, Collection[int]],
    hidden: Hidden,
    result: Ledger,
) -> Batches:
    """Batches against the journal: the same batches, made of exactly the offsets it calls batched and of nothing that
    was made for evaluation. `untrained` are the rows that learners skipped, by batch id.
    """
    expected = {batch_id for journal in journals.values() for batch_id in journal.batch_ids}
    carried: dict[int, Counter[int]] = {p: Counter() for p in journals}
    found, tail, skipped = Batches(), Tail(kafka, run, "batches"), SkippedRecords("ledger", logged=False)

    def read(batch: TrainingBatch, place: tuple[int, int]) -> None:
        journal = journals.get(batch.partition)
        if journal is None:
            raise RecordError(f"batch {batch.batch_id} is of partition {batch.partition}, of {len(journals)}")
        if batch.number >= journal.batches:
            return  # Committed after the cut.
        if batch.batch_id in found.rows:
            result.problem(f"batch {batch.batch_id} is in batches twice")
        found.rows[batch.batch_id], found.places[batch.batch_id] = len(batch), place
        for uid in evals.intersection(batch.uids):
            result.evals_batched += 1
            result.problem(f"rollout {uid} of evals is in batch {batch.batch_id}")
        if batch.batch_id in expected:
            carried[batch.partition].update(batch.source_offsets.tolist())
        elif batch.number >= journal.base_batches:
            result.problem(f"batch {batch.batch_id} is in batches and not in the journal")
        rows = [row for row in untrained.get(batch.batch_id, ()) if row < len(batch)]
        try:
            skipped_rows = measured(batch, rows)
        except IndexError as error:
            raise RecordError(f"batch {batch.batch_id} has rows without tokens, reward or group") from error
        if skipped_rows:
            found.skipped_in[batch.batch_id] = skipped_rows

    deadline = time.monotonic() + PATIENCE_S
    while True:
        for message, batch in skipped.records(TrainingBatch, tail.messages()):
            with skipped.passing(message):
                read(batch, (message.partition() or 0, message.offset() or 0))
        missing = expected - found.rows.keys()
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    result.note_skipped(skipped)
    for message, batch in SkippedRecords("ledger", logged=False).records(
        TrainingBatch, hidden.messages("batches") if missing else ()
    ):
        if batch.batch_id in missing:
            missing.discard(batch.batch_id)
            found.places[batch.batch_id] = message.partition() or 0, message.offset() or 0
            found.rows[batch.batch_id] = len(batch)
            carried[batch.partition].update(batch.source_offsets.tolist())
            result.undecide(f"batch {batch.batch_id}", hidden.places("batches"))
    for batch_id in sorted(missing):
        result.problem(f"batch {batch_id} is in the journal and not in batches")
    for number, journal in journals.items():
        in_flight = journal.offsets(IN_FLIGHT)
        named = (journal.offsets(BATCHED) | (journal.delivered & in_flight)) - journal.delivered_before
        for offset in sorted(named.symmetric_difference(carried[number])):
            place = "journal and no batch" if offset in named else "a batch and not the journal"
            result.problem(f"rollouts[{number}] offset {offset} is batched in {place}")
        for offset, times in carried[number].items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is in {times} batches")
    result.batches = sum(journal.batches for journal in journals.values())
    return found

"""Verification: fold the recorded log again, from its first record, and compare every batch and drop bit for bit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from consumers.grouping import state
from consumers.grouping.changes import CORE_VERSION
from consumers.grouping.fold import Fold
from consumers.grouping.makers import MakerFactory, makers_of
from consumers.grouping.restore import records_of
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import StateRefused
from topics.examples import batch_digest
from topics.records import BatchIndexEntry, Drop, JournalRecord, TrainingBatch, same


@dataclass
class Verification:
    """What a second fold of the log gave, beside what was recorded."""

    batches: int = 0
    """Batches recorded."""
    drops: int = 0
    """Drops recorded."""
    mismatches: list[str] = field(default_factory=list)
    """What differs, and where."""

    def as_dict(self) -> dict[str, Any]:
        """The verification as programs read it."""
        return {
            "batches": self.batches,
            "drops": self.drops,
            "mismatches": len(self.mismatches),
            "differences": self.mismatches,
        }


def verify(kafka: KafkaConfig, run: str, makers: Iterable[str] = ()) -> Verification:
    """Refold a run and compare. `makers` are the batch makers of yours its configurations name (grouper.makers).

    Raises StateRefused when the log was cut by a newer core version than this.
    """
    clients.check_broker(kafka)
    known = makers_of(makers)
    result = Verification()
    journals: dict[int, list[JournalRecord]] = {}
    for message in clients.read_to_end(kafka, topic_name(run, "journal")):
        record = decode_as(JournalRecord, message.value())
        journals.setdefault(record.partition, []).append(record)
    newest = max((r.core_version for records in journals.values() for r in records), default=CORE_VERSION)
    if newest > CORE_VERSION:
        raise StateRefused(
            f"run {run} was cut by core version {newest}, this release knows versions up to {CORE_VERSION}; verify "
            f"with the release that cut it"
        )
    recorded = _recorded(kafka, run, journals, result)
    folded, drops = _refold(kafka, run, journals, known)
    for batch_id in sorted(recorded.keys() | folded.keys()):
        result.mismatches += _differences(batch_id, recorded.get(batch_id), folded.get(batch_id))
    for partition, records in journals.items():
        written = [drop for record in records for drop in record.drops]
        result.drops += len(written)
        result.mismatches += _drop_differences(partition, written, drops[partition])
    return result


def _recorded(
    kafka: KafkaConfig, run: str, journals: dict[int, list[JournalRecord]], result: Verification
) -> dict[str, TrainingBatch]:
    """The batches of the run up to the journal's end; each must match its own digest and the index's."""
    wanted = {batch_id for records in journals.values() for record in records for batch_id in record.batch_ids}
    found: dict[str, TrainingBatch] = {}
    for message in clients.read_to_end(kafka, topic_name(run, "batches")):
        batch = decode_as(TrainingBatch, message.value())
        if batch.batch_id in wanted:
            found[batch.batch_id] = batch
    digests: dict[str, str] = {}
    for message in clients.read_to_end(kafka, topic_name(run, "batch-index")):
        entry = decode_as(BatchIndexEntry, message.value())
        digests[entry.batch_id] = entry.digest
    for batch_id, batch in found.items():
        if batch_digest(batch) != batch.digest:
            result.mismatches.append(f"batch {batch_id}: its content does not match the digest it carries")
        if digests.get(batch_id) != batch.digest:
            result.mismatches.append(f"batch {batch_id}: the index has digest {digests.get(batch_id, 'none')}")
    result.batches = len(wanted)
    return found


def _refold(
    kafka: KafkaConfig, run: str, journals: dict[int, list[JournalRecord]], makers: Mapping[str, MakerFactory]
) -> tuple[dict[str, TrainingBatch], dict[int, list[Drop]]]:
    folds = {partition: Fold(state.restore(records[:1]), makers) for partition, records in journals.items()}
    ends = {partition: records[-1].position for partition, records in journals.items()}
    for message in clients.read_to_end(kafka, topic_name(run, "rollouts")):
        partition = message.partition() or 0
        if partition in folds and (message.offset() or 0) < ends[partition]:
            folds[partition].apply(records_of(message))
    outputs = {partition: fold.take() for partition, fold in folds.items()}
    batches = {batch.batch_id: batch for output in outputs.values() for batch in output.batches}
    return batches, {partition: list(output.journal.drops) for partition, output in outputs.items()}


def _differences(batch_id: str, recorded: TrainingBatch | None, folded: TrainingBatch | None) -> list[str]:
    if recorded is None:
        return [f"batch {batch_id}: the fold cuts it, it is not in batches"]
    if folded is None:
        return [f"batch {batch_id}: it is in batches, the fold does not cut it"]
    differing = [f.name for f in fields(recorded) if not same(getattr(recorded, f.name), getattr(folded, f.name))]
    return [f"batch {batch_id}: {', '.join(differing)} differ from the refold"] if differing else []


def _drop_differences(partition: int, recorded: list[Drop], folded: list[Drop]) -> list[str]:
    a, b = ({(drop.offset, drop.reason) for drop in drops} for drops in (recorded, folded))
    return [
        f"rollouts[{partition}] offset {drop[0]}: {drop[1]} only in the {'journal' if drop in a else 'refold'}"
        for drop in sorted(a ^ b)
    ]

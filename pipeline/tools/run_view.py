"""Read-only view of a run's topics, loaded on first use: index, batches, steps, manifests and fates of offsets.

Each topic is shown as it was when it was read. A live run goes on, so missing records may still appear.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from rollstream.pipeline.audit.configuration_history import ConfigurationHistory, ConfigurationSummary, summary
from rollstream.pipeline.audit.topic_reading import Index, batch_at, read_index, read_journal
from rollstream.pipeline.tools.plain_values import decoded
from rollstream.topics.catalogue import topic_name
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.fates import BATCHED, DROPPED
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import Reader, read_to_end, record_at
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.offset_ranges import from_ranges
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchUse,
    Drop,
    JournalRecord,
    LearnerStep,
    PolicyManifest,
    Rollout,
    TrainingBatch,
)

IN_FLIGHT, UNREAD = "in_flight", "unread"
SETTLED = "settled"
"""Fate of a record that was finished before the journal begins, because the journal was pruned."""
_ONE_RECORD: dict[str, Any] = {"max.partition.fetch.bytes": 64 * 1024, "queued.min.messages": 1}
"""Settings of a client that fetches single records; by default it would also fetch megabytes of later records."""


class RolloutPlace(NamedTuple):
    """Partition and offset of a record of `rollouts`."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


class Fate(NamedTuple):
    """Fate of a record of `rollouts`."""

    name: str
    """batched, dropped, dead_lettered, control, settled, in_flight or unread."""
    drop: Drop | None = None
    batch_ids: tuple[str, ...] = ()
    """Batches of the transaction that finished the record, if it was batched: it is in one of these, or in an older
    batch."""
    generation: int = -1
    """Generation of the grouping configuration that dropped the record; for a batched record, the batch names it."""


class StepUse(NamedTuple):
    """Use of a batch by a learner's step."""

    step: LearnerStep
    use: BatchUse


class IndexedEntry(NamedTuple):
    """The index entry of a batch."""

    offset: int
    """Offset of the entry in the index, whose order learners follow."""
    entry: BatchIndexEntry


class RecordedRun(Protocol):
    """The queries that lineage makes to a run, answered from its topics or from an index."""

    run: str

    def entry(self, batch_id: str) -> IndexedEntry | None:
        """Entry of a batch; None if the index does not name it."""
        ...

    def uses_of(self, batch_id: str) -> list[StepUse]:
        """Steps that used or skipped a batch, in order."""
        ...

    def policy(self, version: int) -> PolicyManifest | None:
        """Manifest of a policy version; None if it is not on record."""
        ...

    def steps_numbered(self, number: int) -> list[LearnerStep]:
        """Steps with this number, one for each learner that has such a step, in order."""
        ...

    def steps_before(self, manifest: PolicyManifest) -> list[LearnerStep]:
        """Steps that made the parameters of a policy version, in order; for a rollback, the step of its source."""
        ...

    def entries_with(self, version: int) -> list[BatchIndexEntry]:
        """Entries of the batches that may hold rollouts of a policy version, in the order that learners follow."""
        ...

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if it does not exist."""
        ...

    def fates(self, partition: int, offsets: set[int]) -> dict[int, Fate]:
        """Fates of these offsets of a partition."""
        ...

    def configuration(self, partition: int, generation: int) -> ConfigurationSummary:
        """Return a summary of a grouping configuration from the journal of a partition."""
        ...

    def batch(self, batch_id: str) -> TrainingBatch:
        """Fetch a batch. Raises TopicError if the index does not name it, or if it is no longer on the log."""
        ...

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """Find the batch that carries a batched record."""
        ...


class SearchableRun(RecordedRun, Protocol):
    """A recorded run whose rollouts can be found by uid."""

    skipped: SkippedRecords

    def places_of(self, uid: str) -> list[RolloutPlace]:
        """Places of the rollouts with a uid, in order; several if the rollout was sent repeatedly."""
        ...


class RunView(Closing):
    """View of one run from its topics alone; one client fetches all individual records."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.kafka, self.run = kafka, run
        self.skipped = SkippedRecords(logged=False)
        """Invalid records that were skipped."""
        self._journals: dict[int, list[JournalRecord]] = {}
        self._reader: Reader | None = None
        clients.check_broker(kafka)

    def close(self) -> None:
        """Close the client."""
        if self._reader is not None:
            self._reader.close()

    def topic(self, name: str) -> str:
        return topic_name(self.run, name)

    def messages(self, name: str) -> Iterator[KafkaRecord]:
        """Every committed record of a topic other than `rollouts`."""
        return read_to_end(self.kafka, self.topic(name))

    def rollout_messages(self, partitions: Iterable[int] | None = None) -> Iterator[KafkaRecord]:
        """Every committed record of `rollouts`, or of some of its partitions."""
        return read_to_end(self.kafka, self.topic("rollouts"), partitions=partitions)

    @cached_property
    def index(self) -> Index:
        """Entry of each batch with its offset in the index, in the order that learners follow."""
        return read_index(self.kafka, self.run, self.skipped)

    @cached_property
    def steps(self) -> list[LearnerStep]:
        """The newest record of each step of each learner, in order."""
        newest = {}
        for _message, step in self.skipped.records(LearnerStep, self.messages("steps")):
            newest[step.learner, step.step] = step
        return [newest[key] for key in sorted(newest)]

    def entry(self, batch_id: str) -> IndexedEntry | None:
        """Entry of a batch; None if the index does not name it."""
        return IndexedEntry(*self.index[batch_id]) if batch_id in self.index else None

    def uses_of(self, batch_id: str) -> list[StepUse]:
        """Steps that used or skipped a batch, in order."""
        return self.uses.get(batch_id, [])

    def policy(self, version: int) -> PolicyManifest | None:
        """Manifest of a policy version; None if it is not on record."""
        return self.policies.get(version)

    def steps_numbered(self, number: int) -> list[LearnerStep]:
        """Steps with this number, one for each learner that has such a step, in order."""
        return [step for step in self.steps if step.step == number]

    def steps_before(self, manifest: PolicyManifest) -> list[LearnerStep]:
        """Steps that made the parameters of a policy version, in order; for a rollback, the step of its source."""
        source = manifest.learner, manifest.step
        return [
            step
            for step in self.steps
            if step.policy_version == manifest.version or (step.learner, step.step) == source
        ]

    def entries_with(self, version: int) -> list[BatchIndexEntry]:
        """Entries of the batches that may hold rollouts of a policy version, in the order that learners follow."""
        entries = (entry for _offset, entry in self.index.values())
        return [entry for entry in entries if entry.lowest_version <= version <= entry.highest_version]

    @cached_property
    def uses(self) -> dict[str, list[StepUse]]:
        """Steps that used or skipped a batch, by batch."""
        uses: dict[str, list[StepUse]] = {}
        for step in self.steps:
            for use in step.uses:
                uses.setdefault(use.batch_id, []).append(StepUse(step, use))
        return uses

    @cached_property
    def policies(self) -> dict[int, PolicyManifest]:
        """Manifest of each policy version."""
        manifests = self.skipped.records(PolicyManifest, self.messages("policies"))
        return {manifest.version: manifest for _message, manifest in manifests}

    def journal(self, partition: int) -> list[JournalRecord]:
        """The journal of a partition, oldest first, read once."""
        if partition not in self._journals:
            records = read_journal(self.kafka, self.run, partition, self.skipped)
            self._journals[partition] = [record for _offset, record in records]
        return self._journals[partition]

    def fates(self, partition: int, offsets: set[int]) -> dict[int, Fate]:
        """Fates of these offsets of a partition."""
        journal = self.journal(partition)
        read = range(journal[0].begin, journal[-1].position) if journal else range(0)
        return fates_in(journal, read, offsets, oldest_snapshot(journal))

    def configuration(self, partition: int, generation: int) -> ConfigurationSummary:
        """Return a summary of a grouping configuration from the journal of a partition."""
        history = ConfigurationHistory()
        for record in self.journal(partition):
            history.read(record)
        return summary([(partition, history)], generation)

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if it does not exist."""
        topic = self.topic(name)
        if self._reader is None:
            self._reader = Reader(self.kafka, fetch_wait_ms=10, **_ONE_RECORD)
        bounds = self._reader.bounds(topic)
        if partition not in bounds:
            raise TopicError(f"{topic} has no partition {partition}")
        low, high = bounds[partition]
        if not low <= offset < high:
            raise TopicError(f"{topic}[{partition}] holds offsets {low} to {high - 1}, not {offset}")
        message = record_at(self.kafka, topic, partition, offset, reader=self._reader)
        if message is None:
            raise TopicError(f"{topic}[{partition}] holds no record at offset {offset}")
        return message

    def batch(self, batch_id: str) -> TrainingBatch:
        """Fetch a batch. Raises TopicError if the index does not name it, or if it is no longer on the log."""
        if batch_id not in self.index:
            raise TopicError(f"run {self.run} has no batch {batch_id}; `rollstream cat batch-index` lists them")
        entry = self.index[batch_id][1]
        return batch_at(self.record("batches", entry.partition, entry.offset))

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """Find the batch that carries a batched record: one of the record's transaction, or an older one of its
        partition."""
        mine = [name for name, (_offset, entry) in self.index.items() if entry.partition == place.partition]
        return carrying_batch(self, place, fate, reversed(mine))

    def places_of(self, uid: str) -> list[RolloutPlace]:
        """Places of the rollouts with a uid, in order; several if the rollout was sent repeatedly."""
        # A value without the uid's bytes cannot be a rollout with this uid, and need not be decoded.
        wanted, places = uid.encode(), []
        for message in self.rollout_messages():
            value = message.value
            if value is not None and wanted in value:
                record = decoded(value)
                if isinstance(record, Rollout) and record.uid == uid:
                    places.append(RolloutPlace(message.partition, message.offset))
        return sorted(places)


def oldest_snapshot(journal: Iterable[JournalRecord]) -> list[JournalRecord]:
    """Return the parts of the first complete snapshot of a journal, reading no further; empty if there is none."""
    parts: list[JournalRecord] = []
    for record in journal:
        follows = record.snapshot and record.part == (len(parts) if record.part else 0)
        parts = [*(parts if record.part else ()), record] if follows else []
        if parts and len(parts) == record.parts:
            return parts
    return []


def fates_in(
    journal: Iterable[JournalRecord], read: range, offsets: set[int], snapshot: Iterable[JournalRecord] = ()
) -> dict[int, Fate]:
    """Return the fates of offsets from their partition's journal.

    `read` holds the offsets that grouping has read according to the journal. If the journal was pruned, they do not
    begin with 0; `snapshot`, the parts of its oldest snapshot, names the earlier offsets that were still in flight.
    """
    journal = list(journal)
    # A large transaction is split into records, and the drops and batches of an offset may follow in a later one.
    drops = {drop.offset: drop for record in journal for drop in record.drops if drop.offset in offsets}
    batches: dict[int, tuple[str, ...]] = {}
    for record in journal:
        batches[_transaction(record)] = batches.get(_transaction(record), ()) + record.batch_ids
    waiting = {offset for part in snapshot for offset in offsets.intersection(from_ranges(part.unfinished))}
    fates = {offset: Fate(_unfinished(offset, read, waiting)) for offset in offsets}
    for record in journal:
        for finished in record.finished:
            for offset in offsets.intersection(from_ranges(finished.runs)):
                batch_ids = batches[_transaction(record)] if finished.fate == BATCHED else ()
                drop = drops.get(offset) if finished.fate == DROPPED else None
                generation = record.generation if drop else -1
                fates[offset] = Fate(finished.fate, drop, batch_ids, generation)
    return fates


def _unfinished(offset: int, read: range, waiting: set[int]) -> str:
    """Return the fate of an offset that no record of the journal finishes."""
    if offset >= read.stop:
        return UNREAD
    return IN_FLIGHT if offset >= read.start or offset in waiting else SETTLED


def _transaction(record: JournalRecord) -> int:
    """Return the sequence of the first record of a record's transaction."""
    return record.sequence - record.part


def carrying_batch(
    view: RecordedRun, place: RolloutPlace, fate: Fate, batch_ids: Iterable[str]
) -> TrainingBatch | None:
    """Find the batch that carries a batched record, among the batches of the record's transaction, then among
    `batch_ids`, which the caller gives newest first."""
    for batch_id in itertools.chain(fate.batch_ids, (name for name in batch_ids if name not in fate.batch_ids)):
        batch = batch_on_log(view, batch_id)
        if batch is not None and place.offset in batch.source_offsets:
            return batch
    return None


def batch_on_log(view: RecordedRun, batch_id: str) -> TrainingBatch | None:
    """Fetch a batch; None if the index does not name it, if it was pruned or lost, or if the record at the entry's
    offset is not this batch."""
    if view.entry(batch_id) is None:
        return None
    try:
        batch = view.batch(batch_id)
    except (TopicError, RecordError):
        return None
    return batch if batch.batch_id == batch_id else None

"""What a run's topics say, read when asked for and kept: the index, batches, steps, manifests and fates of offsets.

Everything is of the moment it was read; a run that is live goes on meanwhile, so what is missing may only not be yet.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from confluent_kafka import Consumer, Message

from consumers.closing import Closing
from consumers.grouping.changes import BATCHED, DROPPED
from consumers.grouping.runs import from_runs
from pipeline.reading import Index, batch_at, read_index, read_journal
from pipeline.tools.plain import decoded
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import RecordError, TopicError
from topics.records import (
    BatchUse,
    Drop,
    JournalRecord,
    LearnerStep,
    PolicyManifest,
    Rollout,
    TrainingBatch,
)
from topics.skipped import SkippedRecords

IN_FLIGHT, UNREAD = "in_flight", "unread"


class Place(NamedTuple):
    """Where a record of `rollouts` lies."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


class Fate(NamedTuple):
    """What became of a record of `rollouts`."""

    name: str
    """batched, dropped, dead_lettered, control, in_flight or unread."""
    drop: Drop | None = None
    batch_ids: tuple[str, ...] = ()
    """Batches of the transaction that finished it, where it was batched: it is in one of these, or in an older one."""


class Use(NamedTuple):
    """A batch in a learner's step."""

    step: LearnerStep
    use: BatchUse


class View(Closing):
    """One run, asked from its topics alone; single records are read by one client, however many there are."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.kafka, self.run = kafka, run
        self.skipped = SkippedRecords(logged=False)
        """Records that are none, or make no sense, where such belong."""
        self._journals: dict[int, list[JournalRecord]] = {}
        self._client: Consumer | None = None
        clients.check_broker(kafka)

    def close(self) -> None:
        """Leave the broker."""
        if self._client is not None:
            self._client.close()

    def topic(self, name: str) -> str:
        return topic_name(self.run, name)

    def messages(self, name: str, partitions: list[int] | None = None) -> Iterator[Message]:
        """Every committed record of a topic."""
        return clients.read_to_end(self.kafka, self.topic(name), partitions=partitions)

    @cached_property
    def index(self) -> Index:
        """Entry of each batch with its offset in the index, in the order learners follow."""
        return read_index(self.kafka, self.run, self.skipped)

    @cached_property
    def steps(self) -> list[LearnerStep]:
        """The newest record of each step of each learner, in order."""
        newest = {}
        for _message, step in self.skipped.records(LearnerStep, self.messages("steps")):
            newest[step.learner, step.step] = step
        return [newest[key] for key in sorted(newest)]

    @cached_property
    def uses(self) -> dict[str, list[Use]]:
        """Steps that met a batch, by batch."""
        found: dict[str, list[Use]] = {}
        for step in self.steps:
            for use in step.uses:
                found.setdefault(use.batch_id, []).append(Use(step, use))
        return found

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
        """What became of these offsets of a partition."""
        journal = self.journal(partition)
        read = range(journal[0].begin, journal[-1].position) if journal else range(0)
        found = {offset: Fate(IN_FLIGHT if offset in read else UNREAD) for offset in offsets}
        for record in journal:
            drops = {drop.offset: drop for drop in record.drops}
            for finished in record.finished:
                for offset in offsets.intersection(from_runs(finished.runs)):
                    batch_ids = record.batch_ids if finished.fate == BATCHED else ()
                    found[offset] = Fate(
                        finished.fate, drops.get(offset) if finished.fate == DROPPED else None, batch_ids
                    )
        return found

    def record(self, name: str, partition: int, offset: int) -> Message:
        """One record. Raises TopicError when it is not there."""
        topic = self.topic(name)
        if self._client is None:
            self._client = clients.reader(self.kafka, fetch_wait_ms=10)
        bounds = clients.bounds(self.kafka, topic, client=self._client)
        if partition not in bounds:
            raise TopicError(f"{topic} has no partition {partition}")
        low, high = bounds[partition]
        if not low <= offset < high:
            raise TopicError(f"{topic}[{partition}] holds offsets {low} to {high - 1}, not {offset}")
        message = clients.fetch(self.kafka, topic, partition, offset, client=self._client)
        if message is None:
            raise TopicError(f"{topic}[{partition}] holds no record at offset {offset}")
        return message

    def batch(self, batch_id: str) -> TrainingBatch:
        """A batch of the index. Raises TopicError when the index does not name it."""
        if batch_id not in self.index:
            raise TopicError(f"run {self.run} has no batch {batch_id}; `rollstream cat batch-index` lists them")
        entry = self.index[batch_id][1]
        return batch_at(self.record("batches", entry.partition, entry.offset))

    def batch_of(self, place: Place, fate: Fate) -> TrainingBatch | None:
        """The batch that carries a batched record: one of its transaction's, or an older one of its partition."""
        mine = [name for name, (_offset, entry) in self.index.items() if entry.partition == place.partition]
        older = [name for name in reversed(mine) if name not in fate.batch_ids]
        for batch_id in (*fate.batch_ids, *older):
            if batch_id in self.index:
                try:
                    batch = self.batch(batch_id)
                except (TopicError, RecordError):
                    continue  # Pruned, or an entry that names no batch.
                if batch.batch_id == batch_id and place.offset in batch.source_offsets:
                    return batch
        return None

    def places_of(self, uid: str) -> list[Place]:
        """Where rollouts of a uid lie; several when it was sent more than once."""
        # A frame that does not hold the uid's bytes cannot be a rollout of it, and need not be decoded.
        wanted, found = uid.encode(), []
        for message in self.messages("rollouts"):
            value = message.value()
            if value is not None and wanted in value:
                record = decoded(value)
                if isinstance(record, Rollout) and record.uid == uid:
                    found.append(Place(message.partition() or 0, message.offset() or 0))
        return found

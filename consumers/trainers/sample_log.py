"""The samples of a TransferQueue on the topic `samples`: writes, reads by place, and what of them is live.

Delivery: a put is one transaction, so it is on the log whole or not at all, and it is there before the queue names it.
A put that is sent again, because its answer was lost, replaces itself. One driver at a time writes: the next fences it.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.consumers.transactions import repeated
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import (
    BrokerUnavailable,
    ConfigurationError,
    Fenced,
    RecordTooLarge,
    StateRefused,
    TopicError,
)
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.reader import Reader, read_to_end, silence
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.records import SampleField, SamplesCleared
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key, partition_of

logger = logging.getLogger(__name__)
POSITIONS = "rollstream.json"
"""File of a queue's checkpoint that says where the topic ended."""
_AT_ONCE = 500
_GAP = 100
"""Longest gap of offsets to read through; for a longer gap a seek, which discards fetched data, is cheaper."""

Sample = tuple[str, str]
"""Partition of the queue, and the sample's name in it."""


class SamplePlace(NamedTuple):
    """Where a field of a sample lies on the log."""

    partition: int
    """Partition of Kafka."""
    offset: int
    digest: str
    """BLAKE3 of the field's data."""


class SampleRecord(NamedTuple):
    """An encoded record on its way to the log."""

    partition: int
    key: bytes
    value: "bytes | NDArray[np.uint8]"


def record_of(value: SampleField | SamplesCleared, partitions: int) -> SampleRecord:
    """Encode a record for a topic with this number of partitions. All records of a sample get the same partition."""
    if isinstance(value, SampleField):
        place = partition_of(encode_key(value.partition_id, value.sample), partitions)
        return SampleRecord(place, encode_key(value.partition_id, value.sample, value.field), encode(value))
    [place] = {partition_of(encode_key(value.partition_id, sample), partitions) for sample in value.samples}
    return SampleRecord(place, encode_key(value.partition_id), encode(value))


def cleared_marks(samples: Iterable[Sample], partitions: int) -> list[SampleRecord]:
    """Return the marks that clear samples, one for each partition of both kinds that has any of them."""
    groups: dict[tuple[str, int], list[str]] = {}
    for partition_id, sample in samples:
        place = partition_of(encode_key(partition_id, sample), partitions)
        groups.setdefault((partition_id, place), []).append(sample)
    marks = (SamplesCleared(partition_id=name, samples=tuple(group)) for (name, _place), group in groups.items())
    return [record_of(mark, partitions) for mark in marks]


def digest_of(data: bytes) -> str:
    """Return the digest of a field's data."""
    return blake3(data).hexdigest(16)


@dataclass
class _Put:
    records: Sequence[SampleRecord]
    offsets: list[int] = field(default_factory=list)
    error: Exception | None = None
    done: bool = False


class SampleWriter(Closing):
    """Writes puts in transactions under one transactional id; puts of several threads share a transaction."""

    def __init__(self, kafka: KafkaConfig, run: str, number: int, claim: OrdinalClaim) -> None:
        """Fence the writer of this number that an earlier driver started.

        The driver has taken `claim`. A writer that its driver starts again looks at it, because it would otherwise
        fence the writer of the next driver. Raises Fenced if the claim is another driver's.
        """
        if not claim.is_ours():
            raise Fenced(f"another driver has taken over the samples of run {run}, so this one must stop")
        self._run, self._topic = run, topic_name(run, "samples")
        self._patience_s = kafka.patience_s
        self._producer = TransactionalProducer(kafka, transactional_id(run, "samples", number), logger=logger)
        self._waiting: list[_Put] = []
        self._queueing, self._committing = threading.Lock(), threading.Lock()
        repeated(self._producer.start, self._patience_s, self._raise_if_final)

    def write(self, records: Sequence[SampleRecord]) -> list[int]:
        """Commit records together, and return their offsets.

        Raises Fenced if another driver took over, RecordTooLarge for a record above kafka.max_record_bytes, and
        BrokerUnavailable if the transaction does not succeed in time; then all of them may be on the log, or none.
        """
        put = _Put(records)
        with self._queueing:
            self._waiting.append(put)
        with self._committing:
            if not put.done:
                with self._queueing:
                    puts, self._waiting = self._waiting, []
                self._commit(puts)
        if put.error is not None:
            raise put.error
        return put.offsets

    def _commit(self, puts: list[_Put]) -> None:
        try:
            repeated(lambda: self._transaction(puts), self._patience_s, self._raise_if_final)
        except RecordTooLarge as error:
            if len(puts) == 1:
                puts[0].error = error
            for put in puts if len(puts) > 1 else ():  # The others must not fail with it.
                self._commit([put])
        except (Fenced, BrokerUnavailable) as error:
            for put in puts:
                put.error = error
        for put in puts:
            put.done = True

    def _transaction(self, puts: list[_Put]) -> None:
        deliveries: list[Delivery | None] = [None] * sum(len(put.records) for put in puts)
        with self._producer.transaction() as transaction:
            for number, record in enumerate(record for put in puts for record in put.records):
                note = _noting(deliveries, number)
                value = bytes(record.value)  # Another process sends memory that it shares.
                transaction.send(self._topic, value, record.key, partition=record.partition, on_delivery=note)
            transaction.flush(self._patience_s)
            offsets = iter([transaction.offset_of(delivery) for delivery in deliveries if delivery is not None])
        for put in puts:
            put.offsets = [next(offsets) for _record in put.records]

    def _raise_if_final(self, failed: TransactionFailed | Stalled, too_late: bool) -> None:
        ended = isinstance(failed, TransactionFailed) and (failed.fatal or failed.refused)
        if isinstance(failed, TransactionFailed) and failed.taken_over:
            raise Fenced(
                f"another driver has taken over the samples of run {self._run} ({failed.reason}), so this one must stop"
            ) from failed
        if isinstance(failed, TransactionFailed) and failed.too_large:
            raise RecordTooLarge(
                f"a field of a sample of run {self._run} is larger than kafka.max_record_bytes or the brokers "
                f"allow ({failed.reason}); raise kafka.max_record_bytes and run `rollstream topics apply`"
            ) from failed
        if ended or too_late:
            raise BrokerUnavailable(f"samples of run {self._run} were not written: {failed}") from failed

    def close(self) -> None:
        """End the writer; no transaction is open between writes."""
        self._producer.flush(5.0)
        self._producer.close()


def _noting(deliveries: list[Delivery | None], number: int) -> Callable[[Delivery], None]:
    def note(delivery: Delivery) -> None:
        deliveries[number] = delivery

    return note


class SampleReader(Closing):
    """Reads fields by their places."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._kafka, self._topic = kafka, topic_name(run, "samples")
        # A place is told after its transaction is committed, and the marker may reach the partition later.
        self._reader = Reader(kafka, isolation="read_uncommitted", fetch_wait_ms=10)
        self.partitions = self._reader.partitions_of(self._topic)
        """Partitions of the topic."""

    def fetch(self, places: Iterable[SamplePlace]) -> list[SampleField]:
        """Return the fields at these places, in their order.

        Raises TopicError if a place holds another record or was deleted, and BrokerUnavailable if no broker answers.
        """
        wanted = list(places)
        records: dict[tuple[int, int], bytes | None] = {}
        pending: dict[int, list[int]] = {}
        for partition, offset in sorted({(place.partition, place.offset) for place in wanted}, reverse=True):
            pending.setdefault(partition, []).append(offset)  # The lowest offset of a partition is its last.
        self._reader.assign({(self._topic, partition): offsets[-1] for partition, offsets in pending.items()})
        deadline = time.monotonic() + self._kafka.patience_s
        while pending:
            for record in self._reader.poll(_AT_ONCE, 0.05).records:
                offsets = pending.get(record.partition, [])
                while offsets and offsets[-1] <= record.offset:
                    if offsets.pop() == record.offset:
                        records[record.partition, record.offset] = record.value
                    deadline = time.monotonic() + self._kafka.patience_s
            for partition in [partition for partition, offsets in pending.items() if not offsets]:
                del pending[partition]
            for partition, offsets in pending.items():
                if offsets[-1] > self._reader.positions.get((self._topic, partition), offsets[-1]) + _GAP:
                    self._reader.seek((self._topic, partition), offsets[-1])
            if time.monotonic() > deadline:
                raise silence(self._kafka, self._topic, {(self._topic, p) for p in pending}, self._kafka.patience_s)
        self._reader.unassign()
        return [self._checked(place, records.get(place[:2])) for place in wanted]

    def _checked(self, place: SamplePlace, value: bytes | None) -> SampleField:
        sample = None if value is None else decode_as(SampleField, value)
        if sample is None or digest_of(sample.data) != place.digest:
            raise TopicError(
                f"{self._topic}[{place.partition}] offset {place.offset} does not hold the field that was put there: "
                "its record was deleted, or the topic was created again; restore an older checkpoint, or none"
            )
        return sample

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()


@dataclass(frozen=True)
class LiveField:
    """A field that is in the queue, without its data."""

    record: SampleField
    place: SamplePlace


def live_samples(
    kafka: KafkaConfig, run: str, ends: Mapping[int, int] | None = None
) -> dict[Sample, dict[str, LiveField]]:
    """Return the samples that were put and not cleared since, with the newest record of each field, in log order.

    With `ends`, marks at or after these offsets, by partition, do not clear anything.
    """
    live: dict[Sample, dict[str, LiveField]] = {}
    messages = read_to_end(kafka, topic_name(run, "samples"), start=BEGINNING)
    for message, record in SkippedRecords("samples").records(object, messages):
        if isinstance(record, SampleField):
            place = SamplePlace(message.partition, message.offset, digest_of(record.data))
            fields = live.setdefault((record.partition_id, record.sample), {})
            fields[record.field] = LiveField(replace(record, data=b""), place)
        elif isinstance(record, SamplesCleared) and (ends is None or message.offset < ends.get(message.partition, 0)):
            for sample in record.samples:
                live.pop((record.partition_id, sample), None)
    return live


def checkpoint_ends(kafka: KafkaConfig, run: str, checkpoint: str | Path) -> dict[int, int]:
    """Return where the topic ended at a checkpoint of the queue, by partition.

    Raises ConfigurationError if the folder holds none, and StateRefused if it was made with another topic.
    """
    path = Path(checkpoint, POSITIONS)
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no part of a checkpoint of a queue on the log: {error}") from error
    identity = topic_identity(kafka, run)
    if {name: saved.get(name) for name in identity} != identity:
        raise StateRefused(
            f"the checkpoint in {checkpoint} was made with {saved.get('topic')} with id {saved.get('topic_id')}, not "
            f"with {identity['topic']} with id {identity['topic_id']}: name its run and its brokers"
        )
    return {int(partition): end for partition, end in saved["ends"].items()}


def topic_identity(kafka: KafkaConfig, run: str) -> dict[str, str]:
    """Return the name and the id of a run's topic of samples."""
    topic = topic_name(run, "samples")
    return {"topic": topic, "topic_id": topic_admin.topic_ids(kafka, [topic])[topic]}


def needed_from(kafka: KafkaConfig, run: str, ends: Mapping[int, int]) -> dict[int, int]:
    """Return the first offset of each partition that a checkpoint that ends there, or a later one, needs: that of the
    oldest field that was live, or where it ended."""
    keep = dict(ends)
    for fields in live_samples(kafka, run, ends).values():
        for live in fields.values():
            place = live.place
            keep[place.partition] = min(keep.get(place.partition, place.offset), place.offset)
    return keep

"""Restores an archive into topics: every record at its offset, with its time, key, bytes and headers.

Steps restored into a run of another name are the exception: they name the new run as their input.

Offsets must be the same, because batches name offsets of rollouts, the index names offsets of batches, and steps name
offsets of the index. Gaps between records are filled with ends of transactions and aborted records, which no reader
sees.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rollstream.consumers.archive.completeness import check_complete
from rollstream.consumers.archive.manifest import ArchiveManifest, arrays_folder
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import TopicPartitionKey, records
from rollstream.topics.config import KafkaConfig, RegistryConfig, TopicsConfig
from rollstream.topics.errors import BrokerUnavailable, RecordError, StateRefused
from rollstream.topics.files.stored_arrays import StoredArrays
from rollstream.topics.files.stores import Store
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.sender import Delivery, Failure, Sender, SendFailed
from rollstream.topics.kafka.topic_admin import delete_records
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.logs import event
from rollstream.topics.records import LearnerStep
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
_AT_ONCE = 500
_AT_ONCE_BYTES = 4 * 1024 * 1024
"""Maximum number of bytes written to one partition before the next."""
_ANY_TIMESTAMP = "message.timestamp.after.max.ms"
_WHILE_RESTORING = {
    "message.timestamp.type": "CreateTime",
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    # This setting accepts any timestamp.
    _ANY_TIMESTAMP: str(2**63 - 1),
}
_WHOLE_IN_TRANSACTION = 100
GAP_AT_ONCE = 50_000
"""Largest part of a gap that one transaction fills, so that it does not outlive the transaction timeout; at least 3,
because a longer gap must be divided into parts of at least 2."""
_FILLER = b"not a record: it is where an archived topic had none"


def restore(
    kafka: KafkaConfig,
    topics: TopicsConfig,
    store: Store,
    manifest: ArchiveManifest,
    into: str,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
    *,
    incomplete: bool = False,
) -> int:
    """Create the topics of run `into`, fill them, and return the number of records.

    Raises StateRefused if the archive is incomplete, unless `incomplete` permits that, if a topic of the run exists, or
    if another process writes to it; ConfigurationError if it has stored arrays, but kafka.arrays.url is empty.
    """
    clients.check_broker(kafka)
    check_complete(store, manifest, incomplete=incomplete)
    partitions = len(manifest.topics["rollouts"].position)
    shape = replace(topics, partitions=partitions)
    existing = [description.topic for description in provisioning.describe(kafka, into)]
    if existing:
        raise StateRefused(
            f"topic {existing[0]} exists; restore into a run of another name, or delete its topics first"
        )
    # The arrays come first: whoever reads a record finds those that it names.
    archived = StoredArrays(store, arrays_folder(manifest.run))
    if names := archived.sizes():
        for problem in StoredArrays.of(into, kafka.arrays).copy_from(archived, names):
            event(logger, "array_not_restored", level=logging.WARNING, reason=problem)
    # Set at creation, because brokers apply changed settings with a delay.
    provisioning.apply(kafka, shape, into, _WHILE_RESTORING)
    with_steps = _renamed(manifest.run, into)
    cursors = [
        PartitionCursor(into, name, p, topic.begin[p], end, (with_steps(e) for e in records(store, manifest, name, p)))
        for name, topic in manifest.topics.items()
        for p, end in topic.position.items()
    ]
    filling = TopicFiller(kafka, into)
    try:
        done = 0
        everything = manifest.rows("log")
        while cursors:
            done += filling.round(cursors)
            progress(done, everything)
            cursors = [cursor for cursor in cursors if not cursor.over]
        filling.finish()
    finally:
        filling.close()
    # This restores the brokers' limit of timestamps, then log append time and compaction.
    provisioning.unset(kafka, into, [_ANY_TIMESTAMP])
    provisioning.apply(kafka, shape, into)
    _check(kafka, manifest, into)
    event(logger, "archive_restored", run=into, archived=manifest.run, records=done)
    return done


def _renamed(run: str, into: str) -> Callable[[ArchivedRecord], ArchivedRecord]:
    """Return a function that replaces the archived run with the new run as the input run of a step."""

    def entry_as(entry: ArchivedRecord) -> ArchivedRecord:
        if run == into or entry.topic != "steps" or codec.kind_of(entry.value) != "LearnerStep":
            return entry
        try:
            step = codec.decode_as(LearnerStep, entry.value)
        except RecordError:
            return entry
        return entry._replace(value=codec.encode(replace(step, input_run=into))) if step.input_run == run else entry

    return entry_as


def _check(kafka: KafkaConfig, manifest: ArchiveManifest, into: str) -> None:
    """Raise StateRefused unless every partition ends at its archived position, or is empty if it was not archived."""
    for name, topic in manifest.topics.items():
        for partition, (_low, end) in topic_admin.bounds(kafka, topic_name(into, name)).items():
            archived = topic.position.get(partition, 0)
            if end != archived:
                raise StateRefused(
                    f"{into}.{name}[{partition}] ends at offset {end} but is archived up to {archived}; "
                    f"something else writes to it: delete the topics and restore again"
                )


class PartitionCursor:
    """Progress of one partition, and its next records with the gap after them."""

    def __init__(
        self, run: str, name: str, partition: int, begin: int, end: int, entries: Iterator[ArchivedRecord]
    ) -> None:
        self.topic, self.partition = topic_name(run, name), partition
        self.at = 0
        """Next offset to write."""
        self.ends_transaction = False
        """Whether the last offset written is the end of a transaction."""
        self._entries, self._end = entries, end
        self._next = next(entries, None)
        first = self._end if self._next is None else self._next.offset
        self.prefix = first if first - begin == 1 else begin
        """Number of pruned offsets, which are filled and then deleted. It includes a gap of one offset after them,
        which neither the end of a transaction nor an aborted record can fill."""

    @property
    def over(self) -> bool:
        return self._next is None and self.at >= self._end

    def next_records(self) -> tuple[list[ArchivedRecord], int]:
        """Return the next records, and the length of the gap between them and the next record or the end.

        A long gap is returned in parts, none of which has a length of one.
        """
        entries: list[ArchivedRecord] = []
        size, at = 0, self.at
        while self._next is not None and self._next.offset == at and len(entries) < _AT_ONCE and size < _AT_ONCE_BYTES:
            entries.append(self._next)
            size += self._next.size_bytes
            at += 1
            self._next = next(self._entries, None)
        gap = (self._end if self._next is None else self._next.offset) - at
        if gap > GAP_AT_ONCE:
            gap = GAP_AT_ONCE - (gap == GAP_AT_ONCE + 1)
        return entries, gap


class TopicFiller:
    """Writes records and the gaps between them, and checks the offset of each record."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        # A registry would give the values other ids of schemas than the archived ones, or refuse them.
        kafka = replace(kafka, registry=RegistryConfig())
        self._kafka = kafka
        self._plain = Sender(clients.producer(kafka), on_failure=self._failed)
        self._transactional = TransactionalProducer(
            kafka, transactional_id(run, "restore"), call_timeout_s=_TIMEOUT_S, retry_for_s=_TIMEOUT_S
        )
        self._watching = Reader(kafka, isolation="read_uncommitted")
        self._wrong: list[str] = []
        self._refused: StateRefused | None = None
        """The error of a record that the brokers find too large."""
        self._unplaced: dict[tuple[str, int], PartitionCursor] = {}
        """Partitions that acknowledged a record without its offset; their ends show whether it has the right offset."""
        self._prefixes: dict[TopicPartitionKey, int] = {}
        with _restoring():
            self._transactional.start()

    def close(self) -> None:
        """Close the consumer and the transactional producer."""
        self._watching.close()
        self._transactional.close()

    def round(self, cursors: list[PartitionCursor]) -> int:
        """Write the next records of each partition and the gaps after them; return the number of records.

        A gap of one offset is filled by the end of the transaction that writes the record before it. A longer gap is
        filled by an aborted transaction: records that no reader sees, and its end.
        """
        committed: list[tuple[PartitionCursor, list[ArchivedRecord]]] = []
        aborted: list[tuple[PartitionCursor, int]] = []
        count = 0
        for cursor in cursors:
            if cursor.at < cursor.prefix:
                self._fill(cursor)
                continue
            entries, gap = cursor.next_records()
            count += len(entries)
            inside = 0 if gap != 1 else len(entries) if len(entries) <= _WHOLE_IN_TRANSACTION else 1
            before = entries[: len(entries) - inside]
            if before:
                self._await_transaction_end(cursor)
            for entry in before:
                self._send(self._plain.send, cursor, entry)
            if gap == 1:
                committed.append((cursor, entries[len(entries) - inside :]))
            elif gap > 1:
                aborted.append((cursor, gap))
        if committed or aborted:
            # The transactional producer writes next, and its records must come after these.
            self._flush()
        if committed:
            with _restoring(), self._transactional.transaction() as transaction:
                for cursor, entries in committed:
                    for entry in entries:
                        self._send(transaction.send, cursor, entry)
                transaction.flush(_TIMEOUT_S)
                self._check()
            self._note_transaction_end([cursor for cursor, _entries in committed])
        if aborted:
            with _restoring(), self._transactional.transaction(commit=False) as transaction:
                for cursor, gap in aborted:
                    for _ in range(gap - 1):
                        self._send(transaction.send, cursor, None)
                transaction.flush(_TIMEOUT_S)
                self._check()
            self._note_transaction_end([cursor for cursor, _gap in aborted])
        return count

    def _fill(self, cursor: PartitionCursor) -> None:
        """Fill a partition up to its first archived offset with records that are deleted at the end."""
        self._prefixes[cursor.topic, cursor.partition] = cursor.prefix
        while cursor.at < cursor.prefix:
            self._send(self._plain.send, cursor, None)
        self._flush()

    def finish(self) -> None:
        """Flush, and delete the records that fill pruned offsets."""
        self._flush()
        if not self._prefixes:
            return
        try:
            delete_records(self._kafka, self._prefixes, _TIMEOUT_S)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(f"{error}; delete the topics and restore again") from error

    def _send(self, send: Callable[..., None], cursor: PartitionCursor, entry: ArchivedRecord | None) -> None:
        expected, cursor.at = cursor.at, cursor.at + 1

        def delivered(delivery: Delivery) -> None:
            if delivery.stamped:
                self._wrong.append(f"{cursor.topic} stamps records instead of keeping their times")
            elif delivery.known_offset is None:
                self._unplaced[cursor.topic, cursor.partition] = cursor
            elif delivery.offset != expected:
                self._wrong.append(
                    f"{cursor.topic}[{cursor.partition}] wrote the record of offset {expected} at {delivery.offset}"
                )

        if entry is None:
            send(cursor.topic, _FILLER, partition=cursor.partition, on_delivery=delivered)
            return
        name = f"the record of offset {expected}"
        try:
            send(
                cursor.topic,
                entry.value,
                entry.key,
                partition=cursor.partition,
                headers=entry.headers,
                # Unreadable records have no timestamp; 0 would mean the present time.
                timestamp_ms=max(entry.timestamp_ms, 1),
                name=name,
                on_delivery=delivered,
            )
        except (SendFailed, TransactionFailed) as failed:
            if failed.failure.too_large if isinstance(failed, SendFailed) else failed.too_large:
                raise self._too_large(name, cursor.topic, cursor.partition, entry.size_bytes) from failed
            raise

    def _failed(self, failure: Failure) -> None:
        if failure.too_large:
            self._refused = self._too_large(failure.name, failure.topic, failure.partition, failure.size_bytes)
        self._wrong.append(str(failure))

    def _too_large(self, name: str, topic: str, partition: int, size_bytes: int) -> StateRefused:
        return StateRefused(
            f"{name} of {topic}[{partition}] has {size_bytes} bytes, more than kafka.max_record_bytes "
            f"({self._kafka.max_record_bytes}) has room for: raise it to at least what the archived run had, delete "
            f"the topics and restore again"
        )

    def _flush(self) -> None:
        left = self._plain.waiting(_TIMEOUT_S)
        if left and not self._wrong:
            raise BrokerUnavailable(f"{left} records were not delivered within {_TIMEOUT_S:g} s")
        self._check()

    def _check(self) -> None:
        """Raise StateRefused unless all delivered records have the expected offsets."""
        for (topic, partition), cursor in self._unplaced.items():
            end = self._watching.bounds(topic, [partition])[partition][1]
            if end != cursor.at:
                self._wrong.append(f"{topic}[{partition}] ends at {end}, but {cursor.at} was expected")
        self._unplaced.clear()
        if self._refused is not None:
            raise self._refused
        if self._wrong:
            raise StateRefused(
                f"{self._wrong[0]}; something else writes there, or a record was refused: delete the topics and "
                f"restore again"
            )

    def _note_transaction_end(self, cursors: list[PartitionCursor]) -> None:
        for cursor in cursors:
            cursor.at += 1
            cursor.ends_transaction = True

    def _await_transaction_end(self, cursor: PartitionCursor) -> None:
        """Wait until the end of the last transaction is written, which may be after the response to its commit.

        The broker makes the transactional producer itself wait, but not the other producer.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while cursor.ends_transaction:
            end = self._watching.bounds(cursor.topic, [cursor.partition])[cursor.partition][1]
            cursor.ends_transaction = end < cursor.at
            if cursor.ends_transaction and time.monotonic() > deadline:
                raise StateRefused(f"{cursor.topic}[{cursor.partition}] ends at {end}, but {cursor.at} was expected")


@contextmanager
def _restoring() -> Iterator[None]:
    """Add the remedy to the error of a failed transaction."""
    try:
        yield
    except (TransactionFailed, Stalled) as error:
        raise BrokerUnavailable(f"restoring: {error}; delete the topics and restore again") from error

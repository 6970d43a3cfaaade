"""An archive back into topics: every record at the offset it had, with its time, key, bytes and headers.

Batches name offsets of rollouts, the index those of batches, steps those of the index: so what lay between records lies
there again, as ends of transactions and aborted records, which no reader sees.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from confluent_kafka import (
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from consumers.archive.manifest import Manifest
from consumers.archive.store import Store
from consumers.archive.tables import Entry
from consumers.archive.writer import Place, records
from topics import clients, codec, provisioning
from topics.catalogue import topic_name
from topics.config import KafkaConfig, TopicsConfig
from topics.errors import BrokerUnavailable, RecordError, StateRefused
from topics.logs import event
from topics.records import LearnerStep
from topics.transactional_ids import transactional_id

logger = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
_AT_ONCE = 500
_AT_ONCE_BYTES = 4 * 1024 * 1024
"""Of one partition, before others have their turn."""
_WHILE_RESTORING = {
    "message.timestamp.type": "CreateTime",
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    # Whatever time a record was sent with.
    "message.timestamp.after.max.ms": str(2**63 - 1),
}
_WHOLE_IN_TRANSACTION = 100
_FILLER = b"not a record: it is where an archived topic had none"


def restore(
    kafka: KafkaConfig,
    topics: TopicsConfig,
    store: Store,
    manifest: Manifest,
    into: str,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> int:
    """Create the topics of run `into` and fill them; returns how many records there are.

    Raises StateRefused where a topic of the run exists, or somebody else writes to it meanwhile.
    """
    clients.check_broker(kafka)
    partitions = len(manifest.topics["rollouts"].position)
    shape = replace(topics, partitions=partitions)
    there = [found.topic for found in provisioning.describe(kafka, into)]
    if there:
        raise StateRefused(f"topic {there[0]} exists; restore into a run of another name, or delete its topics first")
    # Made so from the first: a broker goes on for a moment as it was when settings are changed.
    provisioning.apply(kafka, shape, into, _WHILE_RESTORING)
    with_steps = _renamed(manifest.run, into)
    cursors = [
        _Cursor(into, name, p, topic.begin[p], end, (with_steps(e) for e in records(store, manifest, name, p)))
        for name, topic in manifest.topics.items()
        for p, end in topic.position.items()
    ]
    filling = _Filling(kafka, into)
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
    # Times are by the broker again, and what is compacted is.
    provisioning.apply(kafka, shape, into)
    _check(kafka, manifest, into)
    event(logger, "archive_restored", run=into, archived=manifest.run, records=done)
    return done


def _renamed(run: str, into: str) -> Callable[[Entry], Entry]:
    """Steps name the run whose batches they used: that of the archive is the new one's now."""
    frames = codec.frames("LearnerStep")

    def entry_as(entry: Entry) -> Entry:
        if run == into or entry.topic != "steps" or not (entry.value or b"").startswith(frames):
            return entry
        try:
            step = codec.decode_as(LearnerStep, entry.value)
        except RecordError:
            return entry
        return entry._replace(value=codec.encode(replace(step, input_run=into))) if step.input_run == run else entry

    return entry_as


def _check(kafka: KafkaConfig, manifest: Manifest, into: str) -> None:
    """Raise StateRefused unless every partition ends where it is archived up to: those it has no more of are empty."""
    for name, topic in manifest.topics.items():
        for partition, (_low, end) in clients.bounds(kafka, topic_name(into, name)).items():
            archived = topic.position.get(partition, 0)
            if end != archived:
                raise StateRefused(
                    f"{into}.{name}[{partition}] ends at offset {end} and is archived up to {archived}; "
                    f"something else writes to it: delete the topics and restore again"
                )


class _Cursor:
    """How far one partition is, and what comes next in it: records, then a gap."""

    def __init__(self, run: str, name: str, partition: int, begin: int, end: int, entries: Iterator[Entry]) -> None:
        self.topic, self.partition = topic_name(run, name), partition
        self.at = 0
        """Next offset to be written."""
        self.ends_transaction = False
        """Whether the end of a transaction is the last thing written."""
        self._entries, self._end = entries, end
        self._next = next(entries, None)
        first = self._end if self._next is None else self._next.offset
        self.prefix = first if first - begin == 1 else begin
        """Offsets that are filled and deleted: what was pruned. A lone gap of one after it cannot be filled otherwise:
        neither a transaction ends there, nor does an aborted record have room."""

    @property
    def over(self) -> bool:
        return self._next is None and self.at >= self._end

    def take(self) -> tuple[list[Entry], int]:
        """The next records, and how many offsets of no record follow them; 0 where more records do, or it is over."""
        found: list[Entry] = []
        size, at = 0, self.at
        while self._next is not None and self._next.offset == at and len(found) < _AT_ONCE and size < _AT_ONCE_BYTES:
            found.append(self._next)
            size += len(self._next.value or b"")
            at += 1
            self._next = next(self._entries, None)
        following = self._end if self._next is None else self._next.offset
        return found, following - at


class _Filling:
    """Writes records and what lies between them, and checks the offset of each."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._kafka = kafka
        self._plain = clients.producer(kafka)
        self._transactional: Producer = clients.transactional_producer(kafka, transactional_id(run, "restore"))
        self._watching: Consumer = clients.reader(kafka, isolation="read_uncommitted")
        self._wrong: list[str] = []
        self._prefixes: dict[Place, int] = {}
        self._call(lambda: self._transactional.init_transactions(_TIMEOUT_S))

    def close(self) -> None:
        """Leave the broker."""
        self._watching.close()

    def round(self, cursors: list[_Cursor]) -> int:
        """The next records of each partition, and the gaps after them; returns how many records.

        A gap of one is the end of the transaction that the record before it is in. A longer one is an aborted
        transaction: records no reader sees, and its end.
        """
        committed: list[tuple[_Cursor, list[Entry]]] = []
        aborted: list[tuple[_Cursor, int]] = []
        count = 0
        for cursor in cursors:
            if cursor.at < cursor.prefix:
                self._fill(cursor)
                continue
            entries, gap = cursor.take()
            count += len(entries)
            inside = 0 if gap != 1 else len(entries) if len(entries) <= _WHOLE_IN_TRANSACTION else 1
            before = entries[: len(entries) - inside]
            if before:
                self._settled(cursor)
            for entry in before:
                self._send(self._plain, cursor, entry)
            if gap == 1:
                committed.append((cursor, entries[len(entries) - inside :]))
            elif gap > 1:
                aborted.append((cursor, gap))
        if committed or aborted:
            # What comes next is another producer's, and must come after.
            self._flush(self._plain)
        if committed:
            self._call(self._transactional.begin_transaction)
            for cursor, entries in committed:
                for entry in entries:
                    self._send(self._transactional, cursor, entry)
            self._flush(self._transactional)
            self._call(lambda: self._transactional.commit_transaction(_TIMEOUT_S))
            self._ended([cursor for cursor, _entries in committed])
        if aborted:
            self._call(self._transactional.begin_transaction)
            for cursor, gap in aborted:
                for _ in range(gap - 1):
                    self._send(self._transactional, cursor, None)
            self._flush(self._transactional)
            self._call(lambda: self._transactional.abort_transaction(_TIMEOUT_S))
            self._ended([cursor for cursor, _gap in aborted])
        return count

    def _fill(self, cursor: _Cursor) -> None:
        """Up to where the topic began: records that are deleted in the end."""
        self._prefixes[cursor.topic, cursor.partition] = cursor.prefix
        while cursor.at < cursor.prefix:
            self._send(self._plain, cursor, None)
        self._flush(self._plain)

    def finish(self) -> None:
        """Wait for what was sent, and delete what was never archived, as it was deleted before."""
        self._flush(self._plain)
        if not self._prefixes:
            return
        client: AdminClient = clients.admin(self._kafka)
        places = [TopicPartition(topic, partition, to) for (topic, partition), to in self._prefixes.items()]
        for place, future in client.delete_records(places, request_timeout=_TIMEOUT_S).items():
            self._call(partial(future.result, _TIMEOUT_S), f"deleting records of {place.topic} below {place.offset}")

    def _send(self, producer: Producer, cursor: _Cursor, entry: Entry | None) -> None:
        expected, cursor.at = cursor.at, cursor.at + 1

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._wrong.append(f"{cursor.topic}[{cursor.partition}] offset {expected}: {error.str()}")
            elif message.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME:
                self._wrong.append(f"{cursor.topic} stamps records instead of taking their times")
            elif message.offset() != expected:
                self._wrong.append(
                    f"{cursor.topic}[{cursor.partition}] took the record of offset {expected} at {message.offset()}"
                )

        more: dict[str, Any] = {"partition": cursor.partition, "on_delivery": delivered}
        if entry is not None:
            # Of what could not be read when it was archived nothing is known; 0 would be now.
            more["timestamp"] = max(entry.timestamp_ms, 1)
            more["headers"] = None if entry.headers is None else list(entry.headers)
        value, key = (_FILLER, None) if entry is None else (entry.value, entry.key)
        try:
            clients.produce(producer, cursor.topic, value, key, **more)
        except KafkaException as error:
            raise BrokerUnavailable(f"{cursor.topic}[{cursor.partition}]: {error.args[0].str()}") from error

    def _flush(self, producer: Producer) -> None:
        left = producer.flush(_TIMEOUT_S)
        if left and not self._wrong:
            raise BrokerUnavailable(f"{left} records were not delivered within {_TIMEOUT_S:g} s")
        if self._wrong:
            raise StateRefused(
                f"{self._wrong[0]}; something else writes there, or a record was refused: delete the topics and "
                f"restore again"
            )

    def _ended(self, cursors: list[_Cursor]) -> None:
        for cursor in cursors:
            cursor.at += 1
            cursor.ends_transaction = True

    def _settled(self, cursor: _Cursor) -> None:
        """Wait until the end of the last transaction is written: the answer to its commit may come before that.

        The transactional producer itself is made to wait by the broker; another is not.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        place = TopicPartition(cursor.topic, cursor.partition)
        while cursor.ends_transaction:
            ask = partial(self._watching.get_watermark_offsets, place, 10.0)
            end: int = clients.retrying(ask, f"asking where {cursor.topic} ends")[1]
            cursor.ends_transaction = end < cursor.at
            if cursor.ends_transaction and time.monotonic() > deadline:
                raise StateRefused(f"{cursor.topic}[{cursor.partition}] ends at {end}, {cursor.at} was expected")

    def _call(self, call: Callable[[], object], doing: str = "restoring") -> None:
        try:
            call()
        except KafkaException as error:
            raise BrokerUnavailable(f"{doing}: {error.args[0].str()}; delete the topics and restore again") from error

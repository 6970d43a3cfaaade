"""The topic `calls` as a gateway uses it: appends that wait for the brokers, and the fold of all records.

A gateway reads its own writes and the other gateways' writes: `current` returns once the fold holds every record that
was on a partition when it was called. Threads read, write and query ends; only the event loop changes the fold.
"""

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from rollstream.producers.flow.start_progress import report_growth
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions, group_of, partition_of_group
from rollstream.producers.record_sender import limit_bytes_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, DeliveryError, RecordError, RecordTooLarge
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import BEGINNING, UNREADABLE, KafkaRecord
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Delivery, Failure
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key

V = TypeVar("V")
CallRecord = ModelCall | SessionEvent
_POLL_S = 0.1
_CLOSE_S = 10.0
_ALONE_AFTER_MS = 60_000
"""Time without a record of another process after which this gateway counts as alone."""
_SWITCH_AGAIN_S = 10.0
"""Time until a gateway that could not change its client settings, because no broker answered, tries again."""
_SELDOM: dict[str, Any] = {"fetch.min.bytes": 1_000_000, "fetch.wait.max.ms": 100}
"""Client settings of a gateway that is alone. It reads only its own records, which it has already applied, and a fetch
for each of them would compete with the acknowledgements that its callers wait for. With these settings it sees another
gateway's first record up to `fetch.wait.max.ms` later."""


class AppendedRecord(NamedTuple):
    """Place and append time of a record that the brokers have."""

    partition: int
    offset: int
    """Its offset, or a later offset on the partition if the brokers did not report it."""
    append_ms: int


class _Read(NamedTuple):
    partition: int
    offset: int
    append_ms: int
    record: CallRecord | None
    """None if the record could not be read."""


class CallWriter:
    """Appends records to `calls` and waits until the brokers have them. Use it in one event loop."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Raises BrokerUnavailable or TopicError if there is no topic to write to."""
        self._kafka = kafka
        self.topic = topic_name(run, "calls")
        self.partitions = topic_admin.partitions_of(kafka, self.topic)
        self._limit = limit_bytes_of(kafka)
        # A record is not delayed to fill a request, because a caller waits for it.
        self._sender = RecoveringSender(
            kafka, remedy="send the request again", on_failure=self._failed, **{"linger.ms": "0"}
        )
        self._waiting: dict[str, asyncio.Future[Delivery]] = {}
        self._names = itertools.count()
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._poll, name="call-writer", daemon=True)
        self._thread.start()

    def partition_of(self, session: str) -> int:
        """Return the partition of a session. Raises RecordError if the name is invalid."""
        return partition_of_group(group_of(session), self.partitions)

    async def append(
        self, record: CallRecord, on_append: Callable[[AppendedRecord], None] | None = None
    ) -> AppendedRecord:
        """Append a record. `on_append` is called in the event loop, in the order of a partition's records, but not for
        a record whose offset the brokers did not report.

        Raises RecordTooLarge, DeadlineExceeded or DeliveryError if the record may be missing from the log. Raises
        BrokerUnavailable if the offset was not reported and the end of the partition cannot be queried.
        """
        key, value = encode_key(record.session), codec.encode(record)
        if len(key) + len(value) > self._limit:
            raise RecordTooLarge(
                f"a record of session {record.session} has {len(value)} bytes, but {self.topic} accepts {self._limit}; "
                "raise kafka.max_record_bytes and run `rollstream topics apply`"
            )
        name = f"record {next(self._names)} of session {record.session}"
        delivered: asyncio.Future[Delivery] = self._loop.create_future()
        self._waiting[name] = delivered

        def appended(delivery: Delivery) -> None:
            if on_append is not None and delivery.known_offset is not None:
                on_append(AppendedRecord(delivery.partition, delivery.offset, delivery.timestamp_ms))
            _resolve(delivered, delivery)

        def on_delivery(delivery: Delivery) -> None:
            self._loop.call_soon_threadsafe(appended, delivery)

        partition = self.partition_of(record.session)
        try:
            self._sender.send(
                self.topic, value, key, partition=partition, name=name, timeout_s=_POLL_S, on_delivery=on_delivery
            )
            delivery = await delivered
        finally:
            del self._waiting[name]
        offset = delivery.known_offset
        if offset is None:
            # Brokers may omit the offset of a record that they received twice; the offset is below the end.
            ends = await asyncio.to_thread(topic_admin.bounds, self._kafka, self.topic, [partition])
            offset = ends[partition][1] - 1
        return AppendedRecord(partition, offset, delivery.timestamp_ms)

    def _failed(self, failure: Failure) -> None:
        self._fail(failure.name, DeliveryError(str(failure)))

    def _fail(self, name: str, error: DeliveryError) -> None:
        def fail() -> None:
            waiting = self._waiting.get(name)
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)

        self._loop.call_soon_threadsafe(fail)

    def _poll(self) -> None:
        while not self._stop.is_set():
            self._sender.poll(_POLL_S)

    async def close(self) -> None:
        """Wait for records in flight, at most 10 s, and stop the thread."""
        await asyncio.to_thread(self._sender.waiting, _CLOSE_S)
        self._stop.set()
        await asyncio.to_thread(self._thread.join)


class CallLog:
    """Follows `calls` and writes to it; use `start` and `close` in one event loop."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        author: str,
        remembered_sessions: int,
        on_read: Callable[[CapturedSession], None],
        shared: bool = True,
    ) -> None:
        """`author` is the name of the gateway. The newest `remembered_sessions` finished sessions of each partition are
        remembered. `on_read` is called in the event loop with the session of each record that was read. Without
        `shared`, no other gateway serves this one's sessions."""
        self._kafka, self._author, self._shared = kafka, author, shared
        self._others_ms = 0
        self._writer = CallWriter(kafka, run)
        self.topic = self._writer.topic
        self.folds = [PartitionSessions(keep_finished=remembered_sessions) for _ in range(self._writer.partitions)]
        """Sessions of each partition."""
        self.skipped = SkippedRecords("gateway")
        """Records that could not be read."""
        self.error: Exception | None = None
        """The error that ended reading, if any."""
        self.failed = asyncio.Event()
        self._on_read = on_read
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="call-log", daemon=True)
        self._waiting: list[list[tuple[int, int, asyncio.Future[None]]]] = [[] for _ in self.folds]
        self._order = itertools.count()
        self._probes: dict[int, asyncio.Future[int]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._probe_thread = ThreadPoolExecutor(1, thread_name_prefix="call-ends")
        self._ends = Reader(kafka, doing="asking for ends")

    async def start(self, on_progress: Callable[[str], object] = lambda _progress: None) -> None:
        """Read the topic to its current end; `on_progress` receives the progress every few seconds. Raises as `current`
        does."""
        self._thread.start()
        reporting = asyncio.ensure_future(
            report_growth(lambda: sum(fold.position for fold in self.folds), self.topic, on_progress)
        )
        try:
            await asyncio.gather(*map(self.current, range(len(self.folds))))
        finally:
            reporting.cancel()

    def partition_of(self, session: str) -> int:
        """Return the partition of a session. Raises RecordError if the name is invalid."""
        return self._writer.partition_of(session)

    async def append(self, record: CallRecord) -> None:
        """Append a record; return once the fold has it. Raises as `CallWriter.append` and `current` do."""

        def appended(place: AppendedRecord) -> None:
            if place.offset == self.folds[place.partition].position:
                self._take(place.partition, place.offset, place.append_ms, record)
                self._wake(place.partition)

        place = await self._writer.append(record, appended)
        await self._applied(place.partition, place.offset + 1)

    @property
    def records_skipped(self) -> int:
        """Number of records that could not be read."""
        return self.skipped.total

    async def latest(self, session: str) -> None:
        """Bring a session up to date for its next call. Raises as `current` does."""
        if self._shared and not self.alone:
            await self.current(self.partition_of(session))

    @property
    def alone(self) -> bool:
        """Whether no other process has written lately, so that this one knows all sessions without asking."""
        return time.time() * 1000 - self._others_ms > _ALONE_AFTER_MS

    async def current(self, partition: int) -> PartitionSessions:
        """Return the fold of a partition with everything that is on the log now.

        Raises BrokerUnavailable or TopicError if the log cannot be read.
        """
        await self._applied(partition, await self._end_of(partition))
        return self.folds[partition]

    async def _applied(self, partition: int, end: int) -> None:
        """Wait until the fold holds all records of a partition below an offset."""
        if self.error is not None:
            raise self.error
        if self.folds[partition].position < end:
            reached: asyncio.Future[None] = self._loop.create_future()
            heapq.heappush(self._waiting[partition], (end, next(self._order), reached))
            await reached

    async def close(self) -> None:
        """Stop reading, and wait for records in flight."""
        self._stop.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._probe_thread.shutdown(wait=True)
        self._ends.close()
        await self._writer.close()

    async def _end_of(self, partition: int) -> int:
        """Return the end of a partition, as reported by a broker after this call."""
        end = self._probes.get(partition)
        if end is None:
            end = self._probes[partition] = self._loop.create_future()
        if self._probing is None:
            self._probing = asyncio.ensure_future(self._probe())
        return await asyncio.shield(end)

    async def _probe(self) -> None:
        try:
            while self._probes:
                wanted, self._probes = self._probes, {}
                try:
                    ends = await self._loop.run_in_executor(
                        self._probe_thread, self._ends.bounds, self.topic, [*wanted]
                    )
                except Exception as error:  # the waiting callers raise it
                    for waiting in wanted.values():
                        waiting.set_exception(error)
                else:
                    for partition, waiting in wanted.items():
                        waiting.set_result(ends[partition][1])
        finally:
            self._probing = None

    def _follow(self) -> None:
        """Follow the topic until this gateway closes, with the client settings for `self.alone`."""
        try:
            with ExitStack() as stack:
                alone = self.alone
                follower = stack.enter_context(self._follower(alone=alone))
                switch_at_s = 0.0
                while not self._stop.is_set():
                    if self.alone != alone and time.monotonic() >= switch_at_s:
                        try:
                            other = self._follower(alone=not alone)
                        except BrokerUnavailable:
                            # The present follower goes on when the brokers are back.
                            switch_at_s = time.monotonic() + _SWITCH_AGAIN_S
                        else:
                            stack.close()
                            follower, alone = stack.enter_context(other), not alone
                    self._read(follower)
        except Exception as error:  # `_applied` raises it in the event loop
            self._loop.call_soon_threadsafe(self._fail, error)

    def _follower(self, *, alone: bool) -> TopicFollower:
        """Return a follower from the fold's position on. Raises BrokerUnavailable or TopicError."""
        start = {(self.topic, p): fold.position or BEGINNING for p, fold in enumerate(self.folds)}
        return TopicFollower(self._kafka, start, **(_SELDOM if alone else {}))

    def _read(self, follower: TopicFollower) -> None:
        messages = follower.poll(500, _POLL_S)
        ends = {partition: end for (_topic, partition), end in follower.ends.items()}
        # Most messages are this gateway's own and already applied.
        new = [self._decode(m) for m in messages if m.offset >= self.folds[m.partition].position]
        self._loop.call_soon_threadsafe(self._apply, new, ends)

    def _decode(self, message: KafkaRecord) -> _Read:
        record = None
        with self.skipped.passing(message):
            if message.value is None:
                raise RecordError("a tombstone instead of a record" if message.readable else UNREADABLE)
            decoded = codec.decode(message.value)
            if not isinstance(decoded, CallRecord):
                raise RecordError(f"a {type(decoded).__name__} instead of a call or session event")
            # A gateway could not end a session that is elsewhere, because its own records go to the right partition.
            if (partition := self._writer.partition_of(decoded.session)) != message.partition:
                raise RecordError(f"a record of session {decoded.session[:64]}, which belongs to partition {partition}")
            record = decoded
        return _Read(message.partition, message.offset, message.timestamp_ms, record)

    def _apply(self, messages: list[_Read], ends: dict[int, int]) -> None:
        for partition, offset, append_ms, record in messages:
            if offset >= self.folds[partition].position:
                self._take(partition, offset, append_ms, record)
        for partition, end in ends.items():
            self.folds[partition].position = max(end, self.folds[partition].position)
        for partition in range(len(self.folds)):
            self._wake(partition)

    def _take(self, partition: int, offset: int, append_ms: int, record: CallRecord | None) -> None:
        """Apply the next record of a partition."""
        fold = self.folds[partition]
        fold.position = offset + 1
        session = None if record is None else fold.apply(offset, append_ms, record)
        if session is None or record is None:
            return
        if record.author != self._author:
            self._others_ms = max(append_ms, self._others_ms)
        self._on_read(session)

    def _wake(self, partition: int) -> None:
        """Wake the callers that wait for a position of a partition."""
        waiting = self._waiting[partition]
        while waiting and waiting[0][0] <= self.folds[partition].position:
            _resolve(heapq.heappop(waiting)[2], None)

    def _fail(self, error: Exception) -> None:
        self.error = error
        self.failed.set()
        for waiting in self._waiting:
            for _end, _number, reached in waiting:
                if not reached.done():
                    reached.set_exception(error)
            waiting.clear()


def _resolve(future: "asyncio.Future[V]", value: V) -> None:
    if not future.done():
        future.set_result(value)

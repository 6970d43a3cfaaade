"""A producer with the methods of confluent_kafka.Producer that our code calls, over the model of a cluster.

It behaves like librdkafka: writes are idempotent, calls for transactions may time out and be repeated, nothing works
after a fatal error, and records that are queued but not sent are gone with the process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, KafkaError, KafkaException, TopicPartition

from rollstream.topics.kafka.records import size_of
from rollstream.topics.wire.keys import partition_of
from tests.simulation.cluster import Cluster, Link, TimedOut
from tests.simulation.group_coordinator import Committed, MemberMetadata
from tests.simulation.model_admin import Metadata, metadata_of
from tests.simulation.partition_log import Headers, Refusal
from tests.simulation.scheduler import Hanging
from tests.simulation.transaction_coordinator import Place

Report = Callable[[KafkaError | None, Any], None]
_CONCURRENT_S = 0.02
_SENT_WITHIN_S = 0.5
_MEMBERSHIP = (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID)


@dataclass(frozen=True)
class Delivered:
    """A message of a delivery report."""

    place: Place
    at: int
    timestamp_ms: int
    stamp: int = TIMESTAMP_NOT_AVAILABLE

    def partition(self) -> int:
        return self.place[1]

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return self.stamp, self.timestamp_ms


@dataclass(frozen=True)
class _Queued:
    place: Place
    key: bytes | None
    value: bytes | None
    headers: Headers
    report: Report | None
    since_s: float
    created_ms: int


class ModelProducer:
    """An idempotent producer, transactional if its settings say so."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, Any]) -> None:
        self._cluster, self._scheduler, self._link = cluster, cluster.scheduler, Link(cluster)
        self._identity = str(settings.get("transactional.id", ""))
        self._timeout_s = float(settings.get("transaction.timeout.ms", 60_000)) / 1000
        self._most_bytes = int(settings.get("message.max.bytes", 1_000_000))
        self._delivery_s = float(settings.get("delivery.timeout.ms", 120_000)) / 1000
        self._linger_s = float(settings.get("linger.ms", 5)) / 1000
        self._most_queued = int(settings.get("queue.buffering.max.messages", 100_000))
        self._queue: list[_Queued] = []
        cluster.producers += 1
        self._producer = (-cluster.producers, 0)
        self._sequences: dict[Place, int] = {}
        self._added: set[Place | str] = set()
        self._fatal: KafkaError | None = None
        self._error: KafkaError | None = None
        """Why the transaction must be aborted."""
        self._unanswered: set[Place] = set()
        """Partitions to which records were sent that nobody acknowledged yet."""
        self._doubtful = False
        """Whether a record that timed out may be in the log: the producer's epoch is raised at the abort (KIP-360)."""

    def __len__(self) -> int:
        return len(self._queue)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Metadata:
        return metadata_of(self._cluster, topic)

    # ------------------------------------------------------------------ records

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        on_delivery: Report | None = None,
        timestamp: int = 0,
        headers: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    ) -> None:
        self._link.check()
        self._raise_fatal()
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers or ())
        encoded = [(name, each.encode() if isinstance(each, str) else each) for name, each in pairs]
        place = topic, self._partition(topic, key) if partition < 0 else partition
        if size_of(key, value, tuple(encoded)) > self._most_bytes:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        if len(self._queue) >= self._most_queued:
            raise BufferError("Local: Queue full")
        created_ms = timestamp or self._cluster.now_ms
        self._queue.append(_Queued(place, key, value, encoded, on_delivery, self._scheduler.now_s, created_ms))

    def _partition(self, topic: str, key: bytes | None) -> int:
        partitions = len(self._cluster.topics.get(topic, [None]))
        return self._scheduler.rng.randrange(partitions) if key is None else partition_of(key, partitions)

    def purge(self) -> None:
        self._fail(list(self._queue), KafkaError(KafkaError._PURGE_QUEUE))

    def poll(self, timeout: float = 0) -> int:
        self._link.check()
        lingers_s = self._queue[0].since_s + self._linger_s - self._scheduler.now_s if self._queue else 0.0
        if self._linger_s > _SENT_WITHIN_S and lingers_s > max(0.0, timeout):
            self._scheduler.sleep(max(0.0, timeout))
            return 0
        # The client sends on threads of its own: now or soon, and whenever the caller waits.
        if timeout > 0:
            self._send_all(self._until(timeout))
        elif self._queue:
            waited_s = self._scheduler.now_s - self._queue[0].since_s
            if waited_s > _SENT_WITHIN_S or self._scheduler.rng.random() < (0.1 if self._identity else 0.5):
                self._send_all(self._scheduler.now_s)
        return 0

    def flush(self, timeout: float = -1) -> int:
        self._link.check()
        self._send_all(self._until(timeout))
        return len(self._queue)

    def _send_all(self, deadline_s: float) -> None:
        """Send what is queued, all records of a partition together, in any order of partitions."""
        while self._queue and self._fatal is None:
            places = list(dict.fromkeys(queued.place for queued in self._queue))
            place = self._scheduler.rng.choice(places)
            batch = [queued for queued in self._queue if queued.place == place]
            try:
                self._send_batch(place, batch, deadline_s)
            except TimedOut:
                expired = [q for q in self._queue if q.since_s + self._delivery_s <= self._scheduler.now_s]
                if expired:
                    self._doubtful = True
                    self._fail(expired, KafkaError(KafkaError._MSG_TIMED_OUT))
                return

    def _send_batch(self, place: Place, batch: list[_Queued], deadline_s: float) -> None:
        first = self._sequences.get(place, 0)
        transactional = bool(self._identity)
        producer = self._producer

        def append() -> list[int]:
            return [
                self._cluster.append(
                    place,
                    q.key,
                    q.value,
                    q.headers,
                    producer,
                    first + at,
                    transactional=transactional,
                    created_ms=q.created_ms,
                )
                for at, q in enumerate(batch)
            ]

        if place[0] not in self._cluster.topics or place[1] >= len(self._cluster.topics[place[0]]):
            missing = KafkaError._UNKNOWN_PARTITION if place[0] in self._cluster.topics else KafkaError._UNKNOWN_TOPIC
            self._fail(batch, KafkaError(missing))
            return
        try:
            if transactional:
                self._add(place, deadline_s)
            self._unanswered.add(place)
            offsets = self._link.request(append, deadline_s)
        except Refusal as refusal:
            self._unanswered.discard(place)
            self._fail(batch, self._refused(refusal))
            return
        self._unanswered.discard(place)
        self._sequences[place] = first + len(batch)
        sent = set(map(id, batch))
        self._queue = [queued for queued in self._queue if id(queued) not in sent]
        for queued, offset in zip(batch, offsets, strict=True):
            if queued.report is not None:
                stamp_ms = self._cluster.log(place).entries[offset].timestamp_ms
                queued.report(None, Delivered(place, offset, stamp_ms, self._cluster.stamp(place[0])))

    def _fail(self, batch: Sequence[_Queued], error: KafkaError) -> None:
        self._error = self._error or error
        failed = set(map(id, batch))
        self._queue = [queued for queued in self._queue if id(queued) not in failed]
        for queued in batch:
            if queued.report is not None:
                queued.report(error, Delivered(queued.place, -1001, -1))

    # ------------------------------------------------------------------ transactions

    def init_transactions(self, timeout: float = -1) -> None:
        self._link.check()
        deadline_s = self._until(timeout)

        def initialise() -> tuple[int, int]:
            return self._cluster.transactions.initialise(self._identity, self._timeout_s)

        self._producer = self._ask(initialise, deadline_s)
        self._sequences.clear()
        self._unanswered.clear()

    def begin_transaction(self) -> None:
        self._link.check()
        self._raise_fatal()
        self._added, self._error = set(), None

    def send_offsets_to_transaction(
        self, positions: Sequence[TopicPartition], member: MemberMetadata, timeout: float = -1
    ) -> None:
        self._link.check()
        self._raise_fatal()
        self._raise_error()
        self._hang()
        deadline_s = self._until(timeout)
        offsets = {
            (place.topic, place.partition): Committed(place.offset, place.metadata or "", place.leader_epoch or -1)
            for place in positions
        }
        producer, group = self._producer, self._cluster.groups[member.group]

        def commit() -> None:
            self._cluster.transactions.check_open(producer, member.group)
            group.commit_pending(producer[0], member, offsets)

        try:
            self._add(member.group, deadline_s)
            self._link.request(commit, deadline_s)
        except TimedOut:
            raise _timed_out() from None
        except Refusal as refusal:
            self._error = self._refused(refusal)
            raise KafkaException(self._fatal or self._error) from refusal

    def commit_transaction(self, timeout: float = -1) -> None:
        self._link.check()
        self._raise_fatal()
        deadline_s = self._until(timeout)
        self._send_all(deadline_s)
        self._raise_fatal()
        self._raise_error()
        if self._queue:
            raise _timed_out()
        self._hang()
        self._end(True, deadline_s)
        self._hang()

    def abort_transaction(self, timeout: float = -1) -> None:
        self._link.check()
        self._raise_fatal()
        deadline_s = self._until(timeout)
        self._queue.clear()
        # Records that were sent and then given up may be in the log, under the numbers that the next ones would get.
        self._doubtful = self._doubtful or bool(self._unanswered)
        self._unanswered.clear()
        self._end(False, deadline_s)
        if self._doubtful:
            producer = self._producer
            self._producer = self._ask(lambda: self._cluster.transactions.bump(producer), deadline_s)
            self._sequences.clear()
            self._doubtful = False

    def _end(self, commit: bool, deadline_s: float) -> None:
        if not self._added:
            return
        producer = self._producer
        self._ask(lambda: self._cluster.transactions.end(producer, commit), deadline_s)
        self._added = set()

    def _hang(self) -> None:
        """Never return, by chance at one of the calls after the process was chosen for that."""
        if self._link.process.hanging and self._scheduler.rng.random() < 0.5:
            self._link.process.hanging = False
            raise Hanging

    def _add(self, target: Place | str, deadline_s: float) -> None:
        if target in self._added:
            return
        place, group = (None, target) if isinstance(target, str) else (target, None)
        producer, transactions = self._producer, self._cluster.transactions
        while True:
            try:
                self._link.request(lambda: transactions.add(producer, self._scheduler.now_s, place, group), deadline_s)
                break
            except Refusal as refusal:
                if refusal.code != KafkaError.CONCURRENT_TRANSACTIONS:
                    raise
                self._rest(deadline_s)
        self._added.add(target)

    def _ask(self, apply: Callable[[], Any], deadline_s: float) -> Any:
        """Return a coordinator's answer; waits while an earlier transaction is being completed."""
        while True:
            try:
                return self._link.request(apply, deadline_s)
            except TimedOut:
                raise _timed_out() from None
            except Refusal as refusal:
                if refusal.code != KafkaError.CONCURRENT_TRANSACTIONS:
                    raise KafkaException(self._refused(refusal)) from refusal
            try:
                self._rest(deadline_s)
            except TimedOut:
                raise _timed_out() from None

    def _rest(self, deadline_s: float) -> None:
        if self._scheduler.now_s >= deadline_s:
            raise TimedOut
        self._scheduler.sleep(_CONCURRENT_S)

    def _refused(self, refusal: Refusal) -> KafkaError:
        """Return the client's view of a refusal: fatal, or a reason to abort."""
        if refusal.code == KafkaError.PRODUCER_FENCED:
            self._fatal = KafkaError(KafkaError._FENCED, "fenced by newer instance", fatal=True)
        elif refusal.code == KafkaError.INVALID_TXN_STATE:
            self._fatal = KafkaError(refusal.code, fatal=True)
        return self._fatal or KafkaError(refusal.code, txn_requires_abort=True)

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise KafkaException(KafkaError(self._error.code(), txn_requires_abort=True))

    def _until(self, timeout: float) -> float:
        return self._scheduler.now_s + timeout if timeout >= 0 else float("inf")


def _timed_out() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))

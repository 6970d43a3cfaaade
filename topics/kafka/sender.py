"""Sends records: `send` waits for room in the queue, and errors name the record, its topic and the reason."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message, Producer

from rollstream.topics.closing import Closing
from rollstream.topics.errors import DeadlineExceeded, DeliveryError
from rollstream.topics.kafka.client_calls import fatal_error, refusal
from rollstream.topics.kafka.clients import user_of

_LOOK_EVERY_S = 0.1
_FLUSH_AFTER_ERROR_S = 5.0
HeadersToSend = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]


class Delivery(NamedTuple):
    """A record that the broker has acknowledged."""

    topic: str
    partition: int
    known_offset: int | None
    """None if the broker acknowledged the record without its offset, which may happen if the record was sent twice."""
    timestamp_ms: int
    stamped: bool
    """Whether the timestamp is the broker's append time."""

    @property
    def offset(self) -> int:
        """Offset of the record. Raises DeliveryError if it is not known."""
        if self.known_offset is None:
            raise DeliveryError(
                f"{self.topic}[{self.partition}] acknowledged a record without its offset; run this again"
            )
        return self.known_offset


class SendOptions(TypedDict, total=False):
    """Optional arguments of `Sender.send` that every sender of records accepts."""

    partition: int
    headers: HeadersToSend | None
    timestamp_ms: int
    on_delivery: Callable[[Delivery], None] | None


class Failure(NamedTuple):
    """A record that was not delivered."""

    name: str
    topic: str
    partition: int
    """Negative if no partition was chosen yet."""
    size_bytes: int
    """Bytes of key and value."""
    error: KafkaError
    user: str = ""
    """User of the client, if it is known."""

    @property
    def refusal(self) -> str | None:
        """The missing permission, the user who lacks it, and the remedy; None for any other error."""
        return refusal(self.error, self.user, self.topic)

    @property
    def too_large(self) -> bool:
        """Whether the record exceeds the limit of the client or of the brokers, so that sending it again is useless."""
        return self.error.code() == KafkaError.MSG_SIZE_TOO_LARGE

    @property
    def reason(self) -> str:
        """Text of the client's error, or of the missing permission."""
        return self.refusal or self.error.str()

    def __str__(self) -> str:
        partition = f"[{self.partition}]" if self.partition >= 0 else ""
        return f"{self.name} was not delivered to {self.topic}{partition} ({self.size_bytes} bytes): {self.reason}"


class SendFailed(DeliveryError):
    """A record was not sent or not delivered."""

    def __init__(self, failures: Sequence[Failure], remedy: str) -> None:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        # The text of a missing permission contains its own remedy; sending again without the permission would fail.
        super().__init__(f"{failures[0]}{more}" if failures[0].refusal else f"{failures[0]}{more}; {remedy}")
        self.failure, self.failures = failures[0], tuple(failures)


class Sender(Closing):
    """Sends records through one producer, whose queue bounds the undelivered records."""

    def __init__(
        self,
        producer: Producer,
        *,
        remedy: str = "run this again",
        on_failure: Callable[[Failure], None] | None = None,
        transactional: bool = False,
    ) -> None:
        """`producer` comes from `clients`; `remedy` ends error messages. If `on_failure` is given, `send`, `poll` and
        `flush` call it for each record that was not delivered, instead of raising SendFailed.

        After a fatal error of the client, for example because its user may not write to any topic, every record fails
        with that error. If `transactional`, the transaction handles the client's exceptions.
        """
        self._producer = producer
        self._transactional = transactional
        self._fatal: KafkaError | None = None
        self._acknowledged = False
        self._user = user_of(producer)
        self._remedy = remedy
        self._topics: set[str] = set()
        self._failures: list[Failure] = []
        self._on_failure = on_failure or self._failures.append

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        partition: int = -1,
        headers: HeadersToSend | None = None,
        timestamp_ms: int = 0,
        name: str = "a record",
        timeout_s: float | None = None,
        on_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        """Queue a record; waits for room if the queue is full. `on_delivery` is called once the record is delivered.

        The wait is finite: a record that cannot be delivered leaves the queue after delivery.timeout.ms. `name` stands
        for the record in errors. Raises SendFailed, also for an earlier record if the queue is full, and
        DeadlineExceeded if there is no room within `timeout_s`.
        """

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                at = message.partition()
                place = partition if at is None else at
                self._on_failure(Failure(name, topic, place, _size(key, value), self._cause(error), self._user))
                return
            self._acknowledge()
            if on_delivery is not None:
                kind, timestamp_ms = message.timestamp()
                stamped = kind == TIMESTAMP_LOG_APPEND_TIME
                written_to = message.partition()
                assert written_to is not None, "a delivered record has a partition"
                on_delivery(Delivery(topic, written_to, message.offset(), timestamp_ms, stamped))

        self._topics.add(topic)
        more: dict[str, Any] = {}
        if headers is not None:
            more["headers"] = dict(headers) if isinstance(headers, Mapping) else list(headers)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        looked = False
        while True:
            try:
                self._enqueue(topic, value, key, partition, on_delivery=report, timestamp=timestamp_ms, **more)
                break
            except BufferError:
                left_s = _LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
                # Records leave the queue only when their reports are processed.
                if left_s <= 0 and looked:
                    raise DeadlineExceeded(
                        f"{name} was not sent: the producer's queue stayed full for {timeout_s:g} s; is the broker "
                        "down or too slow?"
                    ) from None
                self.poll(max(0.0, min(_LOOK_EVERY_S, left_s)))
                looked = True
            except KafkaException as exception:
                self._await_reason(exception.args[0])
                self.check()  # If an earlier record failed, its error is the cause of this one.
                error = self._cause(exception.args[0])
                failure = Failure(name, topic, partition, _size(key, value), error, self._user)
                raise SendFailed([failure], self._remedy) from exception
        self._serve("poll", 0)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Process delivery reports. Raises SendFailed if a record was not delivered."""
        self._serve("poll", timeout_s)
        self.check()

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until all records are delivered.

        Raises SendFailed if a record was not delivered, DeadlineExceeded if records are still unacknowledged after
        `timeout_s`; they stay queued.
        """
        waiting = self.waiting(timeout_s)
        self.check()
        if waiting:
            raise DeadlineExceeded(
                f"{waiting} records to {', '.join(sorted(self._topics))} are still unacknowledged after "
                f"{timeout_s:g} s; check that the broker is up; {self._remedy}"
            )

    def waiting(self, timeout_s: float = 0.0) -> int:
        """Number of records that are unacknowledged after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        # A user who may not write anything is refused before the first acknowledgement. The client's `flush` confuses
        # that error with the delivery reports after it; its `poll` does not.
        while not (self._acknowledged or self._transactional) and len(self._producer):
            self._purge_after_fatal()
            self._serve("poll", max(0.0, min(_LOOK_EVERY_S, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                return len(self._producer)
        self._purge_after_fatal()
        return self._serve("flush", max(0.0, deadline - time.monotonic()))

    def _await_reason(self, error: KafkaError) -> None:
        """Process delivery reports; after a fatal error, wait for the event that gives its cause."""
        deadline = time.monotonic() + _FLUSH_AFTER_ERROR_S
        self._serve("poll", 0)
        # The client refuses a record before it reports why it gave up.
        untold = error.code() == KafkaError._FATAL and not self._transactional
        while untold and self._fatal is None and time.monotonic() < deadline:
            self._serve("poll", _LOOK_EVERY_S)

    def _purge_after_fatal(self) -> None:
        """Fail the records that a fatal error leaves in the queue; the client would keep some until they time out."""
        if self._fatal is not None:
            self._producer.purge()

    def check(self) -> None:
        """Raise SendFailed if a record was not delivered since the last check."""
        if self._failures:
            failures, self._failures[:] = self._failures[:], []
            raise SendFailed(failures, self._remedy)

    def _enqueue(self, *record: Any, **options: Any) -> None:
        """Put a record into the producer's queue. Raises as the client does."""
        self._producer.produce(*record, **options)

    def _acknowledge(self) -> None:
        """Note that a broker acknowledged a record."""
        self._acknowledged = True

    def _serve(self, call: Literal["poll", "flush"], timeout_s: float) -> int:
        """Call a function of the client that processes delivery reports, and note a fatal error that it raises."""
        producer = self._producer
        serve = getattr(producer, call)
        try:
            return int(serve(timeout_s))
        except (KafkaException, SystemError) as raised:
            # An error of a producer that was replaced meanwhile is not the present producer's.
            if producer is self._producer and not self._note_fatal(raised):
                raise
        return int(serve(timeout_s))  # The client raises a fatal error only once; reports may follow.

    def _cause(self, error: KafkaError) -> KafkaError:
        """Return the cause of an error with a record."""
        return self._fatal or error

    def _note_fatal(self, raised: BaseException) -> bool:
        """Note the fatal error behind an exception; return whether a fatal error has been noted."""
        if not self._transactional:
            self._fatal = self._fatal or fatal_error(raised)
        return self._fatal is not None

    def close(self) -> None:
        """Wait until all records are delivered, as `flush` does."""
        self.flush()

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            self.close()
        else:
            # The original error matters more than a failed delivery that it caused; it must not be delayed for long.
            self.waiting(_FLUSH_AFTER_ERROR_S)


def _size(key: bytes | None, value: bytes | None) -> int:
    return len(key or b"") + len(value or b"")

"""Base class of the producers: sends records to one topic, idempotently and with acks=all, each whole or not at all.

Accepted records are on the log once `flush` returns. An error names each record that is too large or was not delivered.
Memory is bounded: sending waits while the queue is full, then raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordTooLarge
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.wire import codec

_OVERHEAD_BYTES = 1024
"""Room for Kafka's batch header and framing, so that incompressible values still fit."""


@dataclass(frozen=True)
class RolloutDelivery:
    """An acknowledged record: its uid, its place in the log and, for a rollout, its environment."""

    uid: str
    partition: int
    offset: int
    """-1 if the broker acknowledged the record without its offset, as it may for a record that it received twice."""
    environment: str = ""


def limit_bytes_of(kafka: KafkaConfig) -> int:
    """Return the maximum size in bytes of a record's key and value together."""
    return kafka.max_record_bytes - _OVERHEAD_BYTES


def check_size(name: str, size: int, limit_bytes: int, topic: str, remedy: str) -> None:
    """Raise RecordTooLarge if a record whose key and value have `size` bytes does not fit into the topic."""
    if size > limit_bytes:
        raise RecordTooLarge(
            f"{name} has {size} bytes, but {topic} accepts {limit_bytes}; {remedy}, or raise kafka.max_record_bytes "
            f"(now {limit_bytes + _OVERHEAD_BYTES}) and run `rollstream topics apply`"
        )


class RecordSender:
    """Common part of the producers. Use them as context managers, or call `close`.

    Use each producer in one thread. Delivery callbacks run within `poll`, `flush` and the methods that send.
    """

    too_large: ClassVar[str]
    """Remedy in the error for a record that is too large."""
    not_delivered: ClassVar[str]
    """Remedy in the error for a record that was not delivered."""

    def __init__(self, kafka: KafkaConfig, topic: str, *, send_timeout_s: float, **overrides: Any) -> None:
        """`topic` is a full topic name. Raises BrokerUnavailable, or TopicError if there is no such topic."""
        self.topic = topic
        self.send_timeout_s = send_timeout_s
        self.limit_bytes = limit_bytes_of(kafka)
        """Maximum size in bytes of a record's key and value together."""
        topic_admin.partitions_of(kafka, topic)
        self._sender = RecoveringSender(kafka, remedy=self.not_delivered, **overrides)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Run the callbacks of delivered records. Raises DeliveryError if a record was not delivered."""
        self._sender.poll(timeout_s)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until every record sent is on the log.

        Raises DeliveryError if a record could not be delivered, DeadlineExceeded if records are still waiting after
        `timeout_s` (they stay queued).
        """
        self._sender.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Flush; a producer holds no other resources."""
        self.flush(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._sender.__exit__(kind, error, _)

    def _encoded(self, record: object) -> bytes:
        return codec.encode(record)

    def _send(
        self,
        name: str,
        key: bytes,
        record: object,
        timeout_s: float | None,
        delivered: Callable[[int, int], None] | None = None,
    ) -> None:
        """Queue a record; `delivered` is called with its partition and its offset, -1 if the broker did not report it.
        Raises the errors that the subclasses' methods document."""
        self._sender.poll()
        value = self._encoded(record)
        check_size(name, len(key) + len(value), self.limit_bytes, self.topic, self.too_large)

        limit_s = self.send_timeout_s if timeout_s is None else timeout_s

        def on_delivery(delivery: Delivery) -> None:
            if delivered is not None:
                delivered(delivery.partition, -1 if delivery.known_offset is None else delivery.known_offset)

        self._sender.send(self.topic, value, key, name=name, timeout_s=limit_s, on_delivery=on_delivery)

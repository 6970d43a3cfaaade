"""Sends records of one topic for producers of ours: idempotent, acks=all, whole or not at all.

What was accepted is on the log once `flush` returns; what is too large or not delivered is an error that names the
record. Memory is bounded: when the queue is full sending waits, then raises.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Self

from confluent_kafka import KafkaError, KafkaException, Message

from topics import clients, codec
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, DeliveryError, RecordTooLarge

RECORD_OVERHEAD_BYTES = 1024
"""Room for what Kafka adds to a record (batch header, framing), within which incompressible values still fit."""
_FLUSH_AFTER_ERROR_S = 5.0


@dataclass(frozen=True)
class Delivery:
    """What the broker has: its uid, and where it lies."""

    uid: str
    partition: int
    offset: int


class RecordSender:
    """What producers share. Use them as context managers, or call `close`. Each is meant for one thread; delivery
    callbacks run inside sending, `poll` and `flush`.
    """

    too_large: ClassVar[str]
    """How a record becomes smaller."""
    not_delivered: ClassVar[str]
    """What is to be done about one that was not delivered."""

    def __init__(self, kafka: KafkaConfig, topic: str, *, send_timeout_s: float, **overrides: Any) -> None:
        """`topic` is a full name. Raises BrokerUnavailable or TopicError where there is nothing to write to."""
        self.topic = topic
        self.send_timeout_s = send_timeout_s
        self.limit_bytes = kafka.max_record_bytes - RECORD_OVERHEAD_BYTES
        """Most bytes of a record's key and value together."""
        self._failures: list[tuple[str, str]] = []
        clients.partitions_of(kafka, topic)
        self._producer = clients.producer(kafka, **overrides)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Run the callbacks of what was delivered. Raises DeliveryError when something was not."""
        self._producer.poll(timeout_s)
        self._raise_failures()

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until everything sent is on the log.

        Raises DeliveryError when something could not be delivered, DeadlineExceeded when records are still waiting
        after `timeout_s` (they stay queued).
        """
        waiting = self._producer.flush(timeout_s)
        self._raise_failures()
        if waiting:
            raise DeadlineExceeded(
                f"{waiting} records to {self.topic} are still unacknowledged after {timeout_s:g} s; is the broker up?"
            )

    def close(self, timeout_s: float = 30.0) -> None:
        """`flush`; nothing else holds resources."""
        self.flush(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            # The error under way says more than a delivery that failed because of it, and must not wait long for it.
            self._producer.flush(_FLUSH_AFTER_ERROR_S)

    def _send(
        self,
        name: str,
        key: bytes,
        record: object,
        timeout_s: float | None,
        delivered: Callable[[int, int], None] | None = None,
    ) -> None:
        """Queue a record; `delivered` is called with its partition and offset. Raises as the senders' methods do."""
        self._producer.poll(0)
        self._raise_failures()
        value = codec.encode(record)
        size = len(key) + len(value)
        if size > self.limit_bytes:
            raise RecordTooLarge(
                f"{name} has {size} bytes and {self.topic} takes {self.limit_bytes}; {self.too_large}, or raise "
                f"kafka.max_record_bytes (now {self.limit_bytes + RECORD_OVERHEAD_BYTES}) and run `rollstream topics "
                "apply`"
            )

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failures.append((name, error.str()))
            elif delivered is not None:
                # Both are known of a message that was delivered.
                delivered(message.partition() or 0, message.offset() or 0)

        limit_s = self.send_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._producer.produce(self.topic, value, key, on_delivery=report)
                return
            except BufferError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"{name} was not sent: the producer's queue stayed full for {limit_s:g} s; is the broker up, "
                        "or slower than what is produced?"
                    ) from None
                self._producer.poll(min(0.1, max(0.0, deadline - time.monotonic())))
                self._raise_failures()
            except KafkaException as error:
                raise DeliveryError(f"{name} was not sent to {self.topic}: {error.args[0].str()}") from error

    def _raise_failures(self) -> None:
        if not self._failures:
            return
        failures, self._failures = self._failures, []
        name, cause = failures[0]
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise DeliveryError(f"{name} was not delivered to {self.topic}: {cause}{more}; {self.not_delivered}")

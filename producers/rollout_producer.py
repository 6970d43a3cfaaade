"""Writes rollouts to the log, for our worker and for anyone else's code: idempotent, acks=all, whole or not at all.

What `send` accepted is on the log once `flush` returns; what is senseless, too large or not delivered is an error that
names the rollout. Memory is bounded: when the queue is full `send` waits, then raises.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from confluent_kafka import KafkaError, KafkaException, Message

from topics import clients, codec
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeadlineExceeded, DeliveryError, RecordError, RecordTooLarge
from topics.keys import encode_key
from topics.records import GroupCancelled, Rollout
from topics.validation import cancellation_problems, problems

RECORD_OVERHEAD_BYTES = 1024
"""Room for what Kafka adds to a record (batch header, framing), within which incompressible values still fit."""
_FLUSH_AFTER_ERROR_S = 5.0


@dataclass(frozen=True)
class Delivery:
    """A rollout the broker has: where it lies."""

    uid: str
    partition: int
    offset: int


class RolloutProducer:
    """Sends rollouts and cancellations of one run.

    Use it as a context manager, or call `close`. It is meant for one thread; delivery callbacks run inside `send`,
    `poll` and `flush`. Raises BrokerUnavailable or TopicError at once when there is nothing to write to.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        topic: Literal["rollouts", "evals"] = "rollouts",
        on_delivery: Callable[[Delivery], None] | None = None,
        send_timeout_s: float = 30.0,
        allow_filtered_sampling: bool = False,
        **overrides: Any,
    ) -> None:
        """`on_delivery` is called for each rollout the broker acknowledged; `overrides` are librdkafka keys."""
        self.topic = topic_name(run, topic)
        self.send_timeout_s = send_timeout_s
        self._trains = topic == "rollouts"
        self._allow_filtered = allow_filtered_sampling
        self._limit_bytes = kafka.max_record_bytes - RECORD_OVERHEAD_BYTES
        self._on_delivery = on_delivery
        self._failures: list[tuple[str, str]] = []
        clients.partitions_of(kafka, self.topic)
        self._producer = clients.producer(kafka, **overrides)

    def send(self, rollout: Rollout, *, timeout_s: float | None = None) -> None:
        """Queue a rollout; it is written in the background and acknowledged in `poll` or `flush`.

        Raises RecordError when it is senseless, RecordTooLarge beyond the record limit, DeadlineExceeded when the
        queue stayed full for `timeout_s` (default: send_timeout_s), DeliveryError when an earlier one was not
        delivered. In each of these cases this rollout was not sent.
        """
        wrong = problems(rollout)
        if self._trains and rollout.sampling.filtered and not self._allow_filtered:
            wrong.append(
                "it was sampled with top_p, top_k or min_p, so its logprobs are not those of the policy (sample "
                "without them, or allow_filtered_sampling here and in grouping)"
            )
        if wrong:
            raise RecordError(f"rollout {rollout.uid!r} was not sent: {'; '.join(wrong)}")

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failures.append((f"rollout {rollout.uid}", error.str()))
            elif self._on_delivery:
                # Both are known of a message that was delivered.
                self._on_delivery(Delivery(rollout.uid, message.partition() or 0, message.offset() or 0))

        key = encode_key(rollout.environment, rollout.example_id)
        self._produce(f"rollout {rollout.uid}", key, rollout, report, timeout_s)

    def cancel(self, cancelled: GroupCancelled, *, timeout_s: float | None = None) -> None:
        """Queue a cancellation: its rollouts will never come, and the group shrinks. Raises as `send` does."""
        name = f"cancellation of group {cancelled.group_id or cancelled.example_id}"
        if not self._trains:
            raise ConfigurationError(f"{name}: {self.topic} takes rollouts only; send it with topic='rollouts'")
        if wrong := cancellation_problems(cancelled):
            raise RecordError(f"{name} was not sent: {'; '.join(wrong)}")

        def report(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                self._failures.append((name, error.str()))

        self._produce(name, encode_key(cancelled.environment, cancelled.example_id), cancelled, report, timeout_s)

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

    def _produce(
        self,
        name: str,
        key: bytes,
        record: Rollout | GroupCancelled,
        report: Callable[[KafkaError | None, Message], None],
        timeout_s: float | None,
    ) -> None:
        self._producer.poll(0)
        self._raise_failures()
        value = codec.encode(record)
        size = len(key) + len(value)
        if size > self._limit_bytes:
            raise RecordTooLarge(
                f"{name} has {size} bytes and {self.topic} takes {self._limit_bytes}; shorten the episode, drop "
                f"token_arrays, or raise kafka.max_record_bytes (now {self._limit_bytes + RECORD_OVERHEAD_BYTES}) and "
                "run `rollstream topics apply`"
            )
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
        raise DeliveryError(
            f"{name} was not delivered to {self.topic}: {cause}{more}; send it again under the same uid once the cause "
            "is mended, a repeated uid is dropped"
        )

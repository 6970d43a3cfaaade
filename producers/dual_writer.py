"""During a transition: groups written a second time, in the old form, for readers that know no other.

Rollouts go to the run as always, by whoever has them; this writes the same groups as RolloutBatches, metadata on the
batch and on each rollout, to a topic of the old readers'. The two are not one transaction: old readers may lack a
group that a crash came between.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, KafkaException, Message

from producers.sending import RECORD_OVERHEAD_BYTES
from topics import clients
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, DeliveryError, RecordTooLarge
from topics.keys import encode_key
from topics.records import OldMetadata, Rollout
from topics.upcast import downcast

_FLUSH_AFTER_ERROR_S = 5.0


class DualWriter:
    """Writes groups in the old form to a topic that exists. A context manager; meant for one thread."""

    def __init__(self, kafka: KafkaConfig, topic: str) -> None:
        """`topic` is a full name. Raises TopicError when it is missing, BrokerUnavailable when nobody answers."""
        self._topic = topic
        self._limit_bytes = kafka.max_record_bytes - RECORD_OVERHEAD_BYTES
        self._failures: list[str] = []
        clients.partitions_of(kafka, topic)
        self._producer = clients.producer(kafka)

    def write(self, groups: Sequence[Sequence[Rollout]], metadata: OldMetadata | None = None) -> None:
        """Queue groups as one RolloutBatch; nothing where there is no rollout.

        Its metadata is what is given, else that of the first rollout. A weight step that a rollout does not know is
        its policy version. Raises RecordTooLarge, and DeliveryError when an earlier one was not delivered.
        """
        self.poll()
        known = [[_with_step(rollout) for rollout in group] for group in groups if group]
        if not known:
            return
        first = known[0][0]
        of = first.metadata
        own = OldMetadata(worker_id=of.worker_id, timestamp=of.timestamp, weight_step=of.weight_step)
        value = encode(downcast(known, metadata or own))
        if len(value) > self._limit_bytes:
            raise RecordTooLarge(
                f"a batch of {sum(map(len, known))} rollouts has {len(value)} bytes and {self._topic} takes "
                f"{self._limit_bytes}; write fewer groups at a time, or raise kafka.max_record_bytes"
            )
        try:
            self._producer.produce(
                self._topic, value, encode_key(first.environment, first.example_id), on_delivery=self._delivered
            )
        except (BufferError, KafkaException) as error:
            raise DeliveryError(f"a batch was not sent to {self._topic}: {error}; is the broker up?") from error

    def poll(self) -> None:
        """Serve delivery reports. Raises DeliveryError when a batch was not delivered."""
        self._producer.poll(0)
        if self._failures:
            failures, self._failures = self._failures, []
            raise DeliveryError(f"{len(failures)} batches were not delivered to {self._topic}: {failures[0]}")

    def flush(self, timeout_s: float = 30.0) -> None:
        """Wait until everything written is on the log. Raises DeliveryError, DeadlineExceeded."""
        waiting = self._producer.flush(timeout_s)
        self.poll()
        if waiting:
            raise DeadlineExceeded(
                f"{waiting} batches to {self._topic} are unacknowledged after {timeout_s:g} s; is the broker up?"
            )

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failures.append(error.str())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.flush()
        else:
            self._producer.flush(_FLUSH_AFTER_ERROR_S)


def _with_step(rollout: Rollout) -> Rollout:
    if rollout.metadata.weight_step >= 0:
        return rollout
    return replace(rollout, metadata=replace(rollout.metadata, weight_step=rollout.policy_version))

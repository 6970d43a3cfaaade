"""Writing figures to the `metrics` topic: what a component says of itself, now and then.

It never hurts the component: nothing waits, nothing is raised, and figures that cannot be written are lost, which is
logged.
"""

import logging
import time
from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException, Message

from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.keys import encode_key
from topics.logs import event
from topics.records import Metrics

logger = logging.getLogger(__name__)
_SAY_AGAIN_AFTER_S = 60.0


class MetricsWriter:
    """Writes the figures of one component of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, component: str) -> None:
        self._component = component
        self._topic = topic_name(run, "metrics")
        # One acknowledgement, no idempotence and a small queue: figures are replaced by the next ones.
        self._producer = clients.producer(
            kafka,
            **{
                "enable.idempotence": "false",
                "acks": "1",
                "linger.ms": "100",
                "queue.buffering.max.kbytes": 1024,
                "queue.buffering.max.messages": 1000,
                "delivery.timeout.ms": 20_000,
            },
        )
        self._said_s = -_SAY_AGAIN_AFTER_S
        self.lost = 0
        """Records that could not be written."""

    def write(self, values: Mapping[str, float], labels: Mapping[str, str] | None = None, *, step: int = -1) -> None:
        """Send figures by name; `labels` say what they are about, `step` the learner step they belong to."""
        record = Metrics(
            component=self._component, timestamp=time.time(), step=step, values=dict(values), labels=dict(labels or {})
        )
        try:
            self._producer.produce(
                self._topic, encode(record), encode_key(self._component), on_delivery=self._delivered
            )
            self._producer.poll(0)
        except (BufferError, KafkaException, RecordError) as error:
            self._lose(str(error))

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait a moment for what was sent."""
        self._producer.flush(timeout_s)

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._lose(error.str())

    def _lose(self, why: str) -> None:
        self.lost += 1
        if time.monotonic() - self._said_s >= _SAY_AGAIN_AFTER_S:
            self._said_s = time.monotonic()
            event(logger, "metrics_lost", level=logging.WARNING, component=self._component, lost=self.lost, error=why)

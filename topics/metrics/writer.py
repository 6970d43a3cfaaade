"""Writes a component's metrics to the topic `metrics`, and keeps the newest for /metrics.

Writing never disturbs the component: it does not wait or raise. Metrics that cannot be written are lost, and the loss
is logged.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded, DeliveryError, RecordError
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.records import Metrics
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0
_SETTINGS: dict[str, Any] = {
    "enable.idempotence": "false",
    "acks": "1",
    "linger.ms": "100",
    "queue.buffering.max.kbytes": 1024,
    "queue.buffering.max.messages": 1000,
    "delivery.timeout.ms": 20_000,
}
"""One acknowledgement, no idempotence and a small queue suffice, because the next record replaces the metrics."""


class MetricsWriter:
    """Writes the metrics of one component of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, component: str, role: str) -> None:
        """`role` is the command that runs the component, such as env or infer."""
        self._component, self._role = component, role
        self._topic = topic_name(run, "metrics")
        self._sender = RecoveringSender(kafka, on_failure=lambda failure: self._lose(failure.reason), **_SETTINGS)
        self._logged_s = -_LOG_EVERY_S
        self.lost = 0
        """Records that could not be written."""

    def write(self, values: Mapping[str, float], labels: Mapping[str, str] | None = None, *, step: int = -1) -> None:
        """Send metrics by name; `labels` name their subject, `step` the learner step they belong to."""
        VALUES.record(self._role, values, labels)
        record = Metrics(
            component=self._component, timestamp=time.time(), step=step, values=dict(values), labels=dict(labels or {})
        )
        try:
            self._sender.send(self._topic, encode(record), encode_key(self._component), timeout_s=0.0)
        except (DeliveryError, DeadlineExceeded, RecordError) as error:
            self._lose(str(error))

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait up to `timeout_s` for the delivery of the metrics sent."""
        self._sender.waiting(timeout_s)

    def _lose(self, why: str) -> None:
        self.lost += 1
        if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            event(logger, "metrics_lost", level=logging.WARNING, component=self._component, lost=self.lost, error=why)

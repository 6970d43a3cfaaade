"""Writes trajectories to the log: idempotently, with acks=all, each whole or not at all.

A worker's trajectories of one environment are on one partition in the order they were sent, because an episode may span
several. An error names each trajectory that is invalid, too large or not delivered.
"""

from collections.abc import Callable
from typing import Any, Literal

from rollstream.producers.record_sender import RecordSender, RolloutDelivery
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.trajectory_arrays import Trajectory, to_record


class TrajectoryProducer(RecordSender):
    """Sends trajectories of one run; `topic="unlabelled"` is for trajectories that wait for rewards.

    Pass `limit_bytes` to a TrajectoryCollector as max_bytes, so that its trajectories fit into records. Raises
    BrokerUnavailable or TopicError at once if there is no topic to write to.
    """

    too_large = "collect fewer steps, with a TrajectoryCollector's max_bytes, or run fewer environments side by side"
    not_delivered = "episodes of its worker may continue after the gap, so restart the worker: it begins new episodes"

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        topic: Literal["trajectories", "unlabelled"] = "trajectories",
        on_delivery: Callable[[RolloutDelivery], None] | None = None,
        send_timeout_s: float = 30.0,
        **overrides: Any,
    ) -> None:
        """`on_delivery` is called for each acknowledged trajectory; `overrides` are librdkafka keys."""
        super().__init__(kafka, topic_name(run, topic), send_timeout_s=send_timeout_s, **overrides)
        self._on_delivery = on_delivery

    def send(self, trajectory: Trajectory, *, timeout_s: float | None = None) -> None:
        """Queue a trajectory; it is written in the background and acknowledged in `poll` or `flush`.

        Raises RecordError if it is invalid or names no worker, RecordTooLarge beyond the record limit,
        DeadlineExceeded if the queue stays full for `timeout_s` (default: send_timeout_s), DeliveryError if an
        earlier trajectory was not delivered. In each of these cases this trajectory was not sent.
        """
        worker_id = trajectory.metadata.worker_id
        if not worker_id:
            raise RecordError(
                f"trajectory {trajectory.uid!r} names no worker (metadata.worker_id), which determines its partition; "
                "a TrajectoryCollector sets it"
            )

        def delivered(partition: int, offset: int) -> None:
            if self._on_delivery:
                self._on_delivery(RolloutDelivery(trajectory.uid, partition, offset))

        key = encode_key(trajectory.environment, worker_id)
        self._send(f"trajectory {trajectory.uid}", key, to_record(trajectory), timeout_s, delivered)

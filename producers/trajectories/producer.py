"""Writes trajectories to the log: idempotent, acks=all, whole or not at all.

Those of a worker lie on one partition in the order they were sent, as episodes go on from one to the next. What is
unsound, too large or not delivered is an error that names the trajectory.
"""

from collections.abc import Callable
from typing import Any, Literal

from producers.sending import Delivery, RecordSender
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.keys import encode_key
from topics.trajectories import Trajectory, to_record


class TrajectoryProducer(RecordSender):
    """Sends trajectories of one run; what waits for its rewards with `topic="unlabelled"`.

    `limit_bytes` is what a TrajectoryCollector is told, so that what it collects can be sent. Raises BrokerUnavailable
    or TopicError at once when there is nothing to write to.
    """

    too_large = "collect fewer steps, with a TrajectoryCollector's max_bytes, or run fewer environments side by side"
    not_delivered = "episodes of its worker may go on after the gap, so start the worker again: it begins new ones"

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        topic: Literal["trajectories", "unlabelled"] = "trajectories",
        on_delivery: Callable[[Delivery], None] | None = None,
        send_timeout_s: float = 30.0,
        **overrides: Any,
    ) -> None:
        """`on_delivery` is called for each trajectory the broker acknowledged; `overrides` are librdkafka keys."""
        super().__init__(kafka, topic_name(run, topic), send_timeout_s=send_timeout_s, **overrides)
        self._on_delivery = on_delivery

    def send(self, trajectory: Trajectory, *, timeout_s: float | None = None) -> None:
        """Queue a trajectory; it is written in the background and acknowledged in `poll` or `flush`.

        Raises RecordError when it is unsound or names no worker, RecordTooLarge beyond the record limit,
        DeadlineExceeded when the queue stayed full for `timeout_s` (default: send_timeout_s), DeliveryError when an
        earlier one was not delivered. In each of these cases this trajectory was not sent.
        """
        worker_id = trajectory.metadata.worker_id
        if not worker_id:
            raise RecordError(
                f"trajectory {trajectory.uid!r} names no worker (metadata.worker_id), which its place in the log "
                "follows from; a TrajectoryCollector gives one"
            )

        def delivered(partition: int, offset: int) -> None:
            if self._on_delivery:
                self._on_delivery(Delivery(trajectory.uid, partition, offset))

        key = encode_key(trajectory.environment, worker_id)
        self._send(f"trajectory {trajectory.uid}", key, to_record(trajectory), timeout_s, delivered)

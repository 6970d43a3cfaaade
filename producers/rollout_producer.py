"""Writes rollouts to the log, for our worker and for anyone else's code: idempotent, acks=all, whole or not at all.

What `send` accepted is on the log once `flush` returns; what is senseless, too large or not delivered is an error that
names the rollout. Memory is bounded: when the queue is full `send` waits, then raises.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from producers.sending import Delivery, RecordSender
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, RecordError
from topics.keys import encode_key
from topics.records import GroupCancelled, Rollout
from topics.validation import UIDS_LIMIT, cancellation_problems, problems


class RolloutProducer(RecordSender):
    """Sends rollouts and cancellations of one run.

    Raises BrokerUnavailable or TopicError at once when there is nothing to write to.
    """

    too_large = "shorten the episode, drop token_arrays"
    not_delivered = "send it again under the same uid once the cause is mended, a repeated uid is dropped"

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
        super().__init__(kafka, topic_name(run, topic), send_timeout_s=send_timeout_s, **overrides)
        self._trains = topic == "rollouts"
        self._allow_filtered = allow_filtered_sampling
        self._on_delivery = on_delivery

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

        def delivered(partition: int, offset: int) -> None:
            if self._on_delivery:
                self._on_delivery(Delivery(rollout.uid, partition, offset))

        key = encode_key(rollout.environment, rollout.example_id)
        self._send(f"rollout {rollout.uid}", key, rollout, timeout_s, delivered)

    def cancel(self, cancelled: GroupCancelled, *, timeout_s: float | None = None) -> None:
        """Queue a cancellation: its rollouts will never come, and the group shrinks. Raises as `send` does.

        More uids than fit into one record go out as several, so that some may be out when it raises: call it again.
        """
        name = f"cancellation of group {cancelled.group_id or cancelled.example_id}"
        if not self._trains:
            raise ConfigurationError(f"{name}: {self.topic} takes rollouts only; send it with topic='rollouts'")
        if wrong := cancellation_problems(cancelled, bounded=False):
            raise RecordError(f"{name} was not sent: {'; '.join(wrong)}")
        key = encode_key(cancelled.environment, cancelled.example_id)
        for start in range(0, len(cancelled.uids), UIDS_LIMIT):
            some = replace(cancelled, uids=cancelled.uids[start : start + UIDS_LIMIT])
            self._send(name, key, some, timeout_s)

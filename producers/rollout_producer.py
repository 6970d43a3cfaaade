"""Writes rollouts to the log, for workers and other programs: idempotently, with acks=all, each whole or not at all.

Rollouts that `send` accepted are on the log once `flush` returns. An error names each rollout that is invalid, too
large or not delivered. Memory is bounded: `send` waits while the queue is full, then raises.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from rollstream.producers.record_sender import RecordSender, RolloutDelivery
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.stored_arrays import LargeArrays
from rollstream.topics.records import GroupCancelled, Rollout
from rollstream.topics.traces.stages import rollout_sent
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.signatures import ROLLOUT, signed_or_plain, signer_of
from rollstream.topics.wire.validation import UIDS_LIMIT, is_masked, untyped_problems


class RolloutProducer(RecordSender):
    """Sends rollouts and cancellations of one run.

    Raises BrokerUnavailable or TopicError at once if there is no topic to write to.
    """

    too_large = "set kafka.arrays.url for large token_arrays, shorten the episode"
    not_delivered = "remove the cause, then send it again under the same uid: a repeated uid is dropped"

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        topic: Literal["rollouts", "evals", "unlabelled"] = "rollouts",
        on_delivery: Callable[[RolloutDelivery], None] | None = None,
        send_timeout_s: float = 30.0,
        allow_filtered_sampling: bool = False,
        **overrides: Any,
    ) -> None:
        """`on_delivery` is called for each acknowledged rollout; `overrides` are librdkafka keys.

        Rollouts sent to `unlabelled` get their reward from a labeler, which passes them on to `rollouts`.
        """
        super().__init__(kafka, topic_name(run, topic), send_timeout_s=send_timeout_s, **overrides)
        self._trains = topic != "evals"
        self._takes_cancellations = topic == "rollouts"
        self._allow_filtered = allow_filtered_sampling
        # Evaluations are not signed: grouping never reads them, so nothing would check their signatures.
        self._signer = signer_of(kafka.signing_key, "kafka.signing_key") if self._trains else None
        self._on_delivery = on_delivery
        self._large = LargeArrays(run, kafka.arrays)

    def send(self, rollout: Rollout, *, timeout_s: float | None = None) -> None:
        """Queue a rollout; it is written in the background and acknowledged in `poll` or `flush`.

        Raises RecordError if it is invalid, RecordTooLarge beyond the record limit, DeadlineExceeded if the queue stays
        full for `timeout_s` (default: send_timeout_s), DeliveryError if an earlier rollout was not delivered, or if the
        store does not take its large arrays. In each of these cases this rollout was not sent.
        """
        wrong = untyped_problems(rollout)
        filtered = rollout.sampling.filtered and not self._allow_filtered
        if (
            not wrong
            and self._trains
            and filtered
            and not is_masked(rollout.loss_mask, rollout.logprobs_mode, rollout.token_arrays)
        ):
            wrong = [
                "it was sampled with top_p, top_k or min_p, so its logprobs are not the policy's (record its "
                "sampling_mask, sample without them, or set allow_filtered_sampling here and in grouping)"
            ]
        if wrong:
            raise RecordError(f"rollout {rollout.uid!r} was not sent: {'; '.join(wrong)}")

        begin_ns = time.time_ns()
        rollout = self._large.stored(rollout, self.send_timeout_s if timeout_s is None else timeout_s)

        def delivered(partition: int, offset: int) -> None:
            if self._trains and offset >= 0:
                rollout_sent(self.topic, rollout, begin_ns, partition, offset)
            if self._on_delivery:
                self._on_delivery(RolloutDelivery(rollout.uid, partition, offset, rollout.environment))

        key = encode_key(rollout.environment, rollout.example_id)
        self._send(f"rollout {rollout.uid}", key, rollout, timeout_s, delivered)

    def _encoded(self, record: object) -> bytes:
        return signed_or_plain(record, self._signer, ROLLOUT)

    def cancel(self, cancelled: GroupCancelled, *, timeout_s: float | None = None) -> None:
        """Queue a cancellation: its rollouts will never be sent, and the group shrinks. Raises as `send` does.

        Also raises ConfigurationError if the producer does not write to `rollouts`. Uids that do not fit into one
        record are sent in several records. If this raises, some records may have been sent; call it again.
        """
        name = f"cancellation of group {cancelled.group_id or cancelled.example_id}"
        if not self._takes_cancellations:
            raise ConfigurationError(f"{name}: {self.topic} accepts rollouts only; send it with topic='rollouts'")
        uids = cancelled.uids
        parts = [cancelled]
        if uids:
            starts = range(0, len(uids), UIDS_LIMIT)
            parts = [replace(cancelled, uids=uids[start : start + UIDS_LIMIT]) for start in starts]
        for part in parts:
            if wrong := untyped_problems(part):
                raise RecordError(f"{name} was not sent: {'; '.join(wrong)}")
        key = encode_key(cancelled.environment, cancelled.example_id)
        for part in parts:
            self._send(name, key, part, timeout_s)

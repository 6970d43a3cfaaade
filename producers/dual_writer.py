"""Writes groups a second time in the old form, for old readers during a transition.

A RolloutProducer writes the rollouts to the run as usual. This module writes the same groups as RolloutBatches, with
metadata on the batch and on each rollout, to a topic that old readers consume. The two writes are not one transaction:
after a crash between them, old readers lack a group.
"""

from collections.abc import Sequence
from dataclasses import replace

from rollstream.producers.record_sender import RecordSender
from rollstream.topics.config import KafkaConfig
from rollstream.topics.keys import encode_key
from rollstream.topics.records import OldMetadata, Rollout
from rollstream.topics.rollout_batch_upcast import downcast, old_metadata


class DualWriter(RecordSender):
    """Writes groups in the old form to an existing topic."""

    too_large = "write fewer groups at a time"
    not_delivered = "old readers lack it; remove the cause, then write it again"

    def __init__(self, kafka: KafkaConfig, topic: str) -> None:
        """`topic` is a full topic name. Raises TopicError if it is missing, BrokerUnavailable if no broker answers."""
        super().__init__(kafka, topic, send_timeout_s=30.0)

    def write(self, groups: Sequence[Sequence[Rollout]], metadata: OldMetadata | None = None) -> None:
        """Queue groups as one RolloutBatch. Empty groups are left out; without rollouts nothing is queued.

        `metadata` defaults to the first rollout's metadata. For a rollout whose weight step is unknown, its policy
        version is written instead. Raises RecordTooLarge, DeadlineExceeded if the queue stays full, and DeliveryError
        if an earlier batch was not delivered.
        """
        stepped = [[_with_step(rollout) for rollout in group] for group in groups if group]
        if not stepped:
            self.poll()
            return
        first = stepped[0][0]
        default = old_metadata(first.metadata)
        key = encode_key(first.environment, first.example_id)
        self._send(f"a batch of {sum(map(len, stepped))} rollouts", key, downcast(stepped, metadata or default), None)


def _with_step(rollout: Rollout) -> Rollout:
    if rollout.metadata.weight_step >= 0:
        return rollout
    return replace(rollout, metadata=replace(rollout.metadata, weight_step=rollout.policy_version))

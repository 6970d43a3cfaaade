"""During a transition: groups written a second time, in the old form, for readers that know no other.

Rollouts go to the run as always, by whoever has them; this writes the same groups as RolloutBatches, metadata on the
batch and on each rollout, to a topic of the old readers'. The two are not one transaction: old readers may lack a
group that a crash came between.
"""

from collections.abc import Sequence
from dataclasses import replace

from producers.sending import RecordSender
from topics.config import KafkaConfig
from topics.keys import encode_key
from topics.records import OldMetadata, Rollout
from topics.upcast import downcast


class DualWriter(RecordSender):
    """Writes groups in the old form to a topic that exists."""

    too_large = "write fewer groups at a time"
    not_delivered = "old readers lack it; write it again once the cause is mended"

    def __init__(self, kafka: KafkaConfig, topic: str) -> None:
        """`topic` is a full name. Raises TopicError when it is missing, BrokerUnavailable when nobody answers."""
        super().__init__(kafka, topic, send_timeout_s=30.0)

    def write(self, groups: Sequence[Sequence[Rollout]], metadata: OldMetadata | None = None) -> None:
        """Queue groups as one RolloutBatch; nothing where there is no rollout.

        Its metadata is what is given, else that of the first rollout. A weight step that a rollout does not know is
        its policy version. Raises RecordTooLarge, DeadlineExceeded when the queue stayed full, and DeliveryError when
        an earlier one was not delivered.
        """
        known = [[_with_step(rollout) for rollout in group] for group in groups if group]
        if not known:
            self.poll()
            return
        first = known[0][0]
        of = first.metadata
        own = OldMetadata(worker_id=of.worker_id, timestamp=of.timestamp, weight_step=of.weight_step)
        key = encode_key(first.environment, first.example_id)
        self._send(f"a batch of {sum(map(len, known))} rollouts", key, downcast(known, metadata or own), None)


def _with_step(rollout: Rollout) -> Rollout:
    if rollout.metadata.weight_step >= 0:
        return rollout
    return replace(rollout, metadata=replace(rollout.metadata, weight_step=rollout.policy_version))

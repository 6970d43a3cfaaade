"""Batches that learners leave out, as `control` says: what is excluded when a batch is reached is not trained on.

Follows the topic without waiting for it; what was on it when the learner started is known from the beginning.
"""

from confluent_kafka import Message, TopicPartition

from consumers.closing import Closing
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.following import TopicFollower
from topics.keys import decode_key
from topics.records import ExcludedBatch
from topics.skipped import SkippedRecords


class Exclusions(Closing):
    """Which batches of a run are excluded. Raises TopicError when the run has no topic `control`."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        topic = topic_name(run, "control")
        self._reasons: dict[str, str] = {}
        self.skipped = SkippedRecords("exclusions")
        position = 0
        for message in clients.read_to_end(kafka, topic):
            self._note(message)
            position = (message.offset() or 0) + 1
        self._follower = TopicFollower(kafka, [TopicPartition(topic, 0, position)])

    def reason(self, batch_id: str) -> str:
        """Why a batch is to be skipped, as far as it is known by now; "" where it is not excluded."""
        while messages := self._follower.poll(100, 0):
            for message in messages:
                self._note(message)
        return self._reasons.get(batch_id, "")

    def close(self) -> None:
        self._follower.close()

    def _note(self, message: Message) -> None:
        with self.skipped.passing(message):
            if decode_key(message.key())[:1] == ("excluded",):
                record = self.skipped.decode(ExcludedBatch, message)
                if record is not None:
                    self._reasons[record.batch_id] = f"excluded: {record.reason}"

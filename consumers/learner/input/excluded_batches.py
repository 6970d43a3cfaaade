"""Batches excluded by records on `control`: a batch that is excluded when the learner reaches it is not trained on.

The learner follows the topic without waiting for it; records present when it starts are known from the beginning.
"""

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.follower import read_then_follow
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ExcludedBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import decode_key


class Exclusions(Closing):
    """The excluded batches of a run. Raises TopicError if the run has no topic `control`."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._reasons: dict[str, str] = {}
        self.skipped = SkippedRecords("exclusions")
        self._follower = read_then_follow(kafka, topic_name(run, "control"), self._note)

    def reason(self, batch_id: str) -> str:
        """Reason to skip a batch, as far as known; "" if it is not excluded."""
        while messages := self._follower.poll(100, 0):
            for message in messages:
                self._note(message)
        return self._reasons.get(batch_id, "")

    def close(self) -> None:
        self._follower.close()

    def _note(self, message: KafkaRecord) -> None:
        with self.skipped.passing(message):
            if decode_key(message.key)[:1] == ("excluded",):
                record = self.skipped.decode(ExcludedBatch, message)
                if record is not None:
                    self._reasons[record.batch_id] = f"excluded: {record.reason}"

"""The decisions on `control` that the ledger uses: retired learners."""

from rollstream.pipeline.audit.ledger.topic_tail import TopicTail
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.retired_learners import note_retired
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import RetiredLearner


class ControlRecords:
    """The decisions that have been read. Invalid records are ignored here; roles that read `control` report them."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "control")
        self.retired: dict[str, RetiredLearner] = {}

    def read(self) -> None:
        """Read new records."""
        skipped = SkippedRecords(logged=False)
        for message in self.tail.messages():
            note_retired(self.retired, message, skipped)

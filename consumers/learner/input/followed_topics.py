"""Topics that a learner follows beside the index: exclusions on `control`, and the steps of the run's publisher.

It follows them without waiting; exclusions present when it starts are known from the beginning.

A learner in another run counts the age of batches in the publisher's steps, because its own steps may have other
numbers. It then skips the batches that the publisher skips, also if it reads them later or again.
"""

from bisect import bisect_right

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import EXCLUDED, ControlWatch
from rollstream.topics.kafka.follower import read_then_follow
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ExcludedBatch, LearnerStep
from rollstream.topics.wire.catalogue import topic_name


class Exclusions(ControlWatch[ExcludedBatch]):
    """The excluded batches of a run. Raises TopicError if the run has no topic `control`."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        super().__init__(kafka, run, EXCLUDED, ExcludedBatch, "exclusions")

    def reason(self, batch_id: str) -> str:
        """Reason to skip a batch, as far as known; "" if it is not excluded."""
        while self.poll():
            pass
        record = self.records.get(batch_id)
        return "" if record is None else f"excluded: {record.reason}"


class PublisherSteps(Closing):
    """Completed steps of the learners of a run. Raises TopicError if the run has no topic `steps`, or AccessDenied."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._learner = ""
        self._position_of: dict[tuple[str, int], int] = {}
        """Index position after each step, by learner and number."""
        self._steps: list[int] = []
        """Steps in order of their positions, which are in `_positions`; empty if they must be sorted again."""
        self._positions: list[int] = []
        self._skipped = SkippedRecords("learner")
        self._follower = read_then_follow(kafka, topic_name(run, "steps"), self._note)

    def completed_at(self, index_offset: int) -> int | None:
        """Return the publisher's completed steps when it read the entry at this offset of the index.

        If it has not read that far, these are its steps so far. None if no step before the entry is on record.
        """
        if not self._positions or index_offset >= self._positions[-1]:
            while messages := self._follower.poll(500, 0):
                for message in messages:
                    self._note(message)
        if not self._steps:
            by_position = sorted((position, step) for (_learner, step), position in self._position_of.items())
            self._positions = [position for position, _step in by_position]
            self._steps = [step for _position, step in by_position]
        place = bisect_right(self._positions, index_offset) - 1
        return self._steps[place] if place >= 0 else None

    def close(self) -> None:
        """Close the consumer."""
        self._follower.close()

    def _note(self, message: KafkaRecord) -> None:
        record = self._skipped.decode(LearnerStep, message)
        if record is None or not record.made:
            return
        if record.learner != self._learner:
            # A learner that took over may begin before the entries that the earlier learner read last.
            self._learner = record.learner
            self._position_of = {step: at for step, at in self._position_of.items() if at < record.position}
        self._position_of[record.learner, record.step] = record.position
        self._steps, self._positions = [], []

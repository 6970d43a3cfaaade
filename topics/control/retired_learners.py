"""The retired learners of a run, as recorded on its topic `control`."""

from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import note_named, read_named
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import RetiredLearner

RETIRED = "retired"
"""First part of the key of a record that retires a learner; the second is its name."""


def retired_learners(kafka: KafkaConfig, run: str) -> dict[str, RetiredLearner]:
    """Return the retired learners by name; none if the run has no topic `control`."""
    return read_named(kafka, run, RETIRED, RetiredLearner)


def note_retired(retired: dict[str, RetiredLearner], message: KafkaRecord, skipped: SkippedRecords) -> None:
    """Update `retired` from a record of `control`; other kinds of records change nothing."""
    note_named(retired, RETIRED, RetiredLearner, message, skipped)

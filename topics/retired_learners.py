"""The retired learners of a run, as recorded on its topic `control`."""

from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.keys import decode_key
from rollstream.topics.records import RetiredLearner

RETIRED = "retired"
"""First part of the key of a record that retires a learner; the second is its name."""


def retired_learners(kafka: KafkaConfig, run: str) -> dict[str, RetiredLearner]:
    """Return the retired learners by name; none if the run has no topic `control`."""
    retired: dict[str, RetiredLearner] = {}
    skipped = SkippedRecords(logged=False)
    try:
        for message in read_to_end(kafka, topic_name(run, "control")):
            note_retired(retired, message, skipped)
    except TopicError:
        return {}
    return retired


def note_retired(retired: dict[str, RetiredLearner], message: KafkaRecord, skipped: SkippedRecords) -> None:
    """Update `retired` from a record of `control`; other kinds of records change nothing."""
    with skipped.passing(message):
        key = decode_key(message.key)
        if len(key) != 2 or key[0] != RETIRED:
            return
        record = None if message.value is None else skipped.decode(RetiredLearner, message)
        if record is not None:
            retired[record.learner] = record
        elif message.value is None:
            retired.pop(str(key[1]), None)

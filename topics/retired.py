"""Which learners of a run are retired, as its topic `control` says."""

from confluent_kafka import Message

from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import TopicError
from topics.keys import decode_key
from topics.records import RetiredLearner
from topics.skipped import SkippedRecords

RETIRED = "retired"
"""First part of the key of a record that retires a learner; the second is its name."""


def retired_learners(kafka: KafkaConfig, run: str) -> dict[str, RetiredLearner]:
    """Retired learners by name; none where the run has no topic `control`."""
    found: dict[str, RetiredLearner] = {}
    skipped = SkippedRecords(logged=False)
    try:
        for message in clients.read_to_end(kafka, topic_name(run, "control")):
            note_retired(found, message, skipped)
    except TopicError:
        return {}
    return found


def note_retired(found: dict[str, RetiredLearner], message: Message, skipped: SkippedRecords) -> None:
    """Take note of a record of `control`; of those that retire nobody nothing is noted."""
    with skipped.passing(message):
        key = decode_key(message.key())
        if len(key) != 2 or key[0] != RETIRED:
            return
        record = None if message.value() is None else skipped.decode(RetiredLearner, message)
        if record is not None:
            found[record.learner] = record
        elif message.value() is None:
            found.pop(str(key[1]), None)

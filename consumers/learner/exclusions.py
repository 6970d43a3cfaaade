"""Batches that learners leave out, as `control` says: what is excluded when a batch is reached is not trained on.

Follows the topic without waiting for it; what was on it when the learner started is known from the beginning.
"""

from confluent_kafka import KafkaError, TopicPartition

from consumers.closing import Closing
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.keys import decode_key
from topics.records import ExcludedBatch

EXCLUDED = "excluded"
"""Beginning of the reason a batch is skipped for."""


class Exclusions(Closing):
    """Which batches of a run are excluded. Raises TopicError when the run has no topic `control`."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._topic = topic_name(run, "control")
        self._reasons: dict[str, str] = {}
        position = 0
        for message in clients.read_to_end(kafka, self._topic):
            self._note(message.key(), message.value())
            position = (message.offset() or 0) + 1
        self._consumer = clients.reader(kafka)
        clients.follow(self._consumer, kafka, [TopicPartition(self._topic, 0, position)])

    def reason(self, batch_id: str) -> str:
        """Why a batch is to be skipped, as far as it is known by now; "" where it is not excluded."""
        while messages := self._consumer.consume(100, 0):
            for message in messages:
                error = message.error()
                if error is None:
                    self._note(message.key(), message.value())
                elif error.code() != KafkaError._PARTITION_EOF:
                    clients.raise_for(error, f"reading {self._topic}")
        return self._reasons.get(batch_id, "")

    def close(self) -> None:
        self._consumer.close()

    def _note(self, key: bytes | None, value: bytes | None) -> None:
        if decode_key(key)[:1] == ("excluded",) and value is not None:
            record = decode_as(ExcludedBatch, value)
            self._reasons[record.batch_id] = f"{EXCLUDED}: {record.reason}"

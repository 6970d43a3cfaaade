"""A topic read to its end again and again, while what was committed comes to show there: each record once."""

from collections.abc import Iterator

from confluent_kafka import Message

from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig


class Tail:
    """One topic of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, name: str) -> None:
        self._kafka, self._topic = kafka, topic_name(run, name)
        self.follows: dict[int, int] = {}
        """By partition, the offset after the last record read."""

    def messages(self) -> Iterator[Message]:
        """All that came since the last call; at first, all there is. Raises as `clients.read_to_end` does."""
        for message in clients.read_to_end(self._kafka, self._topic, start=dict(self.follows)):
            partition, offset = message.partition() or 0, message.offset() or 0
            if offset >= self.follows.get(partition, 0):
                self.follows[partition] = offset + 1
                yield message

"""A reader that follows topics for as long as its owner likes: no record ends it, whatever is in it.

Delivery: every committed record from where it starts, at least as long as the topics keep them, in offset order within
each partition. It is member of no group and commits nothing.
"""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError, Message, TopicPartition

from topics import clients
from topics.config import KafkaConfig


class TopicFollower:
    """Follows partitions of topics; what comes is decoded by its owner."""

    def __init__(self, kafka: KafkaConfig, start: Iterable[TopicPartition], **overrides: Any) -> None:
        """Start at the offsets of `start`; `overrides` are the client's. Raises as `clients.follow` does."""
        self.ends: dict[tuple[str, int], int] = {}
        """Where each partition ends, by topic and number, while it is read to its end; counts transactions' markers."""
        self._next: dict[str, dict[int, int]] = {}
        self._consumer = clients.reader(kafka, **overrides)
        try:
            clients.follow(self._consumer, kafka, list(start))
        except BaseException:
            self._consumer.close()
            raise

    def poll(self, most: int, wait_s: float) -> list[Message]:
        """Records that came, `most` at most, and those only; waits up to `wait_s` where there are none.

        One that cannot be decompressed comes without key and value, as `clients.with_unreadable` says. Raises
        TopicError or BrokerUnavailable where nothing more will come.
        """
        by_topic: dict[str, list[Message]] = {}
        for message in clients.at_hand(self._consumer, most, wait_s):
            by_topic.setdefault(message.topic() or "", []).append(message)
        records = []
        for topic, messages in by_topic.items():
            for message in clients.with_unreadable(self._consumer, messages, self._next.setdefault(topic, {})):
                error = message.error()
                place = topic, message.partition() or 0
                if error is None:
                    self.ends.pop(place, None)
                    records.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    self.ends[place] = message.offset() or 0
                else:
                    clients.raise_for(error, f"following {topic}")
        return records

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

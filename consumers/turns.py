"""Whose turn it is: of the processes under one ordinal, the one that began last.

A process that was stopped, or cut off, and goes on asks here before it takes its transactional id again: that would
end whoever replaced it. The word stands in an offset's metadata in a consumer group of its own, which has no members.
"""

import uuid
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig


class Turn:
    """The turn of one process; each is another's until it is taken."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str, ordinal: int) -> None:
        """`group` is the full name of the consumer group whose member the ordinal is."""
        self._kafka = kafka
        self._group = f"{group}.turn-{ordinal}"
        self._topic = topic_name(run, "policies")  # One that every run has, and from which nothing is pruned.
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """It is our turn from now on, and nobody else's. Raises BrokerUnavailable where that cannot be said."""
        ours = [TopicPartition(self._topic, 0, 0, self._token)]
        self._ask(lambda consumer: consumer.commit(offsets=ours, asynchronous=False), "taking the turn")

    def is_ours(self) -> bool:
        """Whether nobody has taken it since we did. Raises BrokerUnavailable where nobody answers."""
        place = [TopicPartition(self._topic, 0)]
        [newest] = self._ask(lambda consumer: consumer.committed(place, 10.0), "asking whose turn it is")
        # Brokers that forget offsets of idle groups may have forgotten ours.
        return bool(newest.offset < 0 or newest.metadata == self._token)

    def _ask(self, call: Callable[[Consumer], Any], doing: str) -> Any:
        consumer = clients.reader(self._kafka, group=self._group)
        try:
            return clients.retrying(lambda: call(consumer), f"{doing} in group {self._group}", self._kafka.patience_s)
        finally:
            consumer.close()

"""Claim on an ordinal: of the processes that started under one ordinal, the last one holds it.

A process that was paused or cut off checks its claim before it initializes its transactional id again, which would
fence its replacement. The claim is offset metadata in a consumer group of its own, which has no members.
"""

import uuid

from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition


class OrdinalClaim:
    """The claim of one process on its ordinal."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str, ordinal: int) -> None:
        """`group` is the full name of the consumer group that the ordinal is a member of."""
        self._kafka = kafka
        self._group = f"{group}.turn-{ordinal}"
        self._topic = topic_name(run, "policies")  # Every run has this topic, and nothing is pruned from it.
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Claim the ordinal, replacing any earlier claim. Raises BrokerUnavailable if that cannot be written."""
        with Reader(self._kafka, group=self._group) as reader:
            reader.commit(
                [GroupPosition(self._topic, 0, 0, self._token)], f"claiming the ordinal in group {self._group}"
            )

    def is_ours(self) -> bool:
        """Whether no other process has claimed the ordinal since. Raises BrokerUnavailable if no broker answers."""
        with Reader(self._kafka, group=self._group) as reader:
            [newest] = reader.committed(self._topic, [0], f"reading the claim on the ordinal in group {self._group}")
        # Brokers that expire offsets of idle groups may have expired ours.
        return newest.offset < 0 or newest.metadata == self._token

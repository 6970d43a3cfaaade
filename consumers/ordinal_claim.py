"""Claim on an ordinal, held by the process that last started with this ordinal.

A process that was paused or cut off checks its claim before it initializes its transactional id again, because that
would fence its replacement. The claim is offset metadata in a separate consumer group, which has no members.
"""

import uuid

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.wire.catalogue import topic_name


class OrdinalClaim:
    """The claim of one process on its ordinal."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str, ordinal: int | str) -> None:
        """`group` is the full name of the consumer group that the process is a member of."""
        self._kafka = kafka
        self._group = f"{group}.turn-{ordinal}"
        self._topic = topic_name(run, "policies")  # Every run has this topic, and nothing is pruned from it.
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Claim the ordinal, replacing any earlier claim. Raises BrokerUnavailable if the claim cannot be written."""
        with Reader(self._kafka, group=self._group) as reader:
            reader.commit(
                [GroupPosition(self._topic, 0, 0, self._token)], f"claiming the ordinal in group {self._group}"
            )

    def is_ours(self) -> bool:
        """Whether the claim of `take` is still the latest. Raises BrokerUnavailable if no broker answers.

        An outage may end just when the patience does, so this asks once more if a broker answers by then.
        """
        try:
            return self._is_latest()
        except AccessDenied:
            raise
        except BrokerUnavailable:
            clients.check_broker(self._kafka)
            return self._is_latest()

    def _is_latest(self) -> bool:
        with Reader(self._kafka, group=self._group) as reader:
            [newest] = reader.committed(self._topic, [0], f"reading the claim on the ordinal in group {self._group}")
        # Brokers delete the offsets of idle groups after a while, so a missing offset does not mean another claim.
        return newest.offset < 0 or newest.metadata == self._token

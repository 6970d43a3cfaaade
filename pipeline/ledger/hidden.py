"""What a transaction that stands open hides: it lies beyond the last stable offset, and no reader sees it yet.

What is missed and found there is undecided, no loss: a transaction that was killed ends within its timeout.
"""

from confluent_kafka import Message

from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.open_transactions import Undecided, undecided


class Hidden:
    """The hidden ends of a run's topics, each read when it is first asked for."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._kafka, self._run = kafka, run
        self._parts: dict[str, dict[int, Undecided]] = {}
        self._messages: dict[str, list[Message]] = {}

    def parts(self, name: str) -> dict[int, Undecided]:
        """Where the partitions of a topic are hidden from and to; those that are not hidden are left out."""
        if name not in self._parts:
            self._parts[name] = undecided(self._kafka, topic_name(self._run, name))
        return self._parts[name]

    def messages(self, name: str) -> list[Message]:
        """The hidden records of a topic, whatever becomes of them."""
        if name not in self._messages:
            parts = self.parts(name)
            tails = clients.read_to_end(
                self._kafka,
                topic_name(self._run, name),
                partitions=parts,
                start={partition: part.start for partition, part in parts.items()},
                isolation="read_uncommitted",
            )
            self._messages[name] = list(tails) if parts else []
        return self._messages[name]

    def places(self, name: str) -> str:
        """The hidden ends of a topic, in words."""
        parts = sorted(self.parts(name).items())
        return ", ".join(f"{name}[{number}] from offset {part.start} to {part.end}" for number, part in parts)

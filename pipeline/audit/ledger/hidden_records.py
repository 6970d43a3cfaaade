"""Records hidden by an open transaction: they are beyond the last stable offset, so no reader sees them yet.

A record that may be hidden is undecided, not lost: the transaction of a killed process ends after its timeout.
"""

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.open_transactions import Undecided, undecided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.wire.catalogue import topic_name


class HiddenRecords:
    """The hidden ends of a run's topics, each read on first use."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._kafka, self._run = kafka, run
        self._parts: dict[str, dict[int, Undecided]] = {}
        self._messages: dict[str, list[KafkaRecord]] = {}

    def parts(self, name: str) -> dict[int, Undecided]:
        """Return the range of hidden offsets of each partition of a topic that has hidden records."""
        if name not in self._parts:
            self._parts[name] = undecided(self._kafka, topic_name(self._run, name))
        return self._parts[name]

    def messages(self, name: str) -> list[KafkaRecord]:
        """Return the hidden records of a topic, whether they will be committed or aborted."""
        if name not in self._messages:
            parts = self.parts(name)
            tails = read_to_end(
                self._kafka,
                topic_name(self._run, name),
                partitions=parts,
                start={partition: part.start for partition, part in parts.items()},
                isolation="read_uncommitted",
            )
            self._messages[name] = list(tails) if parts else []
        return self._messages[name]

    def places(self, name: str) -> str:
        """Return a text that names the hidden ranges of a topic."""
        parts = sorted(self.parts(name).items())
        return ", ".join(f"{name}[{number}] from offset {part.start} to {part.end}" for number, part in parts)

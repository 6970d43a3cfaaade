"""Reads the new records of a topic, each once, and waits until the records of a committed transaction are visible.

A record hidden by an open transaction is beyond the last stable offset. It is undecided, not lost: the transaction of a
killed process ends after its timeout.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TypeVar

from rollstream.consumers.log_view import LogView
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.open_transactions import Undecided, undecided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.wire.catalogue import topic_name

PATIENCE_S = 3.0
"""How long to wait for records of a committed transaction, which do not appear on all partitions at once."""
_PAUSE_S = 0.1
_READS = 10
"""Least number of readings while records are missing: on a busy machine a single one may take `PATIENCE_S`."""
M = TypeVar("M", bound=Sized)


def read_until_complete(read: Callable[[], M]) -> M:
    """Call `read`, which returns the missing records, until none is missing; return its last result.

    Gives up after ten calls, but not before `PATIENCE_S` has passed.
    """
    deadline, reads = time.monotonic() + PATIENCE_S, 1
    while (missing := read()) and (reads < _READS or time.monotonic() <= deadline):
        reads += 1
        time.sleep(_PAUSE_S)
    return missing


class TopicTail(LogView):
    """Reader of one topic of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, name: str) -> None:
        super().__init__(topic_name(run, name))
        self._kafka = kafka
        self.skipped = SkippedRecords("ledger", logged=False)
        """Records that could not be read."""

    def messages(self, upto: Mapping[int, int] | None = None) -> Iterator[KafkaRecord]:
        """Yield the records since the last call; the first call yields all records. Raises as `read_to_end` does.

        Records after the offset that `upto` has for a partition are yielded again by later calls.
        """
        last = upto or {}
        for message in read_to_end(self._kafka, self.topic, start=dict(self.position)):
            if message.offset < self.position.get(message.partition, 0):
                continue
            if message.offset <= last.get(message.partition, message.offset):
                self.position[message.partition] = message.offset + 1
            yield message


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

"""Reads a topic to its end repeatedly, until the records of a committed transaction are visible, each record once."""

import time
from collections.abc import Callable, Iterator, Sized
from typing import TypeVar

from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord

PATIENCE_S = 3.0
"""How long to wait for records of a committed transaction: they do not appear on all partitions at once."""
_PAUSE_S = 0.1
_READS = 10
"""Least number of times to look for them: on a busy machine one look may take as long as all that patience."""
M = TypeVar("M", bound=Sized)


def read_until_complete(read: Callable[[], M]) -> M:
    """Call `read`, which returns the missing records, until none is missing, or it was called ten times and
    `PATIENCE_S` has passed; return its last result."""
    deadline, reads = time.monotonic() + PATIENCE_S, 1
    while (missing := read()) and (reads < _READS or time.monotonic() <= deadline):
        reads += 1
        time.sleep(_PAUSE_S)
    return missing


class TopicTail:
    """Reader of one topic of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, name: str) -> None:
        self._kafka, self._topic = kafka, topic_name(run, name)
        self.follows: dict[int, int] = {}
        """By partition, the offset after the last record read."""

    def messages(self) -> Iterator[KafkaRecord]:
        """Yield the records since the last call; at first, all records. Raises as `read_to_end` does."""
        for message in read_to_end(self._kafka, self._topic, start=dict(self.follows)):
            partition, offset = message.partition, message.offset
            if offset >= self.follows.get(partition, 0):
                self.follows[partition] = offset + 1
                yield message

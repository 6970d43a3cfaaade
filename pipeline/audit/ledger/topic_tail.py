"""Reads the new records of a topic, each once, and waits until the records of a committed transaction are visible."""

import time
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TypeVar

from rollstream.topics.config import KafkaConfig
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


class TopicTail:
    """Reader of one topic of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, name: str) -> None:
        self._kafka, self.topic = kafka, topic_name(run, name)
        self.follows: dict[int, int] = {}
        """By partition, the offset after the last record read."""
        self.skipped = SkippedRecords("ledger", logged=False)
        """Records that could not be read."""

    def messages(self, upto: Mapping[int, int] | None = None) -> Iterator[KafkaRecord]:
        """Yield the records since the last call; the first call yields all records. Raises as `read_to_end` does.

        Records after the offset that `upto` has for a partition are yielded again by later calls.
        """
        last = upto or {}
        for message in read_to_end(self._kafka, self.topic, start=dict(self.follows)):
            if message.offset < self.follows.get(message.partition, 0):
                continue
            if message.offset <= last.get(message.partition, message.offset):
                self.follows[message.partition] = message.offset + 1
            yield message

    def forget_before(self, begins: Mapping[int, int]) -> bool:
        """Forget skipped records that were deleted; return False if there are too many skipped records to tell."""
        kept = [skipped for skipped in self.skipped.first if skipped.offset >= begins.get(skipped.partition, 0)]
        whole = self.skipped.total == len(self.skipped.first)
        if len(kept) < self.skipped.total and whole:
            self.skipped = SkippedRecords("ledger", logged=False)
            for skipped in kept:
                self.skipped.note(skipped)
        return whole

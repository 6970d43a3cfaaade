"""A reader that follows topics until its owner closes it; no record stops it, whatever the record contains.

From the start offset on, it delivers every committed record that the topics still keep, in offset order within each
partition. It is not a group member and commits nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord, Place


class TopicFollower(Closing):
    """Follows partitions of topics; its owner decodes the records."""

    def __init__(self, kafka: KafkaConfig, start: Mapping[Place, int], **overrides: Any) -> None:
        """Start at an offset of each partition; `overrides` are client settings. Raises as `Reader.assign` does."""
        self.ends: dict[Place, int] = {}
        """End offset of each partition that has been read to its end, with transaction markers counted."""
        self.caught_up: set[Place] = set()
        """Partitions that were read to their end, or to the end that they had when the first records arrived."""
        self._behind = set(start)
        self._first_ends: dict[Place, int] = {}
        with ExitStack() as stack:
            self._reader = stack.enter_context(Reader(kafka, doing="following", **overrides))
            self._reader.assign(start)
            stack.pop_all()

    def add(self, start: Mapping[Place, int]) -> None:
        """Follow further partitions, each from an offset."""
        for place, at in start.items():
            self._behind.add(place)
            self._reader.add(place, at)

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records; waits up to `wait_s` if there are none. Raises as `Reader.poll` does."""
        records, ends = self._reader.poll(most, wait_s)
        for place in {(record.topic, record.partition) for record in records} if self.ends else ():
            self.ends.pop(place, None)
        for place, end in ends.items():
            if self._reader.positions[place] <= end:
                self.ends[place] = end
                self.caught_up.add(place)
        if self._behind:
            self.caught_up.update(self._reader.passed_ends(self._behind, self._first_ends, records))
            self._behind -= self.caught_up
        return records

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()


def read_then_follow(kafka: KafkaConfig, topic: str, note: Callable[[KafkaRecord], None]) -> TopicFollower:
    """Pass the present records of a topic of one partition to `note`, and return a follower of the later records.

    Raises as `read_to_end` does.
    """
    start = BEGINNING
    for message in read_to_end(kafka, topic):
        note(message)
        start = message.offset + 1
    return TopicFollower(kafka, {(topic, 0): start})

"""A reader that follows topics until its owner closes it: no record ends it, whatever its content.

Delivery: every committed record from the start offset on, as long as the topics keep it, in offset order within each
partition. It is not a group member and commits nothing.
"""

from collections.abc import Mapping
from typing import Any

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import KafkaRecord, Place


class TopicFollower(Closing):
    """Follows partitions of topics; its owner decodes the records."""

    def __init__(self, kafka: KafkaConfig, start: Mapping[Place, int], **overrides: Any) -> None:
        """Start at an offset of each partition; `overrides` are client settings. Raises as `Reader.assign` does."""
        self.ends: dict[Place, int] = {}
        """End of each partition that is read to its end; transaction markers count."""
        self._reader = Reader(kafka, doing="following", **overrides)
        try:
            self._reader.assign(start)
        except BaseException:
            self._reader.close()
            raise

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records; waits up to `wait_s` if there are none. Raises as `Reader.poll` does."""
        records, ends = self._reader.poll(most, wait_s)
        for place in {(record.topic, record.partition) for record in records} if self.ends else ():
            self.ends.pop(place, None)
        for place, end in ends.items():
            if self._reader.positions[place] <= end:
                self.ends[place] = end
        return records

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()

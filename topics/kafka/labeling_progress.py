"""Metadata of the committed offsets of `unlabelled`: outcomes of labeling up to each offset.

Offset and metadata are committed with the labeled records. Workers and tools read the progress of labeling from them.
"""

from dataclasses import dataclass

from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.kafka.records import GroupPosition


@dataclass(frozen=True, kw_only=True)
class LabelingProgress:
    """Counts committed with the position of a partition: outcomes of the partition's records below that position."""

    topic_id: str
    """Id of the topic the position belongs to."""
    since: int = 0
    """Offset at which counting began."""
    labeled: int = 0
    left_out: int = 0
    dead_lettered: int = 0
    written: int = 0
    """Offset after the newest record that labeling wrote to the same partition of `rollouts`; 0 if it is unknown."""

    def encode(self) -> str:
        """Encode as the metadata of a committed offset."""
        return f"{self.topic_id} {self.since} {self.labeled} {self.left_out} {self.dead_lettered} {self.written}"

    @classmethod
    def decode(cls, committed: GroupPosition) -> "LabelingProgress":
        """Decode the metadata of a committed offset; if they contain no counts, counting starts at that offset."""
        topic_id, *texts = committed.metadata.split(" ")
        numbers = [number for text in texts if (number := decimal_number(text)) is not None]
        if len(texts) != 5 or len(numbers) < len(texts):
            return cls(topic_id=topic_id, since=max(committed.offset, 0))
        since, labeled, left_out, dead_lettered, written = numbers
        return cls(
            topic_id=topic_id,
            since=since,
            labeled=labeled,
            left_out=left_out,
            dead_lettered=dead_lettered,
            written=written,
        )

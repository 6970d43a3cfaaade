"""LogView: what a view of the log, such as an archive, a store or a buffer, has read of one topic.

A view never guesses an offset: it goes on where it stopped, or says why it cannot. It is then filled again elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.topics.errors import StateRefused, TopicError


class ViewOutdated(TopicError, StateRefused):
    """A view cannot go on: its topic is another one, or records that it lacks were deleted."""


@dataclass
class LogView:
    """One topic of a view."""

    topic: str = ""
    """Full name of the topic; empty before the view was filled from brokers."""
    topic_id: str = ""
    position: dict[int, int] = field(default_factory=dict)
    """Next offset to read, by partition; partitions of which nothing was read are left out."""

    def has(self, partition: int, offset: int) -> bool:
        """Whether the view has read this offset."""
        return offset < self.position.get(partition, 0)

    def check_topic(self, topic: str, topic_id: str, remedy: str) -> None:
        """Raise ViewOutdated if the view was filled from another topic, or this one was created again."""
        if self.topic and (topic, topic_id) != (self.topic, self.topic_id):
            raise ViewOutdated(
                f"{self.topic} with id {self.topic_id} was read before, not {topic} with id {topic_id}, or it was "
                f"deleted and created again since; {remedy}"
            )

    def starts(self, topic: str, bounds: Mapping[int, tuple[int, int]], remedy: str) -> dict[int, int]:
        """Return the offsets to go on at, by partition, given where each begins and ends on the brokers.

        A partition of which nothing was read begins there. Raises ViewOutdated if a position is not between the bounds.
        """
        for partition, at in self.position.items():
            begin, end = bounds.get(partition, (0, -1))
            if at < begin:
                raise ViewOutdated(
                    f"{topic}[{partition}] begins at offset {begin}, and was read up to {at}: the records between them "
                    f"were deleted; {remedy}"
                )
            if at > end:
                raise ViewOutdated(
                    f"{topic}[{partition}] ends at offset {end}, and was read up to {at}, so the topic was deleted and "
                    f"created again; {remedy}"
                )
        return {partition: self.position.get(partition, begin) for partition, (begin, _end) in bounds.items()}

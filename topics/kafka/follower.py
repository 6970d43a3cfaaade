"""A reader that follows topics until its owner closes it; no record stops it, whatever the record contains.

From the start offset on, it delivers every committed record that the topics still keep, in offset order within each
partition. It is not a group member and commits nothing.
"""

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord, Place
from rollstream.topics.kafka.skipping_reader import records_between


class _Approach(NamedTuple):
    """The records of a partition up to the last offset left out, which are read separately."""

    records: Generator[KafkaRecord | None]
    end: int
    """Offset from which the partition is followed in the normal way."""


class TopicFollower(Closing):
    """Follows partitions of topics; its owner decodes the records."""

    def __init__(
        self,
        kafka: KafkaConfig,
        start: Mapping[Place, int],
        *,
        left_out: Mapping[Place, Collection[int]] | None = None,
        **overrides: Any,
    ) -> None:
        """Start at an offset of each partition; `overrides` are client settings. Raises as `Reader.assign` does.

        Records at the offsets in `left_out` are not fetched, but returned as unreadable, if they exist at the start.
        """
        self.ends: dict[Place, int] = {}
        """End offset of each partition that has been read to its end, with transaction markers counted."""
        self.caught_up: set[Place] = set()
        """Partitions that were read to their end, or to the end that they had when the first records arrived."""
        self._behind = set(start)
        self._first_ends: dict[Place, int] = {}
        self._kafka = kafka
        with ExitStack() as stack:
            self._reader = stack.enter_context(Reader(kafka, doing="following", **overrides))
            self._approaches = {
                place: approach
                for place, offsets in (left_out or {}).items()
                if (approach := self._approach(place, start[place], offsets))
            }
            self._reader.assign({place: at for place, at in start.items() if place not in self._approaches})
            stack.pop_all()

    def _approach(self, place: Place, start: int, left_out: Collection[int]) -> _Approach | None:
        """Return how to read up to the last offset of `left_out` on the log; None if none of them is on the log."""
        begin, end = topic_admin.bounds(self._kafka, place[0], [place[1]])[place[1]]
        first = start if start >= 0 else begin
        offsets = sorted(offset for offset in left_out if first <= offset < end)
        return _Approach(self._around(place, first, offsets), offsets[-1] + 1) if offsets else None

    def _around(self, place: Place, at: int, left_out: list[int]) -> Generator[KafkaRecord | None]:
        """Yield the records up to the last offset left out, and None between polls.

        Records to be left out are yielded as unreadable.
        """
        end = left_out[-1] + 1
        while at < end:
            try:
                for record in records_between(self._kafka, *place, at, end, left_out):
                    if record is not None:
                        yield from (_unread(place, offset) for offset in left_out if at <= offset < record.offset)
                        at = record.offset + 1
                    yield record
            except DeadlineExceeded:
                continue  # An open transaction hides the next record: a follower waits until it ends.
            yield from (_unread(place, offset) for offset in left_out if at <= offset)
            at = end

    def add(self, start: Mapping[Place, int]) -> None:
        """Follow further partitions, each from an offset."""
        for place, at in start.items():
            self._behind.add(place)
            self._reader.add(place, at)

    def poll(self, most: int, wait_s: float) -> list[KafkaRecord]:
        """Return up to `most` records; waits up to `wait_s` if there are none. Raises as `Reader.poll` does."""
        apart = self._approached(most)
        if len(apart) == most:
            return apart
        records, ends = self._reader.poll(most - len(apart), 0.0 if apart or self._approaches else wait_s)
        for place in {(record.topic, record.partition) for record in records} if self.ends else ():
            self.ends.pop(place, None)
        for place, end in ends.items():
            if self._reader.positions[place] <= end:
                self.ends[place] = end
                self.caught_up.add(place)
        if self._behind:
            self.caught_up.update(self._reader.passed_ends(self._behind, self._first_ends, records))
            self._behind -= self.caught_up
        return apart + records

    def _approached(self, most: int) -> list[KafkaRecord]:
        """Return up to `most` records of partitions that are read separately; follow each once its part is read."""
        records: list[KafkaRecord] = []
        for place, approach in list(self._approaches.items()):
            for record in approach.records:
                if record is not None:
                    records.append(record)
                if record is None or len(records) == most:
                    break
            else:
                del self._approaches[place]
                self._reader.add(place, approach.end)
            if len(records) == most:
                break
        return records

    def close(self) -> None:
        """Close the consumers."""
        with closing(self._reader), ExitStack() as stack:
            for approach in self._approaches.values():
                stack.enter_context(closing(approach.records))


def read_then_follow(kafka: KafkaConfig, topic: str, note: Callable[[KafkaRecord], None]) -> TopicFollower:
    """Pass the present records of a topic of one partition to `note`, and return a follower of the later records.

    Raises as `read_to_end` does.
    """
    start = BEGINNING
    for message in read_to_end(kafka, topic):
        note(message)
        start = message.offset + 1
    return TopicFollower(kafka, {(topic, 0): start})


def _unread(place: Place, offset: int) -> KafkaRecord:
    return KafkaRecord(*place, offset, readable=False)

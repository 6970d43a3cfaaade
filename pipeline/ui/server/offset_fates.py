"""Ranges of offsets by fate, as the journal lists them; each record that grouping read has one fate or is in flight."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollstream.topics.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED, MOVED
from rollstream.topics.offset_ranges import OffsetRange, from_ranges, to_ranges
from rollstream.topics.records import JournalRecord

IN_FLIGHT, UNREAD = "in_flight", "unread"
FATES = (IN_FLIGHT, UNREAD, BATCHED, DROPPED, DEAD_LETTERED, CONTROL, MOVED)


@dataclass(frozen=True)
class OffsetFates:
    """Journals of a run by partition, as of the moment they were read."""

    journals: Mapping[int, Sequence[JournalRecord]]
    bounds: Mapping[int, tuple[int, int]]
    """First offset and end of each partition of `rollouts`."""

    def ranges(self, fate: str, reason: str | None = None) -> list[OffsetRange]:
        """Ranges of the offsets that have a fate, or were dropped for a reason, in order."""
        return [
            OffsetRange(partition, first, first + count - 1)
            for partition in sorted(self.bounds)
            for first, count in to_ranges(self._offsets(partition, fate, reason)).reshape(-1, 2).tolist()
        ]

    def _offsets(self, partition: int, fate: str, reason: str | None) -> Iterable[int]:
        journal, (low, end) = self.journals.get(partition, ()), self.bounds[partition]
        position = journal[-1].position if journal else low
        if fate == UNREAD:
            return range(max(position, low), end)
        if fate == IN_FLIGHT:
            read = np.arange(max(journal[0].begin, low), position) if journal else np.empty(0, "<i8")
            done = (o for record in journal for f in record.finished for o in from_ranges(f.runs))
            answer: list[int] = np.setdiff1d(read, np.fromiter(done, "<i8")).tolist()
            return answer
        if fate == DROPPED and reason is not None:
            return (drop.offset for record in journal for drop in record.drops if drop.reason == reason)
        return (o for record in journal for f in record.finished if f.fate == fate for o in from_ranges(f.runs))

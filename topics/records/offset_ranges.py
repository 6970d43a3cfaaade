"""Sets of offsets as ranges: (first, count) pairs in the journal, `PARTITION:FIRST-LAST` in settings and commands."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Int64

_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class OffsetRange(NamedTuple):
    """Consecutive offsets of a partition, the last one included."""

    partition: int
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "OffsetRange":
        """Parse `PARTITION:FIRST-LAST`, or `PARTITION:OFFSET` for one offset.

        Raises ConfigurationError for anything else.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is not a range of offsets; write PARTITION:FIRST-LAST, e.g. 0:1200-1450"
            )
        partition, first, last = (int(number) for number in (match[1], match[2], match[3] or match[2]))
        if first > last:
            raise ConfigurationError(f"{text!r} is not a range of offsets: it ends before it begins")
        return cls(partition, first, last)


def to_ranges(offsets: Iterable[int]) -> Int64:
    """Return the ranges of the distinct offsets, given in any order: flattened (first, count) pairs, int64 [2k]."""
    ordered = np.sort(np.fromiter(offsets, "<i8"))
    if not len(ordered):
        return np.empty(0, "<i8")
    # numpy's `unique` hashes, which takes forty times as long for a million offsets.
    ordered = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(ordered)])))
    return np.column_stack((ordered[starts], counts)).astype("<i8").reshape(-1)


def from_ranges(ranges: Int64 | Sequence[int]) -> Iterator[int]:
    """Yield the offsets of flattened (first, count) pairs, in their order."""
    for first, last in spans_of(ranges):
        yield from range(first, last + 1)


def spans_of(ranges: Int64 | Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last offset of each of flattened (first, count) pairs."""
    return [(first, first + count - 1) for first, count in np.asarray(ranges, "<i8").reshape(-1, 2).tolist()]

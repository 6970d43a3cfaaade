"""Records of `journal`: what each transaction of a grouping task changed, with its counts and ranges of offsets."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records.arrays import NO_OFFSETS, Int64


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A record dropped before training, and the reason."""

    offset: int
    reason: str
    detail: str = ""
    uid: str = ""
    environment: str = ""
    policy_version: int = -1
    lowest_version: int = -1
    age_ms: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """A group whose records all have a fate."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str
    sealed_ms: int
    """Stream time since which the group superseded older versions of its example, -1 if it never did: the time at which
    it was offered for batches."""
    finished_ms: int


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedOffsets:
    """Offsets that reached one fate, as ranges."""

    fate: str
    runs: Int64


@dataclass(frozen=True, kw_only=True)
class FateCount:
    """Number of rollouts of an environment with one fate, and sums over them."""

    environment: str
    fate: str
    rollouts: int
    tokens: int
    measured: int = 0
    sampled_tokens: int = 0
    sampled_tokens_squared: float = 0.0
    reward: float = 0.0
    reward_squared: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RateLevel:
    """Remainder of the rates of an environment, in thousandths of a rollout and of a byte."""

    environment: str
    rollouts: int
    bytes: int
    at_ms: int


@dataclass(frozen=True, kw_only=True, eq=False)
class JournalRecord:
    """Changes made by one transaction of one grouping task."""

    partition: int
    sequence: int
    core_version: int
    topic_id: str
    partitions: int
    begin: int
    position: int
    watermark: int
    watermark_stream_time_ms: int
    watermark_policy_version: int
    watermark_generation: int
    watermark_configuration: str
    stream_time_ms: int
    policy_version: int
    generation: int
    batch_number: int
    remembered_since_ms: int = -1
    admitted: Int64 = field(default_factory=lambda: NO_OFFSETS)
    finished: tuple[FinishedOffsets, ...] = ()
    drops: tuple[Drop, ...] = ()
    finished_groups: tuple[FinishedGroup, ...] = ()
    batch_ids: tuple[str, ...] = ()
    counts: tuple[FateCount, ...] = ()
    produced: tuple[FateCount, ...] = ()
    snapshot: bool = False
    unfinished: Int64 = field(default_factory=lambda: NO_OFFSETS)
    delivered: Int64 = field(default_factory=lambda: NO_OFFSETS)
    part: int = 0
    parts: int = 1
    skipped: tuple[int, ...] = ()
    leader_epoch: int = -1
    rates: tuple[RateLevel, ...] = ()


class JournalCounts:
    """Counts as of the newest record added; they are complete once a record that holds every entry has been added."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], FateCount] = {}
        self._produced: dict[tuple[str, str], FateCount] = {}

    def add(self, record: JournalRecord) -> None:
        """Add the next record of the partition."""
        for table, entries in ((self._counts, record.counts), (self._produced, record.produced)):
            if record.snapshot:
                table.clear()
            table.update(((entry.environment, entry.fate), entry) for entry in entries)

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Counts of finished records, by environment and fate."""
        return _in_order(self._counts)

    @property
    def produced(self) -> tuple[FateCount, ...]:
        """Counts of all records read, except valid marks and cancellations, by environment."""
        return _in_order(self._produced)


def _in_order(table: dict[tuple[str, str], FateCount]) -> tuple[FateCount, ...]:
    return tuple(table[key] for key in sorted(table))


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

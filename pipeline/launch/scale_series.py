"""Measurements of a demo of scaling over time, and evidence from the journal of how `rollouts` was read.

A journal record names the offsets that its transaction read and the transactional id that wrote it. The functions are
pure except `readings` and `append_times`, which read topics.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollstream.consumers.grouping.process.bootstrap import WRITER
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import JournalRecord
from rollstream.topics.wire.catalogue import topic_name

WINDOW_S = 3.0
"""Time over which rates are averaged: processes report their positions about every second."""


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The run at one time."""

    at_s: float
    """Time since the load began."""
    produced: int
    """Rollouts that the broker has acknowledged."""
    read: int
    """Records that grouping had read, by its newest gauges."""
    lag: int
    """Records that waited for grouping, by its newest gauges."""
    processes: int
    """Grouping processes that were ready."""
    wanted: int
    """Grouping processes that the autoscaler wanted."""


@dataclass(frozen=True)
class ScaleSeries:
    """Points in order of time."""

    points: tuple[ScalePoint, ...] = ()

    def with_point(self, point: ScalePoint) -> "ScaleSeries":
        """Return the series with one more point."""
        return ScaleSeries((*self.points, point))

    @property
    def seconds(self) -> float:
        """Time of the last point."""
        return self.points[-1].at_s if self.points else 0.0

    @property
    def times(self) -> tuple[float, ...]:
        """Time of each point."""
        return tuple(point.at_s for point in self.points)

    @property
    def lags(self) -> tuple[float, ...]:
        """Lag at each point."""
        return tuple(float(point.lag) for point in self.points)

    @property
    def processes(self) -> tuple[float, ...]:
        """Processes that were ready at each point."""
        return tuple(float(point.processes) for point in self.points)

    @property
    def produced_per_s(self) -> tuple[float, ...]:
        """Rollouts written per second, up to each point."""
        return _rates(self.times, tuple(point.produced for point in self.points))

    @property
    def read_per_s(self) -> tuple[float, ...]:
        """Records read per second, up to each point."""
        return _rates(self.times, tuple(point.read for point in self.points))

    @property
    def panels(self) -> dict[str, dict[str, tuple[float, ...]]]:
        """The series to draw, by the title of their chart and their name."""
        return {
            "Records that wait (lag)": {"lag": self.lags},
            "Grouping processes": {"processes": self.processes},
            "Records a second": {"rollouts written": self.produced_per_s, "records read": self.read_per_s},
        }

    @property
    def peak_lag(self) -> int:
        """Highest lag."""
        return max((point.lag for point in self.points), default=0)

    @property
    def most_processes(self) -> int:
        """Most processes that were ready at once."""
        return max((point.processes for point in self.points), default=0)

    @property
    def changes(self) -> tuple[tuple[float, int], ...]:
        """Times at which the number of ready processes changed, and the new numbers; the first entry is the start."""
        changes: list[tuple[float, int]] = []
        for point in self.points:
            if not changes or changes[-1][1] != point.processes:
                changes.append((point.at_s, point.processes))
        return tuple(changes)

    def as_list(self) -> list[dict[str, Any]]:
        """The points as plain values for JSON."""
        return [asdict(point) for point in self.points]


def _rates(times: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    rates, first = [], 0
    for number, (at_s, count) in enumerate(zip(times, counts, strict=True)):
        while times[first] < at_s - WINDOW_S and first < number - 1:
            first += 1
        passed_s = at_s - times[first]
        rates.append((count - counts[first]) / passed_s if passed_s > 0 else 0.0)
    return tuple(rates)


@dataclass(frozen=True)
class Reading:
    """Offsets of a partition that one committed transaction read."""

    partition: int
    begin: int
    end: int
    writer: str
    """Transactional id of the process."""
    at_ms: int
    """When its journal record was appended."""


@dataclass(frozen=True)
class Coverage:
    """How often offsets were read in committed transactions."""

    offsets: int
    """Offsets that were read."""
    twice: int
    """Offsets that were read more than once, counted each time beyond the first."""
    missing: int
    """Offsets that were never read, though later offsets of their partition were read."""


@dataclass(frozen=True)
class Handover:
    """The move of one partition from one process to another."""

    partition: int
    giver: str
    taker: str
    at_ms: int
    """When the journal record of the first transaction in which `taker` read records was appended."""
    seconds: float
    """Time for which records of the partition waited because of the handover."""


def readings(kafka: KafkaConfig, run: str) -> list[Reading]:
    """Return the offsets that committed transactions read, in the order of the journal within each partition."""
    messages = read_to_end(kafka, topic_name(run, "journal"))
    return [
        Reading(record.partition, record.begin, record.position, message.header(WRITER) or "", message.timestamp_ms)
        for message, record in SkippedRecords("evidence").records(JournalRecord, messages)
    ]


def append_times(kafka: KafkaConfig, run: str) -> dict[tuple[int, int], int]:
    """Return the append time of each record of `rollouts`, in milliseconds, by partition and offset."""
    messages = read_to_end(kafka, topic_name(run, "rollouts"))
    return {(message.partition, message.offset): message.timestamp_ms for message in messages}


def coverage(done: Iterable[Reading]) -> Coverage:
    """Count the offsets that were read, read more than once and never read."""
    by_partition: defaultdict[int, list[Reading]] = defaultdict(list)
    for reading in done:
        by_partition[reading.partition].append(reading)
    offsets = twice = missing = 0
    for of_partition in by_partition.values():
        end = 0
        for reading in sorted(of_partition, key=lambda reading: (reading.begin, reading.end)):
            missing += max(0, reading.begin - end)
            twice += max(0, min(end, reading.end) - reading.begin)
            offsets += max(0, reading.end - max(end, reading.begin))
            end = max(end, reading.end)
    return Coverage(offsets, twice, missing)


def handovers(done: Iterable[Reading], appended: Mapping[tuple[int, int], int]) -> list[Handover]:
    """Return the handovers of partitions, in order of time.

    A wait begins with the last transaction of `giver`, or when the partition's next record is appended, if later.
    """
    last: dict[int, Reading] = {}
    changes = []
    for reading in done:
        before = last.get(reading.partition)
        if before is not None and before.writer != reading.writer:
            if reading.begin == reading.end:
                continue  # This transaction read no records.
            if before.end > 0:
                since_ms = max(before.at_ms, appended.get((reading.partition, reading.begin), before.at_ms))
                seconds = max(0, reading.at_ms - since_ms) / 1000
                changes.append(Handover(reading.partition, before.writer, reading.writer, reading.at_ms, seconds))
        last[reading.partition] = reading
    return sorted(changes, key=lambda change: change.at_ms)

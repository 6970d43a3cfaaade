"""Evidence from the journal of how `rollouts` was read: offsets read once or repeatedly, and handovers of partitions.

A journal record names the offsets that its transaction read and the transactional id that wrote it. The functions are
pure except `readings` and `append_times`, which read topics.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollstream.consumers.grouping.process.bootstrap import WRITER
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import JournalRecord
from rollstream.topics.wire.catalogue import topic_name


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

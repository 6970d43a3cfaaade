"""Compares the records that a split moved with their copies: each offset that moved has one copy, and no other has any.

The journal of the run that ends names the offsets; headers in the run that goes on name where its copies come from.
"""

from collections import Counter
from typing import Any

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.fates import MOVED
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.offset_ranges import from_ranges
from rollstream.topics.records import JournalRecord, RunSplit
from rollstream.topics.run_splits import moved_from, splits_of

_NAMED = 3
Place = tuple[int, int]
"""Partition and offset in `rollouts` of the run that ends."""


def check_splits(kafka: KafkaConfig, run: str, result: Ledger) -> None:
    """Add the splits that a run has a part in to its ledger, with contradictions between the two runs."""
    successor, predecessor = splits_of(kafka, run)
    if successor is not None:
        result.successor = _compared(kafka, successor, successor.successor, result)
        for row in result.learners.values():
            if "waiting" in row:
                row["carried"] = row.pop("waiting")
    if predecessor is not None:
        result.predecessor = _compared(kafka, predecessor, predecessor.run, result)


def _compared(kafka: KafkaConfig, split: RunSplit, other: str, result: Ledger) -> dict[str, Any]:
    """Compare both runs of a split, and return what the ledger says of `other`."""
    book: dict[str, Any] = {
        "run": other,
        "partitions": split.partitions,
        "phase": split.phase,
        "carried": split.carried,
    }
    try:
        # Journal first: a copy and its offset in the journal commit together.
        moved = moved_places(kafka, split.run)
        copies, whole = _copies(kafka, split)
    except TopicError:
        return {**book, "gone": True}
    problems = differences(split, moved, copies, whole=whole)
    if split.phase == "moved":
        for problem in problems:
            result.problem(problem)
    elif problems:
        result.undecided.append(f"run {split.run} is being split into {split.successor}; run the split to its end")
    return {**book, "moved": len(moved)}


def moved_places(kafka: KafkaConfig, run: str) -> set[Place]:
    """Places in `rollouts` whose records have moved to the successor of a run, by its journal."""
    messages = read_to_end(kafka, topic_name(run, "journal"))
    return {
        (record.partition, offset)
        for _message, record in SkippedRecords("ledger", logged=False).records(JournalRecord, messages)
        for finished in record.finished
        if finished.fate == MOVED
        for offset in from_ranges(finished.runs)
    }


def _copies(kafka: KafkaConfig, split: RunSplit) -> tuple[Counter[Place], bool]:
    """How many copies the successor has of each place, and whether none of its records is pruned."""
    topic = topic_name(split.successor, "rollouts")
    whole = all(begin == 0 for begin, _end in topic_admin.bounds(kafka, topic).values())
    copies: Counter[Place] = Counter()
    for message in read_to_end(kafka, topic):
        source = moved_from(message)
        if source is not None and source[0] == split.run:
            copies[source[1:]] += 1
    return copies, whole


def differences(split: RunSplit, moved: set[Place], copies: Counter[Place], *, whole: bool) -> list[str]:
    """Contradictions between the places that moved and their copies; `whole` is whether no copy was pruned."""
    problems = []
    missing = sorted(moved - copies.keys()) if whole else []
    twice = sorted(place for place, count in copies.items() if count > 1)
    for places, what in (
        (missing, f"moved, and run {split.successor} has no copy of it"),
        (sorted(copies.keys() - moved), f"copied to run {split.successor}, and has not moved"),
        (twice, f"copied to run {split.successor} more than once"),
    ):
        problems += [f"rollouts[{p}] offset {o} of run {split.run} is {what}" for p, o in places[:_NAMED]]
        if len(places) > _NAMED:
            problems.append(f"so are {len(places) - _NAMED} others")
    return problems

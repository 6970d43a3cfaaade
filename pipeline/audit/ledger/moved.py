"""Compares the records that a split moved with their copies: each moved offset must have one copy, all others none.

The journal of the old run names the moved offsets; headers in the new run name the offset that each copy comes from.
"""

from collections import Counter
from dataclasses import asdict
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
from rollstream.topics.run_splits import Splits, moved_from

_NAMED = 3
Place = tuple[int, int]
"""Partition and offset in `rollouts` of the old run."""


class SplitRecords:
    """Compares a run with its successor, into which it was split, and its predecessor, which was split into it.

    While records move, each reading compares all of them. Once everything has moved and the two runs agree, they are
    compared again only after records of either were deleted.
    """

    def __init__(self, kafka: KafkaConfig) -> None:
        self._kafka = kafka
        self._compared: dict[str, list[Any]] = {}
        """By name of the other run: the subject of the comparison, and the ledger's data about that run."""

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return self._compared

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._compared = state

    def check(self, splits: Splits, result: Ledger) -> None:
        """Add the splits of a run to its ledger, with contradictions between the two runs."""
        successor, predecessor = splits
        if successor is not None:
            result.successor = self._look(successor, successor.successor, result)
            for row in result.learners.values():
                if "waiting" in row:
                    row["carried"] = row.pop("waiting")
        if predecessor is not None:
            result.predecessor = self._look(predecessor, predecessor.run, result)

    def _look(self, split: RunSplit, other: str, result: Ledger) -> dict[str, Any]:
        """Compare both runs of a split, or reuse an earlier result; return the ledger's data about `other`."""
        subject = self._subject(split)
        known, book = self._compared.get(other, (None, {}))
        if subject is not None and known == subject:
            return dict(book)
        book, agree = _compared(self._kafka, split, other, result)
        if subject is not None and agree and split.phase == "moved":
            self._compared[other] = [subject, dict(book)]
        return book

    def _subject(self, split: RunSplit) -> list[Any] | None:
        """Return the split, and where the topics of both runs begin; None if a topic no longer exists."""
        begins = []
        for run, name in ((split.run, "journal"), (split.successor, "rollouts")):
            topic = topic_name(run, name)
            try:
                limits = topic_admin.bounds(self._kafka, topic)
            except TopicError:
                return None
            begins.append([topic_admin.topic_ids(self._kafka, [topic])[topic], [b for b, _end in limits.values()]])
        return [asdict(split), begins]


def _compared(kafka: KafkaConfig, split: RunSplit, other: str, result: Ledger) -> tuple[dict[str, Any], bool]:
    """Compare both runs of a split; return the ledger's data about `other`, and whether no contradiction was found."""
    book: dict[str, Any] = {
        "run": other,
        "partitions": split.partitions,
        "phase": split.phase,
        "carried": split.carried,
    }
    try:
        # Read the journal first: it names no offset whose copy is not committed, because both commit together.
        moved = moved_places(kafka, split.run)
        copies, whole = _copies(kafka, split)
    except TopicError:
        return {**book, "gone": True}, True
    problems = differences(split, moved, copies, whole=whole)
    if split.phase == "moved":
        for problem in problems:
            result.problem(problem)
    elif problems:
        result.undecided.append(f"run {split.run} is being split into {split.successor}; run the split to its end")
    return {**book, "moved": len(moved)}, not problems


def moved_places(kafka: KafkaConfig, run: str) -> set[Place]:
    """Return the places in `rollouts` whose records have moved to the run's successor, according to its journal."""
    messages = read_to_end(kafka, topic_name(run, "journal"))
    return {
        (record.partition, offset)
        for _message, record in SkippedRecords("ledger", logged=False).records(JournalRecord, messages)
        for finished in record.finished
        if finished.fate == MOVED
        for offset in from_ranges(finished.runs)
    }


def _copies(kafka: KafkaConfig, split: RunSplit) -> tuple[Counter[Place], bool]:
    """Return the number of copies that the successor has of each place, and whether none of its records was pruned."""
    topic = topic_name(split.successor, "rollouts")
    whole = all(begin == 0 for begin, _end in topic_admin.bounds(kafka, topic).values())
    copies: Counter[Place] = Counter()
    for message in read_to_end(kafka, topic):
        source = moved_from(message)
        if source is not None and source[0] == split.run:
            copies[source[1:]] += 1
    return copies, whole


def differences(split: RunSplit, moved: set[Place], copies: Counter[Place], *, whole: bool) -> list[str]:
    """Return the contradictions between the moved places and their copies; `whole` is whether no copy was pruned."""
    problems = []
    missing = sorted(moved - copies.keys()) if whole else []
    twice = sorted(place for place, count in copies.items() if count > 1)
    for places, what in (
        (missing, f"moved but not copied to run {split.successor}"),
        (sorted(copies.keys() - moved), f"copied to run {split.successor} but not moved"),
        (twice, f"copied to run {split.successor} more than once"),
    ):
        problems += [f"rollouts[{p}] offset {o} of run {split.run} is {what}" for p, o in places[:_NAMED]]
        if len(places) > _NAMED:
            problems.append(f"{len(places) - _NAMED} more offsets are {what}")
    return problems

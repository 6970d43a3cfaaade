"""Splits of runs, as `control` records them: a run ends and continues as a run with another number of partitions.

The record is on `control` of both runs. It keeps roles out of a run that was split, and out of a run that is still
being filled.
"""

from typing import NamedTuple

from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import StateRefused, TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.keys import encode_key
from rollstream.topics.records import RunSplit

SUCCESSOR_KEY = encode_key("split", "successor")
"""Key of the record on `control` of the run that ends."""
PREDECESSOR_KEY = encode_key("split", "predecessor")
"""Key of the record on `control` of the run that continues it."""
MOVED_FROM = "rollstream.moved.from"
"""Header of a copied record of `rollouts`: RUN:PARTITION:OFFSET of the record it copies."""
MOVED_APPENDED = "rollstream.moved.appended"
"""Header of a copied record: the append time of the original record in milliseconds."""


class Splits(NamedTuple):
    """The splits in which a run takes part."""

    successor: RunSplit | None = None
    """The split that ends the run."""
    predecessor: RunSplit | None = None
    """The split that the run came from."""


def splits_of(kafka: KafkaConfig, run: str) -> Splits:
    """Return the splits on `control` of a run; none for a run without the topic."""
    skipped, splits = SkippedRecords(logged=False), Splits()
    try:
        for message in read_to_end(kafka, topic_name(run, "control")):
            splits = note_split(splits, message, skipped)
    except TopicError:
        return Splits()
    return splits


def note_split(splits: Splits, message: KafkaRecord, skipped: SkippedRecords) -> Splits:
    """Return the splits after a record of `control`; other kinds of records change nothing."""
    if message.key == SUCCESSOR_KEY:
        return splits._replace(successor=_record(message, skipped))
    if message.key == PREDECESSOR_KEY:
        return splits._replace(predecessor=_record(message, skipped))
    return splits


def _record(message: KafkaRecord, skipped: SkippedRecords) -> RunSplit | None:
    return None if message.value is None else skipped.decode(RunSplit, message)


def check_open(kafka: KafkaConfig, run: str, *, while_closing: bool = False) -> None:
    """Raise StateRefused if roles of a run must not write because it was split, or is being split or filled.

    With `while_closing`, a run that is being split counts as open: some roles must keep working while other roles end.
    """
    clients.check_broker(kafka)
    successor, predecessor = splits_of(kafka, run)
    if successor is not None and not (while_closing and successor.phase != "moved"):
        again = "" if successor.phase == "moved" else f", once `rollstream split --run {run}` has been run to its end"
        raise StateRefused(
            f"run {run} was split: it continues as run {successor.successor} with {successor.partitions} partitions; "
            f"start this with --run {successor.successor}{again}"
        )
    if predecessor is not None and predecessor.phase != "moved":
        raise StateRefused(
            f"run {run} is being filled from run {predecessor.run}; run `rollstream split --run {predecessor.run} "
            f"--into {run} --partitions {predecessor.partitions}` to its end first"
        )


def moved_from(message: KafkaRecord) -> tuple[str, int, int] | None:
    """Return run, partition and offset of the record that this one copies; None if it is not a copy."""
    run, _, place = (message.header(MOVED_FROM) or "").partition(":")
    first, _, second = place.partition(":")
    partition, offset = decimal_number(first), decimal_number(second)
    return None if not run or partition is None or offset is None else (run, partition, offset)

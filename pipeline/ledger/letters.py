"""Dead letters against the journal: one for each record that it calls dead-lettered, and no other."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Message

from consumers.grouping.changes import DEAD_LETTERED
from pipeline.journals import PartitionJournal
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.hidden import Hidden
from pipeline.ledger.tail import Tail
from topics.catalogue import name_in_run
from topics.config import KafkaConfig
from topics.errors import RecordError
from topics.headers import header_pairs
from topics.skipped import SkippedRecords

REDRIVEN = "rollstream.redriven"
"""Header of a note in dead-letters: the offset, on the same partition, of the letter that was sent again."""
Letters = dict[int, Counter[int]]
"""By partition, how many letters there are of each offset."""


def check_dead_letters(
    kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], hidden: Hidden, result: Ledger
) -> None:
    """Dead letters against the journal. They are never pruned: of those of before its beginning the number must be.

    A letter tells by its headers where it was: in older runs all partitions share one of dead letters.
    """
    tail, skipped = Tail(kafka, run, "dead-letters"), SkippedRecords("ledger", logged=False)
    letters: Letters = {p: Counter() for p in journals}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        _take(tail.messages(), journals, letters, skipped)
        missing = _lacking(journals, letters)
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    result.note_skipped(skipped)
    if missing:
        later: Letters = {p: Counter() for p in journals}
        _take(hidden.messages("dead-letters"), journals, later, SkippedRecords("ledger", logged=False))
        for number in sorted(missing):
            found = set(later[number]) - set(letters[number])
            # Of those of before the journal begins no offset is known.
            wanted = {o for o in found if journals[number].settled_before(o)} | (found & missing[number])
            for offset in sorted(wanted):
                letters[number][offset] = 1
                result.undecide(f"dead letter of rollouts[{number}] offset {offset}", hidden.places("dead-letters"))
    for number, journal in journals.items():
        named, here = journal.offsets(DEAD_LETTERED), letters[number]
        before = {offset for offset in here if journal.settled_before(offset)}
        if len(before) != journal.before[DEAD_LETTERED]:
            result.problem(
                f"rollouts[{number}]: {len(before)} records below offset {journal.base} are in dead-letters, the "
                f"journal counts {journal.before[DEAD_LETTERED]}"
            )
        for offset in sorted(named.symmetric_difference(here.keys() - before)):
            place = "the journal alone" if offset in named else "the topic alone"
            result.problem(f"rollouts[{number}] offset {offset} is dead-lettered in {place}")
        for offset, times in here.items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is dead-lettered {times} times")


def of_rollouts(headers: Mapping[str, Any]) -> bool:
    """Whether a dead letter was in `rollouts`, of this run or of the one it was restored from."""
    source = (headers.get("__streams.errors.topic") or b"rollouts").decode(errors="replace")
    return name_in_run(source) == "rollouts"


def _lacking(journals: Mapping[int, PartitionJournal], letters: Letters) -> dict[int, set[int]]:
    """By partition, offsets that the journal calls dead-lettered and that have no letter; partitions that lack none,
    nor any of before the journal begins, are left out."""
    found = {}
    for number, journal in journals.items():
        lacking = journal.offsets(DEAD_LETTERED) - letters[number].keys()
        before = sum(journal.settled_before(offset) for offset in letters[number])
        if lacking or before < journal.before[DEAD_LETTERED]:
            found[number] = lacking
    return found


def _take(
    messages: Iterable[Message], journals: Mapping[int, PartitionJournal], letters: Letters, skipped: SkippedRecords
) -> None:
    """Count the letters of records up to the position of their partition."""
    for message in messages:
        with skipped.passing(message):
            headers: dict[str, Any] = dict(header_pairs(message))
            if REDRIVEN in headers:
                continue  # A note that a letter was sent again, which is another record of rollouts.
            if not of_rollouts(headers):
                continue  # Of trajectories that could not be labelled.
            try:
                number = int(headers["__streams.errors.partition"])
                offset = int(headers["__streams.errors.offset"])
                position = journals[number].position
            except (KeyError, ValueError, TypeError) as error:
                raise RecordError("names no partition and offset of rollouts") from error
            if offset < position:
                letters[number][offset] += 1

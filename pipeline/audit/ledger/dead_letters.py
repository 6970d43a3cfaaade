"""Compares dead letters with the journal: one for each record that it calls dead-lettered, and no other."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.topics.catalogue import name_in_run
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.fates import DEAD_LETTERED
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords

REDRIVEN = "rollstream.redriven"
"""Header of a note in dead-letters: the offset, on the same partition, of the letter that was sent again."""
Letters = dict[int, Counter[int]]
"""By partition, the number of letters for each offset."""


def check_dead_letters(
    kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], hidden: HiddenRecords, result: Ledger
) -> None:
    """Compare dead letters with the journal.

    Dead letters are never pruned, so the number from before the first snapshot must match its counts. Headers of a
    letter name its source, because in older runs all partitions share one partition of dead letters.
    """
    tail, skipped = TopicTail(kafka, run, "dead-letters"), SkippedRecords("ledger", logged=False)
    letters: Letters = {p: Counter() for p in journals}

    def read() -> dict[int, set[int]]:
        _count_letters(tail.messages(), journals, letters, skipped)
        return _missing_letters(journals, letters)

    missing = read_until_complete(read)
    result.note_skipped(skipped)
    if missing:
        _add_hidden(journals, letters, missing, hidden, result)
    for number, journal in journals.items():
        named, counted = journal.offsets(DEAD_LETTERED), letters[number]
        before = {offset for offset in counted if journal.settled_before(offset)}
        if len(before) != journal.before[DEAD_LETTERED]:
            result.problem(
                f"rollouts[{number}]: {len(before)} records below offset {journal.base} are in dead-letters, the "
                f"journal counts {journal.before[DEAD_LETTERED]}"
            )
        for offset in sorted(named.symmetric_difference(counted.keys() - before)):
            place = "the journal alone" if offset in named else "the topic alone"
            result.problem(f"rollouts[{number}] offset {offset} is dead-lettered in {place}")
        for offset, times in counted.items():
            if times > 1:
                result.problem(f"rollouts[{number}] offset {offset} is dead-lettered {times} times")


def _add_hidden(
    journals: Mapping[int, PartitionJournal],
    letters: Letters,
    missing: Mapping[int, set[int]],
    hidden: HiddenRecords,
    result: Ledger,
) -> None:
    """Add missing letters that an open transaction hides, as undecided."""
    invisible: Letters = {p: Counter() for p in journals}
    _count_letters(hidden.messages("dead-letters"), journals, invisible, SkippedRecords("ledger", logged=False))
    for number in sorted(missing):
        offsets = set(invisible[number]) - set(letters[number])
        # Before its first snapshot, a pruned journal names no offsets.
        before = {offset for offset in offsets if journals[number].settled_before(offset)}
        for offset in sorted(before | (offsets & missing[number])):
            letters[number][offset] = 1
            result.undecide(f"dead letter of rollouts[{number}] offset {offset}", hidden.places("dead-letters"))


def of_rollouts(headers: Mapping[str, Any]) -> bool:
    """Whether a dead letter was in `rollouts`, of this run or of the run it was restored from."""
    source = (headers.get("__streams.errors.topic") or b"rollouts").decode(errors="replace")
    return name_in_run(source) == "rollouts"


def _missing_letters(journals: Mapping[int, PartitionJournal], letters: Letters) -> dict[int, set[int]]:
    """Offsets that the journal calls dead-lettered without a letter, by partition.

    A partition is absent if it lacks neither a letter that its journal names nor one that its counts include.
    """
    missing = {}
    for number, journal in journals.items():
        offsets = journal.offsets(DEAD_LETTERED) - letters[number].keys()
        before = sum(journal.settled_before(offset) for offset in letters[number])
        if offsets or before < journal.before[DEAD_LETTERED]:
            missing[number] = offsets
    return missing


def _count_letters(
    messages: Iterable[KafkaRecord], journals: Mapping[int, PartitionJournal], letters: Letters, skipped: SkippedRecords
) -> None:
    """Count letters of records below the position of their partition."""
    for message in messages:
        with skipped.passing(message):
            headers: dict[str, Any] = dict(message.header_pairs())
            if REDRIVEN in headers:
                continue  # The record is a note that a letter was sent again as another record of rollouts.
            if not of_rollouts(headers):
                continue  # Dead letters of trajectories that could not be labeled.
            try:
                number = int(headers["__streams.errors.partition"])
                offset = int(headers["__streams.errors.offset"])
                position = journals[number].position
            except (KeyError, ValueError, TypeError) as error:
                raise RecordError("names no partition and offset of rollouts") from error
            if offset < position:
                letters[number][offset] += 1

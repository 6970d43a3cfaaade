"""Compares dead letters with the journal: each record that the journal calls dead-lettered has exactly one letter."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.topic_tail import HiddenRecords, TopicTail, read_until_complete
from rollstream.pipeline.audit.partition_journal import LETTERED, PartitionJournal, code_of, codes
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records.fates import DEAD_LETTERED
from rollstream.topics.wire.catalogue import name_in_run

REDRIVEN = "rollstream.redriven"
"""Header of a note in dead-letters that a letter was sent again: the offset of the letter in the same partition."""
_DEAD = code_of(DEAD_LETTERED)


class DeadLetters:
    """The dead letters of `rollouts` that have been read.

    They are never pruned, so their number before the first snapshot must match the journal's counts. The source of a
    letter is read from its headers, because in older runs all partitions share one partition of dead letters.
    """

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self.tail = TopicTail(kafka, run, "dead-letters")
        self._times: dict[tuple[int, int], int] = {}
        """Number of letters for a partition and offset, if there is more than one."""

    def check(self, journals: Mapping[int, PartitionJournal], hidden: HiddenRecords, result: Ledger) -> None:
        """Read new records, and compare all letters with the journals."""

        def read() -> dict[int, set[int]]:
            self._read(journals)
            return _missing_letters(journals)

        missing = read_until_complete(read)
        invisible = _hidden_letters(journals, missing, hidden, result) if missing else {}
        for number, journal in journals.items():
            runs = journal.table.runs().clipped(0, journal.position)
            extra = invisible.get(number, set())
            before = _before(journal) + sum(journal.settled_before(offset) for offset in extra)
            if before != journal.before[DEAD_LETTERED]:
                result.problem(
                    f"rollouts[{number}]: {before} records below offset {journal.base} are in dead-letters, but the "
                    f"journal counts {journal.before[DEAD_LETTERED]}"
                )
            named, lettered = codes(runs.values) == _DEAD, runs.values & LETTERED != 0
            settled = runs.where((codes(runs.values) == 0) & lettered).clipped(max(journal.base, 0), journal.position)
            apart = {*runs.where(named & ~lettered).offsets(), *settled.offsets()}
            apart |= set(runs.where(lettered & ~named & (codes(runs.values) != 0)).offsets())
            for offset in sorted(apart.symmetric_difference(o for o in extra if not journal.settled_before(o))):
                place = "the journal alone" if journal.fate(offset) == DEAD_LETTERED else "the topic alone"
                result.problem(f"rollouts[{number}] offset {offset} is dead-lettered in {place}")
            for (partition, offset), times in sorted(self._times.items()):
                if partition == number and offset < journal.position:
                    result.problem(f"rollouts[{number}] offset {offset} is dead-lettered {times} times")

    def _read(self, journals: Mapping[int, PartitionJournal]) -> None:
        for number, offset in _letters(self.tail.messages(), journals, self.tail.skipped):
            if journals[number].table.set_bits_at(offset, LETTERED) & LETTERED:
                self._times[number, offset] = self._times.get((number, offset), 1) + 1


def _before(journal: PartitionJournal) -> int:
    """Return the number of letters for records that got their fate before the first snapshot."""
    runs = journal.table.runs()
    lettered = runs.where((codes(runs.values) == 0) & (runs.values & LETTERED != 0))
    return lettered.clipped(0, min(journal.base, journal.position)).total


def _missing_letters(journals: Mapping[int, PartitionJournal]) -> dict[int, set[int]]:
    """Return, by partition, the offsets that the journal calls dead-lettered and that have no letter.

    A partition is absent if it has every letter that its journal names, and as many letters as its journal counts.
    """
    missing = {}
    for number, journal in journals.items():
        runs = journal.known()
        offsets = set(runs.where((codes(runs.values) == _DEAD) & (runs.values & LETTERED == 0)).offsets())
        if offsets or _before(journal) < journal.before[DEAD_LETTERED]:
            missing[number] = offsets
    return missing


def _hidden_letters(
    journals: Mapping[int, PartitionJournal],
    missing: Mapping[int, set[int]],
    hidden: HiddenRecords,
    result: Ledger,
) -> dict[int, set[int]]:
    """Return the missing letters that an open transaction hides, and report them as undecided."""
    invisible: dict[int, set[int]] = {}
    for number, offset in _letters(hidden.messages("dead-letters"), journals, SkippedRecords("ledger", logged=False)):
        journal = journals[number]
        if number not in missing or offset >= journal.position or journal.table[offset] & LETTERED:
            continue
        # Before its first snapshot, a pruned journal names no offsets.
        if offset in missing[number] or journal.settled_before(offset):
            invisible.setdefault(number, set()).add(offset)
    for number, offsets in sorted(invisible.items()):
        for offset in sorted(offsets):
            result.undecide(f"dead letter of rollouts[{number}] offset {offset}", hidden.places("dead-letters"))
    return invisible


def of_rollouts(headers: Mapping[str, Any]) -> bool:
    """Whether the record of a dead letter was in `rollouts`, of this run or of the run that it was restored from."""
    source = (headers.get("__streams.errors.topic") or b"rollouts").decode(errors="replace")
    return name_in_run(source) == "rollouts"


def _letters(
    messages: Iterable[KafkaRecord], journals: Mapping[int, PartitionJournal], skipped: SkippedRecords
) -> Iterator[tuple[int, int]]:
    """Yield partition and offset in `rollouts` of each letter."""
    for message in messages:
        place = None
        with skipped.passing(message):
            headers: dict[str, Any] = dict(message.header_pairs())
            # Skip letters about trajectories, and notes that say that a letter was sent again as another record.
            if REDRIVEN not in headers and of_rollouts(headers):
                place = _place(headers, journals)
        if place is not None:
            yield place


def _place(headers: Mapping[str, Any], journals: Mapping[int, PartitionJournal]) -> tuple[int, int]:
    try:
        number = int(headers["__streams.errors.partition"])
        offset = int(headers["__streams.errors.offset"])
    except (KeyError, ValueError, TypeError) as error:
        raise RecordError("names no partition and offset of rollouts") from error
    if number not in journals or not 0 <= offset < 1 << 62:
        raise RecordError("names no partition and offset of rollouts")
    return number, offset

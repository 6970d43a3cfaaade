"""The journal of one partition of `rollouts`, complete or pruned, as the ledger reads it.

In a pruned journal, fates are known by offset from the first complete snapshot on; earlier fates are known only from
the counts in that snapshot. Facts about an offset from other topics are stored next to its fate, and both are compared
for all offsets at once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from rollstream.pipeline.audit.configuration_history import ConfigurationHistory
from rollstream.pipeline.audit.offset_table import OffsetRuns, OffsetTable, Values, offsets_named
from rollstream.topics.records import FateCount, Int64, JournalRecord
from rollstream.topics.records.fates import DROPPED, FATES, dropped_for, fate_and_reason
from rollstream.topics.records.journal import JournalCounts

IN_FLIGHT = "in_flight"
PLACES = (IN_FLIGHT, *FATES)
CODES = (1 << 20) - 1
"""Bits of a value with the code of the fate: the fate's index in the journal's list of places plus one; 0 for none."""
SEEN, ROLLOUT, CARRIED, LETTERED, DELIVERED, DELIVERED_BEFORE = (1 << bit for bit in range(20, 26))
"""Facts about an offset: its record was read, it is a rollout, a batch carries it, a dead letter names it, it was
batched after the first snapshot, it was batched before that snapshot, which still lists it as unfinished."""
_MOST_NAMED = 20
_IN_FLIGHT_CODE = PLACES.index(IN_FLIGHT) + 1
_DROPPED_CODE = PLACES.index(DROPPED) + 1
Mask = npt.NDArray[np.bool_]


def codes(values: Values) -> Values:
    """Return the codes of the fates in values of the table."""
    return values & np.uint32(CODES)


def code_of(fate: str) -> int:
    """Return the code of a fate; for drops with a known reason, there are further codes."""
    return PLACES.index(fate) + 1


class PartitionJournal:
    """Fate of each offset from the first snapshot to the position, and the counts before and after that snapshot."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = -1
        self.position = 0
        self.base = -1
        """Position of the first snapshot, 0 for an unpruned journal; -1 if there is none yet."""
        self.base_counts: tuple[FateCount, ...] = ()
        self.base_batches = 0
        self.batches = 0
        """Number of the next batch."""
        self.leader_epochs: dict[int, int] = {}
        """By offset, the leader epoch of the last record that each transaction read, until it has been compared."""
        self.topic_id = ""
        self.hidden = False
        """Whether an open transaction hides the newest records, so that the journal ends before the committed
        position."""
        self.table = OffsetTable()
        self.batch_ids: list[str] = []
        """Batches named since this list was last cleared."""
        self.problems: list[str] = []
        """The first contradictions within the journal."""
        self._places = list(PLACES)
        """Fates, and then drops by reason, in the order of their codes."""
        self._reasons: dict[int, str] = {}
        """Reasons of drops whose offsets have no fate yet."""
        self.configurations = ConfigurationHistory()
        self._sums = JournalCounts()
        self._origin = 0
        self._joining = False

    def read(self, record: JournalRecord) -> None:
        """Process the next journal record."""
        # A pruned journal may begin with any sequence number.
        follows = record.sequence == self.sequence + 1 and record.begin == self.position
        if not follows and not (self.sequence < 0 < record.sequence):
            self.problem(
                f"journal[{self.number}] sequence {record.sequence} begins at offset {record.begin}; sequence "
                f"{self.sequence + 1} at {self.position} was expected"
            )
        if record.topic_id != self.topic_id:
            self.leader_epochs.clear()  # These epochs are of an earlier topic of the same name.
        self.sequence, self.position, self.batches = record.sequence, record.position, record.batch_number
        self.topic_id = record.topic_id
        self._sums.add(record)
        self.configurations.read(record)
        if record.leader_epoch >= 0:
            self.leader_epochs[record.position - 1] = record.leader_epoch
        if record.sequence == 0:
            self.base = 0
            self.base_batches = record.batch_number
        self._joining = (record.snapshot and record.part == 0 and self.base < 0) or (self._joining and record.part > 0)
        if self._joining:
            self._begin(record)
        elif self.base >= 0:
            self._go_on(record)

    def _begin(self, record: JournalRecord) -> None:
        """Process a part of the first snapshot; its counts include finished records."""
        if record.part == 0:
            self.base, self._origin = record.position, record.watermark
            self.base_counts, self.base_batches = record.counts, record.batch_number
        self._set(record.unfinished, IN_FLIGHT)
        self._mark(record.delivered, DELIVERED_BEFORE)

    def _go_on(self, record: JournalRecord) -> None:
        self._set(record.admitted, IN_FLIGHT)
        for finished in record.finished:
            self._set(finished.runs, finished.fate)
        for drop in record.drops:
            self._reasons[drop.offset] = drop.reason
            value = self.table[drop.offset]
            if value & CODES == _DROPPED_CODE:
                self._set_reasons(drop.offset, drop.offset + 1)
            elif value & CODES > _IN_FLIGHT_CODE:
                del self._reasons[drop.offset]
        # A snapshot repeats earlier records; records batched before the first snapshot keep DELIVERED_BEFORE alone.
        self._mark(record.delivered, DELIVERED, unless=DELIVERED_BEFORE if record.snapshot else 0)
        self.batch_ids += record.batch_ids

    def _mark(self, ranges: Int64, bits: int, unless: int = 0) -> None:
        for first, stop in _pairs(ranges):
            for _first, values in self.table.writable(first, stop):
                values[(values & np.uint32(unless)) == 0] |= np.uint32(bits)

    def _set(self, ranges: Int64, fate: str) -> None:
        for first, stop in _pairs(ranges):
            for offset in range(first, min(stop, self._origin, first + _MOST_NAMED)):
                self.problem(
                    f"rollouts[{self.number}] offset {offset} is {fate}, but got its fate before the journal begins"
                )
            for begin, values in self.table.writable(max(first, self._origin), stop):
                self._set_fate(begin, values, fate)
            if fate == DROPPED and self._reasons:
                self._set_reasons(max(first, self._origin), stop)

    def _set_fate(self, begin: int, values: Values, fate: str) -> None:
        before = codes(values)
        again = (before > _IN_FLIGHT_CODE) | ((before == _IN_FLIGHT_CODE) & (fate == IN_FLIGHT))
        for at in np.flatnonzero(again)[:_MOST_NAMED].tolist():
            place = self.fate_of(int(values[at]))
            self.problem(f"rollouts[{self.number}] offset {begin + at} is {place} and then {fate}")
        values &= np.uint32(~CODES & 0xFFFFFFFF)
        values |= np.uint32(code_of(fate))

    def _set_reasons(self, first: int, stop: int) -> None:
        for offset in [offset for offset in self._reasons if first <= offset < stop]:
            name = dropped_for(self._reasons.pop(offset))
            if name not in self._places:
                self._places.append(name)
            for _first, values in self.table.writable(offset, offset + 1):
                values &= np.uint32(~CODES & 0xFFFFFFFF)
                values |= np.uint32(self._places.index(name) + 1)

    def problem(self, text: str) -> None:
        """Note a contradiction."""
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(text)

    def fate_of(self, value: int) -> str | None:
        """Return the fate in a value of the table, without the reason of a drop; None if the value has no fate."""
        code = value & CODES
        return fate_and_reason(self._places[code - 1])[0] if code else None

    def fate(self, offset: int) -> str | None:
        """Return the fate of a record below the position; None if the journal names no fate for it."""
        return self.fate_of(self.table[offset])

    def settled_before(self, offset: int) -> bool:
        """Whether an offset got its fate before the first snapshot."""
        return offset < self.base and self.fate(offset) is None

    def known(self) -> OffsetRuns:
        """Return the offsets below the position that have a fate or are in flight."""
        runs = self.table.runs().clipped(0, self.position)
        return runs.where(codes(runs.values) != 0)

    def in_flight(self) -> OffsetRuns:
        """Return the offsets in flight."""
        runs = self.known()
        return runs.where(codes(runs.values) == _IN_FLIGHT_CODE)

    def of_fate(self, fate: str, reason: str | None = None) -> OffsetRuns:
        """Return the offsets with a fate; `reason` selects drops with this reason, by default all drops."""
        runs = self.known()
        names = [*map(fate_and_reason, self._places)]
        wanted = [code for code, name in enumerate(names, 1) if name[0] == fate and reason in (None, name[1])]
        return runs.where(np.isin(codes(runs.values), wanted))

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Number of records with a fate, by environment and fate, since the start of the run."""
        return self._sums.counts

    @property
    def produced(self) -> tuple[FateCount, ...]:
        """Number of records read as rollouts, by environment, since the start of the run."""
        return self._sums.produced

    @property
    def before(self) -> Counter[str]:
        """Number of records that got their fate before the first snapshot, by fate; drops by reason."""
        return by_fate(self.base_counts)

    @property
    def since(self) -> Counter[str]:
        """Number of records that got their fate since the first snapshot, by fate; drops by reason."""
        counts: Counter[str] = Counter()
        runs = self.known()
        for code, count in runs._replace(values=codes(runs.values)).counts().items():
            name = self._places[code - 1]
            if name != IN_FLIGHT:
                counts[dropped_for("") if name == DROPPED else name] += count
        return counts

    def check_counts(self, problem: Callable[[str], None]) -> None:
        """Report a problem unless the journal's counts grew by exactly the records it names."""
        followed, grown = _coarse(self.since), _coarse(by_fate(self.counts))
        grown.subtract(_coarse(self.before))
        for fate in sorted(followed.keys() | grown.keys()):
            if followed[fate] != grown[fate]:
                problem(
                    f"journal[{self.number}] counts {grown[fate]} records {fate} from offset {self.base} to "
                    f"{self.position}, but names {followed[fate]}"
                )

    def named(self, chosen: OffsetRuns, most: int = _MOST_NAMED) -> Iterator[tuple[int, str | None]]:
        """Yield the first `most` offsets of the chosen runs, with their fates."""
        for offset, value in offsets_named(chosen, most):
            yield offset, self.fate_of(value)


def _pairs(ranges: Int64) -> Iterator[tuple[int, int]]:
    """Yield the first offset and the stop of each (first, count) pair."""
    for first, count in np.asarray(ranges, "<i8").reshape(-1, 2).tolist():
        yield first, first + count


def by_fate(counts: Iterable[FateCount]) -> Counter[str]:
    """Sum counts over environments, by fate."""
    fates: Counter[str] = Counter()
    for count in counts:
        fates[count.fate] += count.rollouts
    return fates


def _coarse(counts: Counter[str]) -> Counter[str]:
    """Sum counts by fate without reasons, because reasons of batch makers may be counted together."""
    coarse: Counter[str] = Counter()
    for fate, records in counts.items():
        coarse[fate_and_reason(fate)[0]] += records
    return coarse


def environment_counts(journals: Iterable[PartitionJournal]) -> dict[str, dict[str, "Counter[str]"]]:
    """Return records and tokens by environment and fate ("read": all records read), from the cumulative counts."""
    environments: dict[str, dict[str, Counter[str]]] = {}
    for count in _all_counts(journals):
        totals = environments.setdefault(count.environment, {"records": Counter(), "tokens": Counter()})
        totals["records"][count.fate] += count.rollouts
        totals["tokens"][count.fate] += count.tokens
    return dict(sorted(environments.items()))


def _all_counts(journals: Iterable[PartitionJournal]) -> Iterator[FateCount]:
    for journal in journals:
        yield from journal.counts
        yield from journal.produced

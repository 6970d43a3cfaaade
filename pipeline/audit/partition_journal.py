"""Reads the journal of one partition of `rollouts`, whole or pruned, for the ledger and the janitor.

In a pruned journal, fates are known by offset from the first whole snapshot on, and earlier ones only as its counts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from rollstream.topics.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED, FATES, MOVED, dropped_for, fate_and_reason
from rollstream.topics.journal_counts import JournalCounts
from rollstream.topics.offset_ranges import from_ranges
from rollstream.topics.records import FateCount, JournalRecord

IN_FLIGHT = "in_flight"
PLACES = (IN_FLIGHT, *FATES)


class PartitionJournal:
    """Fate of each offset from the first snapshot to the position, and the counts before and since."""

    def __init__(self, number: int, problem: Callable[[str], None]) -> None:
        self.number = number
        self.sequence = -1
        self.position = 0
        self.base = -1
        """Position of the first snapshot, 0 for generation 0; -1 if there is none yet."""
        self.base_counts: tuple[FateCount, ...] = ()
        self.base_batches = 0
        self.batches = 0
        """Number of the next batch."""
        self.first_batch = 0
        """Number of the first batch; above 0 in the successor of a run that was split."""
        self.delivered: set[int] = set()
        """Offsets batched since the first snapshot, before their group finished."""
        self.delivered_before: set[int] = set()
        """Offsets in flight at the first snapshot that were already in a batch."""
        self.leader_epochs: dict[int, int] = {}
        """By offset, the leader epoch of the last record that each transaction read."""
        self.topic_id = ""
        self.hidden = False
        """Whether an open transaction hides the newest records, so that the journal ends before the committed
        position."""
        self.reasons: dict[int, str] = {}
        self.hopped: set[int] = set()
        """Offsets that were skipped without being fetched."""
        self.batch_ids: list[str] = []
        self._sums = JournalCounts()
        self._problem = problem
        self._origin = 0
        self._fates = np.full(1024, -1, "<i1")
        self._joining = False

    def read(self, record: JournalRecord) -> None:
        """Process the next journal record."""
        # A pruned journal may begin with any sequence number.
        follows = record.sequence == self.sequence + 1 and record.begin == self.position
        if not follows and not (self.sequence < 0 < record.sequence):
            self._problem(
                f"journal[{self.number}] sequence {record.sequence} begins at offset {record.begin}; sequence "
                f"{self.sequence + 1} at {self.position} was expected"
            )
        if record.topic_id != self.topic_id:
            self.leader_epochs.clear()  # Offsets of an earlier topic of the same name.
        self.sequence, self.position, self.batches = record.sequence, record.position, record.batch_number
        self.topic_id = record.topic_id
        self._sums.add(record)
        self.hopped.update(from_ranges(record.hopped))
        if record.leader_epoch >= 0:
            self.leader_epochs[record.position - 1] = record.leader_epoch
        if record.sequence == 0:
            self.base = 0
            self.first_batch = self.base_batches = record.batch_number
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
        for offset in from_ranges(record.unfinished):
            self._set(offset, IN_FLIGHT)
        self.delivered_before.update(from_ranges(record.delivered))

    def _go_on(self, record: JournalRecord) -> None:
        for offset in from_ranges(record.admitted):
            self._set(offset, IN_FLIGHT)
        for finished in record.finished:
            for offset in from_ranges(finished.runs):
                self._set(offset, finished.fate)
        for drop in record.drops:
            self.reasons[drop.offset] = drop.reason
        if not record.snapshot:  # A snapshot repeats earlier records.
            self.delivered.update(from_ranges(record.delivered))
        else:
            self.delivered.update(set(from_ranges(record.delivered)) - self.delivered_before)
        self.batch_ids += record.batch_ids

    def _set(self, offset: int, fate: str) -> None:
        index = offset - self._origin
        if index < 0:
            self._problem(
                f"rollouts[{self.number}] offset {offset} is {fate} and was settled before the journal begins"
            )
            return
        while len(self._fates) <= index:
            self._fates = np.concatenate((self._fates, np.full(len(self._fates), -1, "<i1")))
        code = self._fates[index]
        if code > 0 or (code == 0 and fate == IN_FLIGHT):
            self._problem(f"rollouts[{self.number}] offset {offset} is {PLACES[code]} and then {fate}")
        self._fates[index] = PLACES.index(fate)

    def fate(self, offset: int) -> str | None:
        """Fate of a record below the position; None if the journal has none for it."""
        index = offset - self._origin
        code = self._fates[index] if 0 <= index < len(self._fates) else -1
        return PLACES[code] if code >= 0 else None

    def settled_before(self, offset: int) -> bool:
        """Whether an offset got its fate before the first snapshot."""
        return offset < self.base and self.fate(offset) is None

    def offsets(self, fate: str | None = None) -> set[int]:
        """Offsets with this fate, or with any fate."""
        known = self._fates[: max(0, self.position - self._origin)]
        indices = np.flatnonzero(known >= 0 if fate is None else known == PLACES.index(fate))
        return set((indices + self._origin).tolist())

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Records that have their fate, by environment and fate, since the start of the run."""
        return self._sums.counts

    @property
    def produced(self) -> tuple[FateCount, ...]:
        """Records read as rollouts, by environment, since the start of the run."""
        return self._sums.produced

    @property
    def before(self) -> Counter[str]:
        """Records that got their fate before the first snapshot, by fate; drops with their reason."""
        return by_fate(self.base_counts)

    @property
    def since(self) -> Counter[str]:
        """Records that got their fate since the first snapshot, by fate; drops with their reason."""
        counts: Counter[str] = Counter(
            {fate: len(self.offsets(fate)) for fate in (BATCHED, DEAD_LETTERED, CONTROL, MOVED)}
        )
        counts.update(dropped_for(self.reasons.get(offset, "")) for offset in self.offsets(DROPPED))
        return counts

    def check_counts(self) -> None:
        """Report a problem unless the journal's counts grew by exactly the records it names."""
        followed, grown = _coarse(self.since), _coarse(by_fate(self.counts))
        grown.subtract(_coarse(self.before))
        for fate in sorted(followed.keys() | grown.keys()):
            if followed[fate] != grown[fate]:
                self._problem(
                    f"journal[{self.number}] counts {grown[fate]} records {fate} from offset {self.base} to "
                    f"{self.position}; {followed[fate]} are named"
                )


def by_fate(counts: Iterable[FateCount]) -> Counter[str]:
    """Sum counts over environments, by fate."""
    fates: Counter[str] = Counter()
    for count in counts:
        fates[count.fate] += count.rollouts
    return fates


def _coarse(counts: Counter[str]) -> Counter[str]:
    """Counts by fate without the reason, because reasons of batch makers may be counted together."""
    coarse: Counter[str] = Counter()
    for fate, records in counts.items():
        coarse[fate_and_reason(fate)[0]] += records
    return coarse


def environment_counts(journals: Iterable[PartitionJournal]) -> dict[str, dict[str, "Counter[str]"]]:
    """Records and tokens by environment and fate ("read" are all records read), from the cumulative counts."""
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

"""What the journal of one partition of `rollouts` says, as the ledger and the janitor read it, pruned or whole.

The account of a pruned journal begins at its first whole snapshot: what was settled before, its counts alone tell.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from consumers.grouping.changes import BATCHED, CONTROL, DEAD_LETTERED, DROPPED
from consumers.grouping.runs import from_runs
from topics.journal_counts import JournalCounts
from topics.records import FateCount, JournalRecord

IN_FLIGHT = "in_flight"
FATES = (IN_FLIGHT, BATCHED, DROPPED, DEAD_LETTERED, CONTROL)
READ = "read"
"""The fate under which the journal counts what was produced."""


class PartitionJournal:
    """For each offset from where the account begins up to the position its fate, and the counts before and after."""

    def __init__(self, number: int, problem: Callable[[str], None]) -> None:
        self.number = number
        self.sequence = -1
        self.position = 0
        self.base = -1
        """Position of the snapshot the account begins at, 0 for generation 0; -1 before there is one."""
        self.base_counts: tuple[FateCount, ...] = ()
        self.base_batches = 0
        self.batches = 0
        """Number of the next batch."""
        self.delivered: set[int] = set()
        """Offsets that were put into a batch since the account begins, before their group was over."""
        self.delivered_before: set[int] = set()
        """Offsets in flight where the account begins that were in a batch already."""
        self.leader_epochs: dict[int, int] = {}
        """Leader epoch under which each record that a transaction read last was read, by its offset."""
        self.topic_id = ""
        self.hidden = False
        """Whether the newest records are hidden, so that the account ends before what was committed."""
        self.reasons: dict[int, str] = {}
        self.batch_ids: list[str] = []
        self._sums = JournalCounts()
        self._problem = problem
        self._origin = 0
        self._fates = np.full(1024, -1, "<i1")
        self._joining = False

    def read(self, record: JournalRecord) -> None:
        """Take in the next journal record."""
        # A journal whose beginning was deleted begins anywhere.
        follows = record.sequence == self.sequence + 1 and record.begin == self.position
        if not follows and not (self.sequence < 0 < record.sequence):
            self._problem(
                f"journal[{self.number}] sequence {record.sequence} begins at offset {record.begin}; sequence "
                f"{self.sequence + 1} at {self.position} was expected"
            )
        if record.topic_id != self.topic_id:
            self.leader_epochs.clear()  # They were another topic's, whose records these are.
        self.sequence, self.position, self.batches = record.sequence, record.position, record.batch_number
        self.topic_id = record.topic_id
        self._sums.add(record)
        if record.leader_epoch >= 0:
            self.leader_epochs[record.position - 1] = record.leader_epoch
        if record.sequence == 0:
            self.base = 0
        self._joining = (record.snapshot and record.part == 0 and self.base < 0) or (self._joining and record.part > 0)
        if self._joining:
            self._begin(record)
        elif self.base >= 0:
            self._go_on(record)

    def _begin(self, record: JournalRecord) -> None:
        """A part of the snapshot the account begins at: what it says is finished is in its counts."""
        if record.part == 0:
            self.base, self._origin = record.position, record.watermark
            self.base_counts, self.base_batches = record.counts, record.batch_number
        for offset in from_runs(record.unfinished):
            self._set(offset, IN_FLIGHT)
        self.delivered_before.update(from_runs(record.delivered))

    def _go_on(self, record: JournalRecord) -> None:
        for offset in from_runs(record.admitted):
            self._set(offset, IN_FLIGHT)
        for finished in record.finished:
            for offset in from_runs(finished.runs):
                self._set(offset, finished.fate)
        for drop in record.drops:
            self.reasons[drop.offset] = drop.reason
        if not record.snapshot:  # A snapshot repeats those of before.
            self.delivered.update(from_runs(record.delivered))
        else:
            self.delivered.update(set(from_runs(record.delivered)) - self.delivered_before)
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
        now = self._fates[index]
        if now > 0 or (now == 0 and fate == IN_FLIGHT):
            self._problem(f"rollouts[{self.number}] offset {offset} is {FATES[now]} and then {fate}")
        self._fates[index] = FATES.index(fate)

    def fate(self, offset: int) -> str | None:
        """What became of a record below the position; None where the journal says nothing."""
        index = offset - self._origin
        code = self._fates[index] if 0 <= index < len(self._fates) else -1
        return FATES[code] if code >= 0 else None

    def settled_before(self, offset: int) -> bool:
        """Whether an offset had its fate before the account begins."""
        return offset < self.base and self.fate(offset) is None

    def offsets(self, fate: str | None = None) -> set[int]:
        """Offsets with a fate; with any of them where none is named."""
        known = self._fates[: max(0, self.position - self._origin)]
        found = np.flatnonzero(known >= 0 if fate is None else known == FATES.index(fate))
        return set((found + self._origin).tolist())

    @property
    def counts(self) -> tuple[FateCount, ...]:
        """Records that have their fate, by environment and fate, since the start of the run."""
        return self._sums.counts

    @property
    def produced(self) -> tuple[FateCount, ...]:
        """Records read that were meant as rollouts, by environment, since the start of the run."""
        return self._sums.produced

    @property
    def before(self) -> Counter[str]:
        """Records by fate, drops with their reason, that were settled before the account begins."""
        return by_fate(self.base_counts)

    @property
    def since(self) -> Counter[str]:
        """Records by fate, drops with their reason, that the account itself follows; those in flight left out."""
        found = Counter({fate: len(self.offsets(fate)) for fate in (BATCHED, DEAD_LETTERED, CONTROL)})
        found.update(f"{DROPPED}:{self.reasons.get(offset, '')}" for offset in self.offsets(DROPPED))
        return found

    def check_counts(self) -> None:
        """The counts must have grown by just what the account followed."""
        followed, grown = _coarse(self.since), _coarse(by_fate(self.counts))
        grown.subtract(_coarse(self.before))
        for fate in sorted(followed.keys() | grown.keys()):
            if followed[fate] != grown[fate]:
                self._problem(
                    f"journal[{self.number}] counts {grown[fate]} records {fate} from offset {self.base} to "
                    f"{self.position}; {followed[fate]} are named"
                )


def by_fate(counts: Iterable[FateCount]) -> Counter[str]:
    """Records by fate, whatever their environment."""
    found: Counter[str] = Counter()
    for count in counts:
        found[count.fate] += count.rollouts
    return found


def _coarse(counts: Counter[str]) -> Counter[str]:
    """By fate without the reason: reasons a batch maker makes up may be counted together."""
    found: Counter[str] = Counter()
    for fate, records in counts.items():
        found[fate.partition(":")[0]] += records
    return found


def environments(journals: Iterable[PartitionJournal]) -> dict[str, dict[str, "Counter[str]"]]:
    """Records and tokens by environment and fate ("read" is what was produced), from the cumulative counts."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for count in _all_counts(journals):
        of = found.setdefault(count.environment, {"records": Counter(), "tokens": Counter()})
        of["records"][count.fate] += count.rollouts
        of["tokens"][count.fate] += count.tokens
    return dict(sorted(found.items()))


def _all_counts(journals: Iterable[PartitionJournal]) -> Iterator[FateCount]:
    for journal in journals:
        yield from journal.counts
        yield from journal.produced

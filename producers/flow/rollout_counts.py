"""Counts of a run's rollouts: consumed by its learner, and outstanding by environment. Pure, without I/O.

A learner's totals count from its own start, so a learner that starts anew, or after a prune, never reaches the totals
of its predecessor. The position is used instead: every batch before it in the index is consumed, and every batch
deleted from the index was consumed earlier.

The journal counts rollouts produced, dropped and batched by environment; steps count rollouts consumed, but not by
environment. Learners take batches in the order in which they were cut, so the rollouts still waiting were batched last,
and a window over the newest journal records shows their environments.
"""

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.topics.errors import RecordError
from rollstream.topics.records import BatchIndexEntry, FateCount, LearnerStep, batch_numbers
from rollstream.topics.records.fates import BATCHED, DEAD_LETTERED, DROPPED, fate_and_reason
from rollstream.topics.records.journal import JournalCounts

_MOST_ROLLOUTS = 2**31 - 1
"""Maximum number of rollouts in a batch; with more, sums could exceed 64 bits."""


@dataclass
class _Learner:
    """Position of one learner."""

    step: int = -1
    totals: int = 0
    """Rollouts it trained on or skipped since its start, as it reports."""
    floor: int = 0
    """Index offset before which the learner has used up every batch."""
    uses: dict[int, Mapping[int, int]] = field(default_factory=dict)
    """Rollouts used for the first time in batches from the floor on, by step, then by index offset."""

    def add_step(self, record: LearnerStep) -> None:
        """Add a step; adding it again changes nothing."""
        rows: dict[int, int] = {}
        for use in record.uses:
            if not use.again:
                rows[use.index_offset] = rows.get(use.index_offset, 0) + use.rows
        self.uses[record.step] = rows
        if record.step >= self.step:
            self.step, self.totals = record.step, record.trained_total + record.skipped_total
            self.floor = record.position if record.oldest < 0 else record.oldest
        self.uses = {step: rows for step, rows in self.uses.items() if max(rows, default=-1) >= self.floor}

    @property
    def beyond_floor(self) -> int:
        """Rollouts used in batches from the floor on: drawn from a buffer, or skipped for a future step."""
        return sum(count for rows in self.uses.values() for offset, count in rows.items() if offset >= self.floor)


class LearnerConsumption:
    """Consumption of the learner that wrote last to `steps` of a run and is not retired."""

    def __init__(self, run: str, *, pruned: bool) -> None:
        """`pruned` is whether entries were deleted from the beginning of the index."""
        self._run = run
        self._offsets = array("q")
        self._sums = array("q")
        """Cumulative rollouts up to each entry."""
        self._learners: dict[str, _Learner] = {}
        self._writers: dict[str, None] = {}
        """Learners in the order of their newest steps."""
        self.retired: Container[str] = ()
        """Retired learners, whose positions do not count."""
        self._pruned = pruned
        self._journal: dict[int, tuple[int, int]] = {}
        """Batches and rollouts that a partition's first journal record counts; kept until compared with the index."""
        self._kept: dict[int, dict[int, int]] = {}
        """Rollouts of the batches in the index, by partition and number; kept until compared with the journal."""
        self._compared: set[int] = set()
        self._deleted = 0
        """Rollouts of batches that are no longer in the index, by the journal's counts."""

    def add_entry(self, offset: int, entry: BatchIndexEntry) -> None:
        """Add the next entry of the index. Raises RecordError if its number of rollouts is invalid."""
        if not 0 <= entry.rollouts <= _MOST_ROLLOUTS:
            raise RecordError(
                f"the index entry of batch {entry.batch_id} names {entry.rollouts} rollouts, which is impossible"
            )
        if self._offsets and offset <= self._offsets[-1]:
            return
        self._offsets.append(offset)
        self._sums.append((self._sums[-1] if self._sums else 0) + entry.rollouts)
        if self._pruned and entry.partition not in self._compared:
            self._kept.setdefault(entry.partition, {})[batch_numbers(entry.batch_id)[1]] = entry.rollouts
            self._compare(entry.partition)

    def add_journal(self, partition: int, batches: int, rollouts: int) -> None:
        """Add the number of batches that a partition's journal counts, and the number of rollouts in them."""
        if self._pruned and partition not in self._compared and partition not in self._journal:
            self._journal[partition] = batches, rollouts
            self._compare(partition)

    def end_index(self) -> None:
        """Note that the index was read to its end, so all batches of partitions without an entry were deleted."""
        for partition in [partition for partition in self._journal if partition not in self._kept]:
            self._kept[partition] = {self._journal[partition][0]: 0}
            self._compare(partition)

    def _compare(self, partition: int) -> None:
        """Compute how many rollouts were deleted, once the index shows every batch in the journal."""
        kept = self._kept.get(partition, {})
        if partition not in self._journal or max(kept, default=-1) < self._journal[partition][0] - 1:
            return
        batches, rollouts = self._journal.pop(partition)
        self._deleted += max(0, rollouts - sum(count for number, count in kept.items() if number < batches))
        self._compared.add(partition)
        del self._kept[partition]

    def add_step(self, record: LearnerStep) -> None:
        """Add a step; a step made of another run's batches consumes nothing of this run."""
        if record.input_run in ("", self._run):
            self._writers.pop(record.learner, None)
            self._writers[record.learner] = None
            self._learners.setdefault(record.learner, _Learner()).add_step(record)

    @property
    def consumed(self) -> int:
        """Rollouts trained on or skipped since the start of the run, by any learner."""
        newest = next((name for name in reversed(self._writers) if name not in self.retired), "")
        learner = self._learners.get(newest, _Learner())
        return self._before + self._since(learner)

    @property
    def _before(self) -> int:
        """Rollouts of batches deleted from the index, as counted by the journal or by earlier learners."""
        if not self._pruned:
            return 0
        return max(self._deleted, *(learner.totals - self._since(learner) for learner in self._learners.values()), 0)

    def _since(self, learner: _Learner) -> int:
        """Return the rollouts that a learner has consumed of the batches in the index."""
        entries = bisect_left(self._offsets, learner.floor)
        return (self._sums[entries - 1] if entries else 0) + learner.beyond_floor


class EnvironmentCounts:
    """Counts rollouts by environment, over all partitions."""

    def __init__(self) -> None:
        self._held: dict[int, Counter[str]] = {}
        """By partition: rollouts that grouping has read but has neither batched, dropped nor dead-lettered."""
        self._batched: dict[int, Counter[str]] = {}
        """By partition: rollouts batched since the start of the run."""
        self._window: deque[Counter[str]] = deque()
        """Rollouts batched by each of the newest journal records, oldest first."""
        self._in_window = 0

    def add(self, partition: int, journal: JournalCounts) -> None:
        """Add the counts of a partition after its next journal record.

        The first counts of a partition cover its whole history in unknown order, so the window leaves them out.
        """
        held: Counter[str] = Counter()
        batched: Counter[str] = Counter()
        for count in journal.produced:
            held[count.environment] += count.rollouts
        for count, fate in _with_fate(journal.counts):
            if fate in (DROPPED, DEAD_LETTERED, BATCHED):
                held[count.environment] -= count.rollouts
            if fate == BATCHED:
                batched[count.environment] += count.rollouts
        if partition in self._batched and (fresh := batched - self._batched[partition]):
            self._window.append(fresh)
            self._in_window += fresh.total()
        self._held[partition], self._batched[partition] = held, batched

    def outstanding(self, consumed: int) -> dict[str, int]:
        """Return the outstanding rollouts by environment after `consumed` rollouts were trained on or skipped."""
        totals: Counter[str] = Counter()
        for batched in self._batched.values():
            totals.update(batched)
        waiting = max(0, totals.total() - consumed)
        while self._window and self._in_window - self._window[0].total() >= waiting:
            self._in_window -= self._window.popleft().total()
        result: Counter[str] = Counter()
        for held in self._held.values():
            result.update(held)
        for batched in self._window:
            result.update(batched)
        if self._window and self._in_window > waiting:
            result.subtract(_portion(self._window[0], self._in_window - waiting))
        elif waiting > self._in_window:
            result.update(_portion(totals, waiting - self._in_window))
        return {environment: max(0, count) for environment, count in sorted(result.items())}


def _with_fate(counts: Iterable[FateCount]) -> Iterable[tuple[FateCount, str]]:
    return ((count, fate_and_reason(count.fate)[0]) for count in counts)


def _portion(counts: Counter[str], rollouts: int) -> dict[str, int]:
    """Split rollouts over environments in proportion to `counts`."""
    total = counts.total() or 1
    return {environment: round(rollouts * count / total) for environment, count in counts.items()}

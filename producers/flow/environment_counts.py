"""Outstanding rollouts of a run by environment, from the journal's counts and the rollouts that learners consumed.

Pure. The journal counts rollouts produced, dropped and batched by environment; steps count rollouts consumed, but not
by environment. Learners take batches in the order in which they were cut, so the rollouts still waiting were batched
last, and a window over the newest journal records shows their environments.
"""

from collections import Counter, deque
from collections.abc import Iterable

from rollstream.topics.records import FateCount
from rollstream.topics.records.fates import BATCHED, DEAD_LETTERED, DROPPED, fate_and_reason
from rollstream.topics.records.journal import JournalCounts


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

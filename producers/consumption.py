"""How many rollouts of a run its learner has consumed, by where it stands in `batch-index`. No I/O here.

A learner's totals count from its own beginning: one that begins anew, or after a prune, never reaches those of the one
before it. So what counts is the position: all that lies before it in the index is consumed, and what was deleted from
the index had been consumed before.
"""

from array import array
from bisect import bisect_left
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from topics.records import BatchIndexEntry, LearnerStep, batch_numbers


@dataclass
class _Learner:
    """Where one learner stands."""

    step: int = -1
    totals: int = 0
    """Rollouts it trained on or skipped since it began, as it says."""
    floor: int = 0
    """Offset of the index before which nothing is left to it."""
    uses: dict[int, Mapping[int, int]] = field(default_factory=dict)
    """By step, rollouts it used for the first time of batches from the floor on, by index offset."""

    def take(self, record: LearnerStep) -> None:
        """Take note of a step, of one made again too: what it says is what it said."""
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
        """Rollouts it used of batches from the floor on: drawn from a buffer, or skipped for a step still to come."""
        return sum(count for rows in self.uses.values() for offset, count in rows.items() if offset >= self.floor)


class Consumption:
    """What the learner that wrote last into `steps` of a run, and is not retired, has consumed."""

    def __init__(self, run: str, *, pruned: bool) -> None:
        """`pruned` says that the index no longer begins where it began."""
        self._run = run
        self._offsets = array("q")
        self._sums = array("q")
        """Rollouts of the entries up to each."""
        self._learners: dict[str, _Learner] = {}
        self._writers: dict[str, None] = {}
        """Learners in the order of their newest steps."""
        self.retired: Container[str] = ()
        """Learners that train no more: where they stand counts for nothing."""
        self._pruned = pruned
        self._journal: dict[int, tuple[int, int]] = {}
        """By partition, batches and rollouts in them as the journal told first; until compared with the index."""
        self._kept: dict[int, dict[int, int]] = {}
        """By partition, rollouts of its batches by number; until compared with the journal."""
        self._compared: set[int] = set()
        self._deleted = 0
        """Rollouts of batches that are no longer in the index, by the journal's counts."""

    def entry(self, offset: int, entry: BatchIndexEntry) -> None:
        """Take note of an entry of the index; they come in order."""
        if self._offsets and offset <= self._offsets[-1]:
            return
        self._offsets.append(offset)
        self._sums.append((self._sums[-1] if self._sums else 0) + entry.rollouts)
        if self._pruned and entry.partition not in self._compared:
            self._kept.setdefault(entry.partition, {})[batch_numbers(entry.batch_id)[1]] = entry.rollouts
            self._compare(entry.partition)

    def grouped(self, partition: int, batches: int, rollouts: int) -> None:
        """Take note of how many batches a partition's journal tells of, and of how many rollouts they are."""
        if self._pruned and partition not in self._compared and partition not in self._journal:
            self._journal[partition] = batches, rollouts
            self._compare(partition)

    def reached_end(self) -> None:
        """Take note that the index was read to its end: of partitions without an entry everything was deleted."""
        for partition in [partition for partition in self._journal if partition not in self._kept]:
            self._kept[partition] = {self._journal[partition][0]: 0}
            self._compare(partition)

    def _compare(self, partition: int) -> None:
        """Learn how much was deleted, once the index shows all the batches that the journal told of."""
        kept = self._kept.get(partition, {})
        if partition not in self._journal or max(kept, default=-1) < self._journal[partition][0] - 1:
            return
        batches, rollouts = self._journal.pop(partition)
        self._deleted += max(0, rollouts - sum(count for number, count in kept.items() if number < batches))
        self._compared.add(partition)
        del self._kept[partition]

    def step(self, record: LearnerStep) -> None:
        """Take note of a step; one made of another run's batches consumes nothing here."""
        if record.input_run in ("", self._run):
            self._writers.pop(record.learner, None)
            self._writers[record.learner] = None
            self._learners.setdefault(record.learner, _Learner()).take(record)

    @property
    def consumed(self) -> int:
        """Rollouts trained on or skipped since the start of the run, whoever did so."""
        newest = next((name for name in reversed(self._writers) if name not in self.retired), "")
        learner = self._learners.get(newest, _Learner())
        return self._before + self._since(learner)

    @property
    def _before(self) -> int:
        """Rollouts of what was deleted from the index: as the journal counts them, or as learners of then did."""
        if not self._pruned:
            return 0
        return max(self._deleted, *(learner.totals - self._since(learner) for learner in self._learners.values()), 0)

    def _since(self, learner: _Learner) -> int:
        """Rollouts that a learner has consumed of what the index holds."""
        entries = bisect_left(self._offsets, learner.floor)
        return (self._sums[entries - 1] if entries else 0) + learner.beyond_floor

"""Folds a partition again with the rewards of a rescoring, and compares the advantages, rollout by rollout.

It repeats the fold that cut the recorded batches, with the configurations on the log, and replaces only the rewards. A
rollout on which the verifier failed keeps its reward.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.plug_ins import PlugIns, load_plug_ins
from rollstream.consumers.learner.input.batch_selection import chosen_rows
from rollstream.pipeline.audit.refold import (
    beginnings,
    configurations,
    emptied,
    journal_of,
    log_begins,
    refold,
    skips_in,
)
from rollstream.pipeline.audit.topic_reading import read_batches
from rollstream.pipeline.rescoring.rescorer import rescored
from rollstream.pipeline.run.batch_run import BatchWriter, TimedEntry
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Drop, Float32, JournalRecord, RescoredRollout, TrainingBatch
from rollstream.topics.wire.rl_examples import batch_digest

_NAMED = 1000
"""Largest number of changed rollouts that a report names; `rescores` has all of them."""


@dataclass
class EnvironmentChanges:
    """Rewards of the rollouts of one environment."""

    rescored: int = 0
    changed: int = 0
    failed: int = 0
    """Rollouts that the verifier did not judge: they keep their rewards."""
    total_before: float = 0.0
    total_after: float = 0.0
    """Sums over the rollouts that the verifier judged."""
    largest: float = 0.0
    """Largest difference."""

    def add(self, record: RescoredRollout) -> None:
        self.rescored += 1
        if record.failure:
            self.failed += 1
            return
        self.changed += record.changed
        self.total_before += record.reward_before
        self.total_after += record.reward
        self.largest = max(self.largest, abs(record.reward - record.reward_before))

    def merge(self, other: "EnvironmentChanges") -> None:
        self.rescored += other.rescored
        self.changed += other.changed
        self.failed += other.failed
        self.total_before += other.total_before
        self.total_after += other.total_after
        self.largest = max(self.largest, other.largest)

    def as_dict(self) -> dict[str, float]:
        """Convert to plain values for JSON."""
        judged = max(self.rescored - self.failed, 1)
        return {
            "rescored": self.rescored,
            "changed": self.changed,
            "failed": self.failed,
            "mean_before": self.total_before / judged,
            "mean_after": self.total_after / judged,
            "largest_difference": self.largest,
        }


@dataclass
class RewardChanges:
    """Rewards of all rollouts of a rescoring."""

    environments: dict[str, EnvironmentChanges] = field(default_factory=dict)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """The first changed rollouts, each with its place and both rewards."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The first rollouts that the verifier did not judge, each with the reason."""

    def add(self, record: RescoredRollout) -> None:
        """Count a record."""
        self.environments.setdefault(record.environment, EnvironmentChanges()).add(record)
        place = {"uid": record.uid, "at": f"{record.partition}:{record.offset}"}
        if record.failure and len(self.failures) < _NAMED:
            self.failures.append({**place, "reason": record.failure})
        if record.changed and len(self.rollouts) < _NAMED:
            self.rollouts.append({**place, "before": record.reward_before, "after": record.reward})

    def merge(self, other: "RewardChanges") -> None:
        """Add the records of another partition."""
        for name, changes in other.environments.items():
            self.environments.setdefault(name, EnvironmentChanges()).merge(changes)
        self.rollouts = (self.rollouts + other.rollouts)[:_NAMED]
        self.failures = (self.failures + other.failures)[:_NAMED]

    @property
    def total(self) -> EnvironmentChanges:
        """Sum over the environments."""
        total = EnvironmentChanges()
        for changes in self.environments.values():
            total.merge(changes)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            **self.total.as_dict(),
            "environments": {name: changes.as_dict() for name, changes in sorted(self.environments.items())},
            "rollouts": self.rollouts,
            "failures": self.failures,
        }


NO_VARIANCE = ("zero_variance", "zero_advantage")
"""Reasons for dropping a rollout that teaches nothing; such a rollout counts as one with advantage 0."""
ROUNDING = 1e-9
"""Largest advantage that counts as 0, because rounding leaves such values. Larger values must agree to a millionth."""
TakenRows = Mapping[str, tuple[int, ...]]
"""Rows of batches that a learner has taken, by batch; an empty tuple for all of them."""


@dataclass(frozen=True)
class CorrectedBatch:
    """A recorded batch of R rollouts, with the advantages that follow from the rescored rewards."""

    before: Float32
    """Advantages on record, [R]."""
    after: Float32
    """Advantages by the rescored rewards, [R]; 0 for the rollouts of a group without variance."""
    known: NDArray[np.bool_]
    """Whether the advantage was computed again from rewards of the rescoring, [R]; the other rollouts count as
    unchanged."""
    sampled: NDArray[np.int64]
    """Sampled tokens, [R]."""

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Whether the advantage on record differs from the corrected one, [R]."""
        wrong: NDArray[np.bool_] = self.known & ~np.isclose(self.before, self.after, rtol=1e-6, atol=ROUNDING)
        return wrong

    @property
    def flipped(self) -> NDArray[np.bool_]:
        """Whether the corrected advantage has the opposite sign, [R]."""
        far = np.minimum(np.abs(self.before), np.abs(self.after)) > ROUNDING
        flipped: NDArray[np.bool_] = self.wrong & far & (np.sign(self.before) != np.sign(self.after))
        return flipped


@dataclass
class CorrectedPartition:
    """Comparison of one partition, or of several."""

    rewards: RewardChanges = field(default_factory=RewardChanges)
    batches: dict[str, CorrectedBatch] = field(default_factory=dict)
    groups: int = 0
    """Groups of the recorded batches."""
    groups_changed: int = 0
    """Groups of the recorded batches in which an advantage changed."""
    groups_lost: int = 0
    """Changed groups that would have been dropped for lack of variance."""
    groups_gained: int = 0
    """Groups that were dropped for lack of variance but would have been batched."""
    rollouts_gained: int = 0
    entries: list[TimedEntry] = field(default_factory=list)
    """Entries of the batches written into another run."""
    skipped: SkippedRecords = field(default_factory=lambda: SkippedRecords(logged=False))

    def merge(self, other: "CorrectedPartition") -> None:
        """Add the comparison of another partition."""
        self.rewards.merge(other.rewards)
        self.batches |= other.batches
        self.groups += other.groups
        self.groups_changed += other.groups_changed
        self.groups_lost += other.groups_lost
        self.groups_gained += other.groups_gained
        self.rollouts_gained += other.rollouts_gained
        self.entries += other.entries
        self.skipped.merge(other.skipped)


@dataclass(frozen=True)
class CorrectionJob:
    """One partition to fold again. With `into`, its batches are written to that run, without the rows in `taken`."""

    kafka: KafkaConfig
    run: str
    partition: int
    rescoring_id: str
    scored_end: int
    """Offset up to which the rescoring has scored the partition; the fold ends there."""
    grouper: GrouperConfig
    into: str = ""
    taken: TakenRows = field(default_factory=dict)


def correct_partition(job: CorrectionJob) -> CorrectedPartition:
    """Fold a partition again with rescored rewards and compare. Raises StateRefused as `refold` does, and TopicError if
    the partition was pruned beyond its snapshots."""
    result = CorrectedPartition()
    rewards: dict[int, float] = {}
    for record in rescored(job.kafka, job.run, job.rescoring_id, job.partition, result.skipped):
        result.rewards.add(record)
        if record.changed:
            rewards[record.offset] = record.reward
    journal = journal_of(job.kafka, job.run, job.partition, result.skipped)
    if not journal:
        return result
    advantages: dict[int, float] = {}
    recorded_drops = {drop.offset for record in journal for drop in record.drops if drop.reason in NO_VARIANCE}
    taken = _taken_offsets(job)
    writer = BatchWriter(job.kafka, job.run, job.into) if job.into else None
    plug_ins = load_plug_ins(job.grouper)
    start, later = _beginning(job, journal, plug_ins)

    stop, skips = min(journal[-1].position, job.scored_end), skips_in(later)
    outputs = refold(job.kafka, job.run, [start], stop, plug_ins, skips=skips, rewards=rewards, drain=True)
    for output in outputs:
        for batch in output.batches:
            advantages.update(zip(batch.source_offsets.tolist(), advantages_of(batch).tolist(), strict=True))
            _count_gained(result, batch, recorded_drops)
            if writer is not None and (rest := _without(batch, taken)) is not None:
                writer.write(rest)
        advantages.update(_without_variance(output.journal.drops))
    # Read again: all batches of a partition do not fit into memory.
    for batch in read_batches(job.kafka, job.run, result.skipped, job.partition):
        _compare(result, batch, advantages, range(start.position, stop))
    if writer is not None:
        result.entries = writer.close()
    return result


def _beginning(
    job: CorrectionJob, journal: list[JournalRecord], plug_ins: PlugIns
) -> tuple[JournalRecord, list[JournalRecord]]:
    """Return the state from which to fold, with nothing in flight, and the journal after it."""
    usable = beginnings(journal, log_begins(job.kafka, job.run, "rollouts")[job.partition])
    if not usable:
        raise TopicError(
            f"partition {job.partition} of run {job.run} was pruned beyond its snapshots; rescore it after the next "
            f"snapshot, which a grouping process writes when it ends"
        )
    first = journal[usable[0]]
    if first.sequence > 0:
        in_force = configurations(job.kafka, job.run, journal[usable[0] :], plug_ins)
        first = emptied(first, in_force[first.generation])
    return first, journal[usable[0] + 1 :]


def advantages_of(batch: TrainingBatch) -> Float32:
    """Return the advantage of each row, [R]; estimators give all positions of a row the same advantage."""
    return batch.advantages[batch.splits[:-1]]


def _without_variance(drops: Iterable[Drop]) -> Iterator[tuple[int, float]]:
    return ((drop.offset, 0.0) for drop in drops if drop.reason in NO_VARIANCE)


def _count_gained(result: CorrectedPartition, batch: TrainingBatch, dropped: set[int]) -> None:
    gained = np.array([offset in dropped for offset in batch.source_offsets.tolist()], bool)
    result.rollouts_gained += int(gained.sum())
    result.groups_gained += len(set(batch.group_index[gained].tolist()))


def _compare(result: CorrectedPartition, batch: TrainingBatch, advantages: Mapping[int, float], folded: range) -> None:
    """Add a recorded batch. Groups with rollouts outside of the offsets that were folded are not compared."""
    offsets, index, rows = batch.source_offsets, batch.group_index, len(batch)
    whole = np.ones(len(batch.groups), bool)
    whole[index[(offsets < folded.start) | (offsets >= folded.stop)]] = False
    known = np.array([offset in advantages for offset in offsets.tolist()], bool) & whole[index]
    after = np.array([advantages.get(offset, 0.0) for offset in offsets.tolist()], "<f4")
    ends = np.concatenate(([0], np.cumsum(batch.loss_mask)))[batch.splits]
    corrected = CorrectedBatch(advantages_of(batch).copy(), after, known, np.diff(ends).astype("<i8"))
    result.batches[batch.batch_id] = corrected
    changed = set(index[corrected.wrong].tolist())
    result.groups += len(set(index.tolist()))
    result.groups_changed += len(changed)
    result.groups_lost += sum(not after[(index == group) & known].any() for group in changed) if rows else 0


def _taken_offsets(job: CorrectionJob) -> frozenset[int]:
    """Return the offsets of the rollouts in `job.taken`. Invalid batches are counted by the comparison alone."""
    offsets: set[int] = set()
    unlogged = SkippedRecords(logged=False)
    for batch in read_batches(job.kafka, job.run, unlogged, job.partition) if job.taken else ():
        if batch.batch_id in job.taken:
            rows = job.taken[batch.batch_id]
            offsets.update((batch.source_offsets[list(rows)] if rows else batch.source_offsets).tolist())
    return frozenset(offsets)


def _without(batch: TrainingBatch, taken: frozenset[int]) -> TrainingBatch | None:
    """Return the batch without the rollouts in `taken`; None if no rollout is left."""
    rows = [row for row, offset in enumerate(batch.source_offsets.tolist()) if offset not in taken]
    if len(rows) == len(batch) or not rows:
        return batch if rows else None
    rest = chosen_rows(batch, rows)
    return replace(rest, digest=batch_digest(rest))

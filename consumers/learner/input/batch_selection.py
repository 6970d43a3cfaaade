"""Selects the batches of each step: whole batches in index order. Excluded and stale batches are recorded as skipped.

The selection depends on the index, the manifests, the settings and the excluded batches. A step executed again follows
its record instead, so it takes the same batches.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollstream.consumers.batch_reader import IndexedBatch, IndexReader
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.row_checks import unfit_rows
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep, TrainingBatch
from rollstream.topics.records.fates import EXCLUDED, STALE_VERSION, UNKNOWN_VERSION, Skip
from rollstream.topics.records.learner import taken_rows, trained_rows
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.rl_examples import chosen_token_arrays

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_REPORT_SKIPS_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The batches, or rows of batches, of one step: the same in every process of a learner."""

    uses: tuple[BatchUse, ...]
    """Every batch read for the step, in index order."""
    trained: tuple[IndexedBatch, ...]
    """Index entries of the batches that the step trains on."""
    lags: tuple[int, ...]
    """Age in steps of the lowest policy version of each trained batch, or of each drawn rollout."""
    position: int
    """Next offset of batch-index to read after the step."""
    wait_s: float
    """Seconds spent waiting for the batches to appear in the index."""
    rows: tuple[tuple[int, ...] | None, ...] = ()
    """Rows of each trained batch that are trained on, ascending, None for all rows; empty if all batches are whole."""
    oldest: int = -1
    """First index offset before `position` whose batch may be used again; -1 if there is none."""
    stream_time_ms: int = -1
    """Stream time of the selection, -1 if it did not depend on time."""
    checked: bool = False
    """Whether rows that cannot be trained on are already left out: by the record of a step executed again, or when a
    rollout buffer admitted its rows."""

    @property
    def drawn(self) -> bool:
        """Whether rows were drawn one by one and not taken with their batches."""
        return self.stream_time_ms >= 0

    @property
    def rows_of_batches(self) -> tuple[tuple[int, ...] | None, ...]:
        """Rows of each trained batch, None for all rows."""
        return self.rows or (None,) * len(self.trained)


class BatchSelection:
    """Selects the batches of one step after another.

    `read_version_steps` returns the learner step of every published version; it is called when a batch names an unknown
    version. `skipped` receives skipped batches that have waited for their step to fill up. `decided` returns the uses
    of a batch in a step on record, or nothing. If it returns nothing, `excluded` gives the reason to leave the batch
    out regardless of its version, or "". `last_of` returns the index offset of the last batch of a step on record, None
    for a step that is not on record. `nothing_after` tells whether the index will have no entry from an offset on: a
    step may then have fewer rollouts, and no step follows it. `publisher_step` is given if another learner publishes
    the policy versions of the batches: it returns how many steps that learner had completed when it read the entry at
    an offset of the index, None if that is not on record. Lags are then counted in the publisher's steps.
    `past_versions` are the policy versions of earlier entries of the index; they matter only to input that has no steps
    on record.
    """

    def __init__(
        self,
        index: IndexReader,
        *,
        rollouts_per_step: int,
        max_policy_lag: int,
        read_version_steps: Callable[[int], dict[int, int]],
        skipped: Callable[[tuple[BatchUse, ...]], None],
        decided: Callable[[int, str], tuple[BatchUse, ...]] = lambda _step, _batch_id: (),
        excluded: Callable[[str], str] = lambda _batch_id: "",
        last_of: Callable[[int], int | None] = lambda _step: None,
        nothing_after: Callable[[int], bool] = lambda _position: False,
        publisher_step: Callable[[int], int | None] | None = None,
        past_versions: Collection[int] = (),
    ) -> None:
        self._index = index
        self._rollouts_per_step = rollouts_per_step
        self._max_policy_lag = max_policy_lag
        self._read_version_steps = read_version_steps
        self._version_steps: dict[int, int] = {}
        self._publisher_step = publisher_step
        self._newest_step = max((self._step_of(version) or 0 for version in past_versions), default=0)
        """Publisher's step of the newest policy version among the index entries up to the position."""
        self._skipped = skipped
        self._decided = decided
        self._excluded = excluded
        self._last_of, self._nothing_after = last_of, nothing_after

    def plan(self, step: int, stop: threading.Event) -> StepPlan | None:
        """Plan the step after `step` steps, with enough rollouts; None if `stop` is set first or no batch follows."""
        started = time.monotonic()
        uses: list[BatchUse] = []
        trained: list[IndexedBatch] = []
        lags: list[int] = []
        chosen: list[tuple[int, ...] | None] = []
        checked = False
        rows = 0
        report_at: float | None = None
        # A step that was short because the run ended keeps its batches when executed again, even if the run went on.
        last = self._last_of(step + 1)
        while rows < self._rollouts_per_step if last is None else self._index.position <= last:
            if stop.is_set():
                return None
            read = self._index.poll(_POLL_S)
            if read is None:
                ends = self._nothing_after(self._index.position)
                if report_at is not None and (time.monotonic() > report_at or (ends and not rows)):
                    self._skipped(tuple(use for use in uses if use.use == "skipped"))
                    report_at = None
                if ends and rows:
                    break
                if ends:
                    return None
                continue
            decided = self._decided(step + 1, read.entry.batch_id)
            checked = checked or bool(decided)
            lag = self._lag(read, step)
            if not decided:
                excluded = self._excluded(read.entry.batch_id)
                skip = Skip(EXCLUDED, excluded) if excluded else self._staleness(read, lag)
                decided = (_whole(read, skip),)
            uses += decided
            if (taken := taken_rows(decided).get(read.index_offset)) is None:
                report_at = time.monotonic() + _REPORT_SKIPS_AFTER_S
                reason = decided[0].reason
                event(logger, "batch_skipped", batch=read.entry.batch_id, rows=read.entry.rollouts, reason=reason)
            else:
                trained.append(read)
                lags.append(lag or 0)
                chosen.append(None if len(taken) == read.entry.rollouts else taken)
                rows += read.entry.rollouts
        return StepPlan(
            uses=tuple(uses),
            trained=tuple(trained),
            lags=tuple(lags),
            position=self._index.position,
            wait_s=time.monotonic() - started,
            rows=tuple(chosen),
            checked=checked,
        )

    def _lag(self, read: IndexedBatch, step: int) -> int | None:
        """Steps since the lowest policy version of the batch was published; None if that version is not on record."""
        lowest = self._step_of(read.entry.lowest_version)
        if self._publisher_step is None:
            return None if lowest is None else step - lowest
        # Input without steps on record, such as a replayed run, is as old as the newest version in it.
        self._newest_step = max(self._newest_step, self._step_of(read.entry.highest_version) or 0)
        if lowest is None:
            return None
        completed = self._publisher_step(read.index_offset)
        return max(self._newest_step if completed is None else completed, lowest) - lowest

    def _step_of(self, version: int) -> int | None:
        """Step after which a policy version was published; None if that is not on record."""
        if version not in self._version_steps:
            self._version_steps = self._read_version_steps(version)
        return self._version_steps.get(version)

    def _staleness(self, read: IndexedBatch, lag: int | None) -> Skip | None:
        """Reason to skip a batch of this lag; None to train on it."""
        version = read.entry.lowest_version
        if lag is None:
            return Skip(UNKNOWN_VERSION, f"policy version {version} is not on record")
        if lag > self._max_policy_lag:
            old = f"policy version {version} is {lag} steps old, max_policy_lag is {self._max_policy_lag}"
            return Skip(STALE_VERSION, old)
        return None


def _whole(read: IndexedBatch, skip: Skip | None) -> BatchUse:
    """The use of a whole batch: trained on, or skipped if there is a reason."""
    return BatchUse(
        batch_id=read.entry.batch_id,
        index_offset=read.index_offset,
        rows=read.entry.rollouts,
        use="skipped" if skip else "trained",
        reason=skip.reason if skip else "",
        code=skip.code if skip else "",
    )


def share_of(trained: Sequence[IndexedBatch], process: int, processes: int) -> tuple[IndexedBatch, ...]:
    """The batches that one of several processes checks, in index order; shares have about the same number of tokens.

    Batches go, largest first, to the process with the fewest tokens so far, so every process finds the same assignment.
    """
    load = [0] * processes
    owner = {}
    for read in sorted(trained, key=lambda read: (-read.entry.tokens, read.index_offset)):
        owner[read.index_offset] = least = load.index(min(load))
        load[least] += read.entry.tokens
    return tuple(read for read in trained if owner[read.index_offset] == process)


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over the trained rollouts of a step."""

    rollouts: int = 0
    reward: float = 0.0
    reward_squared: float = 0.0
    tokens: int = 0
    truncated: int = 0
    left_out: tuple[BatchUse, ...] = ()
    """Rows that could not be trained on."""

    def counts(self) -> dict[str, int]:
        """The integer sums, which are equal in all processes that trained on the same rollouts."""
        left_out = sum(use.rows for use in self.left_out)
        return {
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "left_out": left_out,
        }

    def metrics(self) -> dict[str, float]:
        """Metrics over trained rollouts; other components report metrics over all rollouts produced."""
        count = max(self.rollouts, 1)
        mean = self.reward / count
        return {
            "trained/reward": mean,
            "trained/reward_std": max(self.reward_squared / count - mean * mean, 0.0) ** 0.5,
            "trained/completions/mean_length": self.tokens / count,
            "trained/completions/clipped_ratio": self.truncated / count,
            "trained/rollouts": float(self.rollouts),
        }


def totals_of(batches: Sequence[TrainingBatch], left_out: tuple[BatchUse, ...] = ()) -> StepTotals:
    """The sums over batches from which the rows `left_out` are already removed."""
    return StepTotals(
        rollouts=sum(len(batch) for batch in batches),
        reward=float(sum(batch.rewards.sum() for batch in batches)),
        reward_squared=float(sum((batch.rewards * batch.rewards).sum() for batch in batches)),
        tokens=sum(int(np.count_nonzero(batch.loss_mask)) for batch in batches),
        truncated=int(sum(batch.truncated.sum() for batch in batches)),
        left_out=left_out,
    )


def unfit_uses(read: IndexedBatch, batch: TrainingBatch, config: LearnerConfig) -> tuple[BatchUse, ...]:
    """The rows of a batch that cannot be trained on, as uses for the record of a step."""
    return tuple(
        replace(_whole(read, skip), rows=len(rows), row_numbers=() if len(rows) == len(batch) else rows)
        for skip, rows in unfit_rows(batch, config).items()
    )


def chosen_rows(batch: TrainingBatch, rows: Sequence[int]) -> TrainingBatch:
    """A batch of these rows alone, in the given order, with the id and the digest of the original batch."""
    spans = [slice(int(batch.splits[row]), int(batch.splits[row + 1])) for row in rows]
    by_token = ["tokens", "loss_mask", "logprobs"]
    by_row = ["group_index", "source_offsets", "rewards", "truncated", "lowest_versions", "highest_versions"]
    by_row += ["temperatures", "logprobs_processed", "weight_steps", "timestamps"]
    (by_row if len(batch.advantages) == len(batch) != len(batch.tokens) else by_token).append("advantages")
    if len(batch.reference_logprobs):
        by_token.append("reference_logprobs")
    arrays: dict[str, Any] = {name: getattr(batch, name)[list(rows)] for name in by_row}
    for name in by_token:
        whole = getattr(batch, name)
        arrays[name] = np.concatenate([whole[span] for span in spans]) if spans else whole[:0]
    splits = np.concatenate([[0], np.cumsum([span.stop - span.start for span in spans])]).astype("<i8")
    uids = tuple(batch.uids[row] for row in rows)
    return replace(batch, uids=uids, splits=splits, token_arrays=chosen_token_arrays(batch, rows), **arrays)


_MOST_NAMED = 5


def batches_of(kafka: KafkaConfig, position: int, steps: Sequence[LearnerStep]) -> dict[int, StepPlan]:
    """Plans of consecutive steps on record, by step; `position` is the index position before the first.

    Raises TopicError, which names batches that are gone or have changed, and batches that the steps read past but do
    not name; the latter are allowed with a rollout buffer, which may still hold them.
    """
    if not steps:
        return {}
    input_run = steps[0].input_run
    first = min((use.index_offset for step in steps for use in step.uses), default=position)
    entries = index_between(kafka, input_run, min(first, position), steps[-1].position)
    beginnings = {p: low for p, (low, _end) in topic_admin.bounds(kafka, topic_name(input_run, "batches")).items()}
    wrong: list[str] = []
    plans = {}
    named = set()
    for step in steps:
        trained: dict[int, IndexedBatch] = {}
        drawn = step.stream_time_ms >= 0
        rows = trained_rows(step.uses) if drawn else taken_rows(step.uses)
        for use in step.uses:
            named.add(use.index_offset)
            entry = entries.get(use.index_offset)
            name = f"batch {use.batch_id} of step {step.step}"
            if entry is None:
                wrong.append(f"{name} is no longer at offset {use.index_offset} of batch-index")
            elif entry.batch_id != use.batch_id or not _fits(use, entry):
                wrong.append(
                    f"{name} had {use.rows} rollouts; offset {use.index_offset} of batch-index now names "
                    f"{entry.batch_id} with {entry.rollouts} rollouts"
                )
            elif use.index_offset in rows and entry.offset < beginnings[entry.partition]:
                wrong.append(f"{name} was deleted from batches[{entry.partition}]")
            elif use.index_offset in rows:
                trained[use.index_offset] = IndexedBatch(entry, use.index_offset)
        plans[step.step] = StepPlan(
            uses=step.uses,
            trained=tuple(trained[at] for at in sorted(trained)),
            lags=(0,) * len(trained),
            position=step.position,
            wait_s=0.0,
            rows=tuple(None if len(rows[at]) == trained[at].entry.rollouts else rows[at] for at in sorted(trained)),
            stream_time_ms=step.stream_time_ms,
            checked=True,
        )
    if all(step.stream_time_ms < 0 for step in steps):
        skimmed = (at for at in entries.keys() - named if at >= position)
        wrong += [f"no step names batch {entries[at].batch_id}" for at in sorted(skimmed)]
    if wrong:
        more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise TopicError(
            f"steps {steps[0].step} to {steps[-1].step} cannot be executed again from run {input_run}: "
            f"{'; '.join(wrong[:_MOST_NAMED])}{more}. Begin at a later checkpoint"
        )
    return plans


def _fits(use: BatchUse, entry: BatchIndexEntry) -> bool:
    """Whether a batch has the rows that a use names, either all rows or some by number."""
    if not use.row_numbers:
        return use.rows == entry.rollouts
    return use.rows == len(use.row_numbers) and use.row_numbers[-1] < entry.rollouts


def index_between(kafka: KafkaConfig, run: str, first: int, end: int) -> dict[int, BatchIndexEntry]:
    """Entries that batch-index still holds from offset `first` up to, not including, `end`.

    Unreadable records are skipped and logged, as by an IndexReader.
    """
    topic = topic_name(run, "batch-index")
    low, high = topic_admin.bounds(kafka, topic)[0]
    entries: dict[int, BatchIndexEntry] = {}
    if max(first, low) >= min(end, high):
        return entries
    with closing(read_to_end(kafka, topic, start={0: max(first, low)})) as messages:
        for message, entry in SkippedRecords("learner").records(BatchIndexEntry, messages):
            if message.offset >= end:
                break
            entries[message.offset] = entry
    return entries

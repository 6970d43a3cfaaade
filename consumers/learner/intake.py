"""Decides which batches make a step: whole ones in index order, excluded and too stale ones skipped on record.

The choice depends on the index, the manifests and the settings, and on what `excluded` says, which answers from the
record of a step that is executed again: so it takes the same batches.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from consumers.batch_reader import Indexed, IndexReader
from consumers.learner.config import LearnerConfig
from consumers.learner.row_checks import is_left_out, left_out_uses, unfit_rows
from topics.logs import event
from topics.records import BatchUse, TrainingBatch
from topics.skip_codes import EXCLUDED, STALE_VERSION, UNKNOWN_VERSION, Skip

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_REPORT_SKIPS_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one step is made of."""

    uses: tuple[BatchUse, ...]
    """Every batch read for the step, in index order."""
    trained: tuple[Indexed, ...]
    """Entries of those it trains on."""
    lags: tuple[int, ...]
    """Steps between each trained batch's, or rollout's, lowest policy version and now."""
    position: int
    """Next offset of batch-index."""
    wait_s: float
    """Time until the index named them."""
    rows: tuple[tuple[int, ...] | None, ...] = ()
    """Rows of each trained batch that are trained on, ascending, None for all of them; empty where all are whole."""
    oldest: int = -1
    """First index offset before `position` whose batch may be used again; -1 where there is none."""
    stream_time_ms: int = -1
    """Time the choice went by, where it went by one."""
    checked: bool = False
    """Whether rows that cannot be trained on are left out already: by the record of a step made again, or when a
    rollout buffer took its rows in."""

    @property
    def drawn(self) -> bool:
        """Whether rows were drawn one by one, not taken with their batches."""
        return self.stream_time_ms >= 0

    @property
    def rows_of_batches(self) -> tuple[tuple[int, ...] | None, ...]:
        """Rows of each trained batch, None for all of them."""
        return self.rows or (None,) * len(self.trained)


class Intake:
    """Takes the batches of one step after another.

    `read_version_steps` gives the learner step of every published version; it is asked when a batch names a version
    that was not among them before. `skipped` hears of skipped batches that have waited for the rest of their step.
    `decided` gives what a step on record did with a batch, nothing where that is open; then `excluded` says why a batch
    is left out whatever its version, "" where it is not.
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
    ) -> None:
        self._index = index
        self._rollouts_per_step = rollouts_per_step
        self._max_policy_lag = max_policy_lag
        self._read_version_steps = read_version_steps
        self._version_steps: dict[int, int] = {}
        self._skipped = skipped
        self._decided = decided
        self._excluded = excluded

    def take(self, step: int, stop: threading.Event) -> Taken | None:
        """Batches until there are enough rollouts to train on, after `step` steps; None when `stop` was set first."""
        started = time.monotonic()
        uses: list[BatchUse] = []
        trained: list[Indexed] = []
        lags: list[int] = []
        chosen: list[tuple[int, ...] | None] = []
        checked = False
        rows = 0
        report_at: float | None = None
        while rows < self._rollouts_per_step:
            if stop.is_set():
                return None
            read = self._index.poll(_POLL_S)
            if read is None:
                if report_at is not None and time.monotonic() > report_at:
                    self._skipped(tuple(use for use in uses if use.use == "skipped"))
                    report_at = None
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
        return Taken(
            uses=tuple(uses),
            trained=tuple(trained),
            lags=tuple(lags),
            position=self._index.position,
            wait_s=time.monotonic() - started,
            rows=tuple(chosen),
            checked=checked,
        )

    def _lag(self, read: Indexed, step: int) -> int | None:
        """Steps since the batch's lowest policy version was published; None where that is not on record."""
        version = read.entry.lowest_version
        if version not in self._version_steps:
            self._version_steps = self._read_version_steps(version)
        return step - self._version_steps[version] if version in self._version_steps else None

    def _staleness(self, read: Indexed, lag: int | None) -> Skip | None:
        """Why a batch of this lag is skipped; None to train on it."""
        version = read.entry.lowest_version
        if lag is None:
            return Skip(UNKNOWN_VERSION, f"policy version {version} is not on record")
        if lag > self._max_policy_lag:
            old = f"policy version {version} is {lag} steps old, max_policy_lag is {self._max_policy_lag}"
            return Skip(STALE_VERSION, old)
        return None


def _whole(read: Indexed, skip: Skip | None) -> BatchUse:
    """A whole batch skipped for a reason, or trained on where there is none."""
    return BatchUse(
        batch_id=read.entry.batch_id,
        index_offset=read.index_offset,
        rows=read.entry.rollouts,
        use="skipped" if skip else "trained",
        reason=skip.reason if skip else "",
        code=skip.code if skip else "",
    )


def share_of(trained: Sequence[Indexed], process: int, processes: int) -> tuple[Indexed, ...]:
    """The batches one of several processes trains on, in index order: shares of about equally many tokens.

    Largest first, each to the process with the fewest tokens so far: the same on every process.
    """
    load = [0] * processes
    owner = {}
    for read in sorted(trained, key=lambda read: (-read.entry.tokens, read.index_offset)):
        owner[read.index_offset] = least = load.index(min(load))
        load[least] += read.entry.tokens
    return tuple(read for read in trained if owner[read.index_offset] == process)


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Sums over rollouts that are trained on, which several processes may add up."""

    rollouts: int = 0
    reward: float = 0.0
    reward_squared: float = 0.0
    tokens: int = 0
    truncated: int = 0
    left_out: tuple[BatchUse, ...] = ()
    """Rows beside them that could not be trained on."""

    def __add__(self, other: "Outcomes") -> "Outcomes":
        return Outcomes(
            rollouts=self.rollouts + other.rollouts,
            reward=self.reward + other.reward,
            reward_squared=self.reward_squared + other.reward_squared,
            tokens=self.tokens + other.tokens,
            truncated=self.truncated + other.truncated,
            left_out=self.left_out + other.left_out,
        )

    def metrics(self) -> dict[str, float]:
        """Figures over what is trained; those over all rollouts produced are told by other components."""
        count = max(self.rollouts, 1)
        mean = self.reward / count
        return {
            "trained/reward": mean,
            "trained/reward_std": max(self.reward_squared / count - mean * mean, 0.0) ** 0.5,
            "trained/completions/mean_length": self.tokens / count,
            "trained/completions/clipped_ratio": self.truncated / count,
            "trained/rollouts": float(self.rollouts),
            **{f"left_out/{code}": float(rows) for code, rows in left_out_uses(self.left_out).items()},
        }


def outcomes_of(batches: Sequence[TrainingBatch], left_out: tuple[BatchUse, ...] = ()) -> Outcomes:
    """The sums over some batches, from which rows were left out before."""
    return Outcomes(
        rollouts=sum(len(batch) for batch in batches),
        reward=float(sum(batch.rewards.sum() for batch in batches)),
        reward_squared=float(sum((batch.rewards * batch.rewards).sum() for batch in batches)),
        tokens=int(sum(batch.loss_mask.sum() for batch in batches)),
        truncated=int(sum(batch.truncated.sum() for batch in batches)),
        left_out=left_out,
    )


def rows_of(uses: Sequence[BatchUse], use: str) -> int:
    """Rollouts used in one way; one that was trained on before counts no more."""
    return sum(item.rows for item in uses if item.use == use and not item.again)


def reused_share(uses: Sequence[BatchUse]) -> float:
    """Share of the rollouts a step trains on that had been trained on before."""
    trained = [use for use in uses if use.use == "trained"]
    return sum(use.rows for use in trained if use.again) / max(sum(use.rows for use in trained), 1)


def trained_rows(uses: Sequence[BatchUse]) -> dict[int, tuple[int, ...]]:
    """Rows that a step trains on by index offset of their batch, both ascending."""
    found: dict[int, list[int]] = {}
    for use in uses:
        if use.use == "trained":
            found.setdefault(use.index_offset, []).extend(use.row_numbers or range(use.rows))
    return {offset: tuple(sorted(found[offset])) for offset in sorted(found)}


def taken_rows(uses: Sequence[BatchUse]) -> dict[int, tuple[int, ...]]:
    """`trained_rows` of the batches a step took, with none for a batch all rows of which were left out."""
    return {use.index_offset: () for use in uses if is_left_out(use)} | trained_rows(uses)


def unfit_uses(read: Indexed, batch: TrainingBatch, config: LearnerConfig) -> tuple[BatchUse, ...]:
    """The rows of a batch that cannot be trained on, as a step has them on record."""
    return tuple(
        replace(_whole(read, skip), rows=len(rows), row_numbers=() if len(rows) == len(batch) else rows)
        for skip, rows in unfit_rows(batch, config).items()
    )


def without(uses: Sequence[BatchUse], left_out: Sequence[BatchUse]) -> tuple[BatchUse, ...]:
    """Uses of whole batches once single rows of them were left out: what is trained on first, then what is not."""
    by_batch: dict[int, list[BatchUse]] = {}
    for use in left_out:
        by_batch.setdefault(use.index_offset, []).append(use)
    found: list[BatchUse] = []
    for use in uses:
        skipped = sorted(by_batch.get(use.index_offset, ()), key=lambda left: left.reason)
        gone = {number for left in skipped for number in left.row_numbers or range(left.rows)}
        kept = tuple(number for number in range(use.rows) if number not in gone)
        if not skipped or kept:
            found.append(replace(use, rows=len(kept), row_numbers=kept) if skipped else use)
        found += skipped
    return tuple(found)


def chosen_rows(batch: TrainingBatch, rows: Sequence[int]) -> TrainingBatch:
    """A batch of these rows alone, in the order given, with the id and the digest of the one they are of."""
    spans = [slice(int(batch.splits[row]), int(batch.splits[row + 1])) for row in rows]
    by_token = ["tokens", "loss_mask", "logprobs"]
    by_row = ["group_index", "source_offsets", "rewards", "truncated", "lowest_versions", "highest_versions"]
    by_row += ["temperatures", "logprobs_processed"]
    (by_row if len(batch.advantages) == len(batch) != len(batch.tokens) else by_token).append("advantages")
    if len(batch.reference_logprobs):
        by_token.append("reference_logprobs")
    arrays: dict[str, Any] = {name: getattr(batch, name)[list(rows)] for name in by_row}
    for name in by_token:
        whole = getattr(batch, name)
        arrays[name] = np.concatenate([whole[span] for span in spans]) if spans else whole[:0]
    splits = np.concatenate([[0], np.cumsum([span.stop - span.start for span in spans])]).astype("<i8")
    return replace(batch, uids=tuple(batch.uids[row] for row in rows), splits=splits, **arrays)

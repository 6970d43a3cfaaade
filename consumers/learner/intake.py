"""Decides which batches make a step: whole ones in index order, excluded and too stale ones skipped on record.

The choice depends on the index, the manifests and the settings, and on what `excluded` says, which answers from the
record of a step that is executed again: so it takes the same batches.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from consumers.batch_reader import BatchReader, ReadBatch
from topics.logs import event
from topics.records import BatchUse

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_REPORT_SKIPS_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one step is made of."""

    uses: tuple[BatchUse, ...]
    """Every batch read for the step, in index order."""
    trained: tuple[ReadBatch, ...]
    """Those it trains on."""
    lags: tuple[int, ...]
    """Steps between each trained batch's lowest policy version and now."""
    position: int
    """Next offset of batch-index."""
    wait_s: float
    """Time it took to get them."""


class Intake:
    """Takes the batches of one step after another.

    `read_version_steps` gives the learner step of every published version; it is asked again when a batch names a
    version it did not know. `skipped` hears of skipped batches that have waited for the rest of their step. `excluded`
    says why a step leaves out a batch whatever its version, "" where it does not.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        rollouts_per_step: int,
        max_policy_lag: int,
        read_version_steps: Callable[[], dict[int, int]],
        skipped: Callable[[tuple[BatchUse, ...]], None],
        excluded: Callable[[int, str], str] = lambda _step, _batch_id: "",
    ) -> None:
        self._reader = reader
        self._rollouts_per_step = rollouts_per_step
        self._max_policy_lag = max_policy_lag
        self._read_version_steps = read_version_steps
        self._version_steps: dict[int, int] = {}
        self._skipped = skipped
        self._excluded = excluded

    def take(self, step: int, stop: threading.Event) -> Taken | None:
        """Batches until there are enough rollouts to train on, after `step` steps; None when `stop` was set first."""
        started = time.monotonic()
        uses: list[BatchUse] = []
        trained: list[ReadBatch] = []
        lags: list[int] = []
        rows = 0
        report_at: float | None = None
        while rows < self._rollouts_per_step:
            if stop.is_set():
                return None
            read = self._reader.poll(_POLL_S)
            if read is None:
                if report_at is not None and time.monotonic() > report_at:
                    self._skipped(tuple(use for use in uses if use.use == "skipped"))
                    report_at = None
                continue
            lag, reason = self._judge(read, step)
            use = BatchUse(
                batch_id=read.entry.batch_id,
                index_offset=read.index_offset,
                rows=read.entry.rollouts,
                use="skipped" if reason else "trained",
                reason=reason,
            )
            uses.append(use)
            if reason:
                report_at = time.monotonic() + _REPORT_SKIPS_AFTER_S
                event(logger, "batch_skipped", batch=use.batch_id, rows=use.rows, reason=reason)
            else:
                trained.append(read)
                lags.append(lag)
                rows += use.rows
        return Taken(
            uses=tuple(uses),
            trained=tuple(trained),
            lags=tuple(lags),
            position=self._reader.position,
            wait_s=time.monotonic() - started,
        )

    def _judge(self, read: ReadBatch, step: int) -> tuple[int, str]:
        """Steps since the batch's lowest policy version was published, and why to skip it ("" to train on it)."""
        if reason := self._excluded(step + 1, read.entry.batch_id):
            return 0, reason
        version = read.entry.lowest_version
        if version not in self._version_steps:
            self._version_steps = self._read_version_steps()
        if version not in self._version_steps:
            return 0, f"policy version {version} is not on record"
        lag = step - self._version_steps[version]
        if lag > self._max_policy_lag:
            return lag, f"policy version {version} is {lag} steps old, max_policy_lag is {self._max_policy_lag}"
        return lag, ""


def trained_metrics(taken: Taken) -> dict[str, float]:
    """Figures over the rollouts a step trains on; those over all rollouts produced are told by other components."""
    batches = [read.batch for read in taken.trained]
    rewards = np.concatenate([batch.rewards for batch in batches])
    lengths = np.concatenate([_trained_lengths(read) for read in taken.trained])
    return {
        "trained/reward": float(rewards.mean()),
        "trained/reward_std": float(rewards.std()),
        "trained/completions/mean_length": float(lengths.mean()),
        "trained/completions/clipped_ratio": float(np.concatenate([batch.truncated for batch in batches]).mean()),
        "trained/rollouts": float(len(rewards)),
        "off_policy/staleness": float(np.mean(taken.lags)),
        "time/wait_for_batch": taken.wait_s,
    }


def rows_of(uses: Sequence[BatchUse], use: str) -> int:
    """Rollouts of the batches used in one way."""
    return sum(item.rows for item in uses if item.use == use)


def _trained_lengths(read: ReadBatch) -> NDArray[np.int64]:
    """Tokens under the loss mask of each row, [R]."""
    ends = np.concatenate([[0], np.cumsum(read.batch.loss_mask, dtype=np.int64)])
    lengths: NDArray[np.int64] = np.diff(ends[read.batch.splits])
    return lengths

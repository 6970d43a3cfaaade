"""Rollouts for a rollout buffer: checks, the rollouts of a batch of the log, and advantages of rollouts added by hand.

Rollouts from the log keep the advantages of their batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Outcomes, estimator, rloo
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Float32, NamedArray, Rollout, RolloutMetadata, SamplingParams, TrainingBatch
from rollstream.topics.wire.rl_examples import REFERENCE, reference_of, stamp_of, stored_arrays_of, token_arrays_of

BATCH = "batch"
"""Key in a rollout's `extra`; its value is the batch and row of the rollout, as in "0-17/3"."""
_DTYPES = np.dtype("<i4"), np.dtype("|b1"), np.dtype("<f4")


def unsound(rollout: Rollout) -> str:
    """Return why a rollout cannot be added, or "" if it can. Reasons are a rollout without tokens, an array of the
    wrong length or dtype, and a reward that is not finite. Rollouts may have different lengths."""
    arrays = rollout.tokens, rollout.loss_mask, rollout.logprobs
    tokens, mask, logprobs = arrays
    length = len(tokens)
    if (tokens.dtype, mask.dtype, logprobs.dtype) != _DTYPES or not (
        tokens.shape == mask.shape == logprobs.shape == (length,)
    ):
        for name, array, dtype in zip(("tokens", "loss_mask", "logprobs"), arrays, _DTYPES, strict=True):
            if array.dtype != dtype or array.shape != (length,):
                return f"{name} is {array.dtype.str} {list(array.shape)}; it must be {dtype.str} [{length}]"
    if not length:
        return "it has no tokens"
    if not math.isfinite(rollout.reward):
        return f"its reward is {rollout.reward}"
    return ""


def rollouts_of(
    batch: TrainingBatch, weight_step_of: Callable[[int], int]
) -> Iterator[tuple[Rollout, float | Float32]]:
    """Yield the rows of a batch as rollouts with their advantages: one number, or one for each token if they differ.

    Arrays are views of the batch's arrays. A rollout has its own time and weight step if the batch has them;
    otherwise it has the stream time at which its group was opened, and the step of the lowest version that sampled it.
    """
    arrays, stored = token_arrays_of(batch), stored_arrays_of(batch)
    per_row = len(batch.advantages) != len(batch.tokens)
    for row, uid in enumerate(batch.uids):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        group = batch.groups[int(batch.group_index[row])]
        lowest = int(batch.lowest_versions[row])
        advantage: float | Float32
        if per_row:
            advantage = float(batch.advantages[row])
        else:
            advantage = batch.advantages[span]
            if len(advantage) and (advantage == advantage[0]).all():
                advantage = float(advantage[0])
        reference = reference_of(batch, row)
        weight_step, timestamp = stamp_of(batch, row)
        named = {name: NamedArray.of(array) for name, array in arrays[row].items()} | stored[row]
        yield (
            Rollout(
                uid=uid,
                group_size=group.size,
                group_id=group.group_id,
                environment=group.environment,
                example_id=group.example_id,
                policy_version=group.policy_version,
                lowest_version=lowest,
                highest_version=int(batch.highest_versions[row]),
                tokens=batch.tokens[span],
                loss_mask=batch.loss_mask[span],
                logprobs=batch.logprobs[span],
                reward=float(batch.rewards[row]),
                logprobs_mode="processed" if batch.logprobs_processed[row] else "raw",
                sampling=SamplingParams(temperature=float(batch.temperatures[row])),
                truncated=bool(batch.truncated[row]),
                metadata=RolloutMetadata(
                    timestamp=timestamp, weight_step=weight_step if weight_step >= 0 else weight_step_of(lowest)
                ),
                token_arrays=named if reference is None else {REFERENCE: NamedArray.of(reference), **named},
                extra={BATCH: f"{batch.batch_id}/{row}"},
            ),
            advantage,
        )


class RLLossModule(Protocol):
    """A loss that computes an advantage for each rollout of a group."""

    def compute_advantages(self, rollouts: Sequence[Rollout], /) -> Sequence[float]:
        """Return one number for each rollout of a group, in order."""


@dataclass(frozen=True)
class EstimatorLoss:
    """Advantages by the estimator `name` of grouping.

    Raises ConfigurationError for an unknown estimator, or one that normalises over batches.
    """

    name: str

    def __post_init__(self) -> None:
        if estimator(self.name).over_batch is not None:
            whole = ", ".join(name for name, how in ESTIMATORS.items() if how.over_batch is None)
            raise ConfigurationError(
                f"estimator {self.name!r} normalises over the batches that grouping cuts, but a group in a buffer "
                f"belongs to no batch; choose {whole}, or read rollouts and their advantages from the log"
            )

    def compute_advantages(self, rollouts: Sequence[Rollout], /) -> list[float]:
        """See `rollstream.consumers.grouping.core.estimators`."""
        return estimator(self.name).within_group(
            Outcomes(
                rewards=tuple(rollout.reward for rollout in rollouts),
                lengths=tuple(int(rollout.loss_mask.sum()) for rollout in rollouts),
            )
        )


@dataclass(frozen=True)
class RLOOLoss(EstimatorLoss):
    """r_i minus the mean of the other rewards; 0 for a group of one rollout."""

    name: str = "rloo"

    def compute_advantages(self, rollouts: Sequence[Rollout], /) -> list[float]:
        """Return advantages from rewards alone, without counting tokens."""
        return rloo(Outcomes(rewards=tuple(rollout.reward for rollout in rollouts), lengths=()))

"""Advantages of rollouts added to a buffer by hand: the part of a loss that needs the whole group.

Rollouts from the log keep the advantages of their batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.consumers.grouping.core.estimators import ESTIMATORS, Outcomes, estimator, rloo
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Rollout


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

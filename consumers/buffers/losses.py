"""Advantages of rollouts that come to a buffer by hand: the part of a loss that looks at a whole group.

Rollouts that come from the log keep the advantages their batch gives them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from consumers.grouping.estimators import ESTIMATORS, Outcomes, estimator, rloo
from topics.errors import ConfigurationError
from topics.records import Rollout


class RLLossModule(Protocol):
    """Any loss that gives each rollout of a group an advantage."""

    def compute_advantages(self, rollouts: Sequence[Rollout], /) -> Sequence[float]:
        """One number for each rollout of a group, in order."""


@dataclass(frozen=True)
class EstimatorLoss:
    """Advantages by one of the estimators that grouping has, by name.

    Raises ConfigurationError for an unknown one, and for one that normalises over batches: a group knows of none.
    """

    name: str

    def __post_init__(self) -> None:
        if estimator(self.name).over_batch is not None:
            whole = ", ".join(name for name, how in ESTIMATORS.items() if how.over_batch is None)
            raise ConfigurationError(
                f"estimator {self.name!r} normalises over the batches that grouping cuts, of which a group in a buffer "
                f"is no part; take {whole}, or read rollouts with the advantages of their batches from the log"
            )

    def compute_advantages(self, rollouts: Sequence[Rollout], /) -> list[float]:
        """See `consumers.grouping.estimators`."""
        return estimator(self.name).within_group(
            Outcomes(
                rewards=tuple(rollout.reward for rollout in rollouts),
                lengths=tuple(int(rollout.loss_mask.sum()) for rollout in rollouts),
            )
        )


@dataclass(frozen=True)
class RLOOLoss(EstimatorLoss):
    """r_i minus the mean of the others, 0 for a group of one."""

    name: str = "rloo"

    def compute_advantages(self, rollouts: Sequence[Rollout], /) -> list[float]:
        """By rewards alone: nobody counts tokens for it."""
        return rloo(Outcomes(rewards=tuple(rollout.reward for rollout in rollouts), lengths=()))

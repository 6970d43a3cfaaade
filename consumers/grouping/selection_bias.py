"""Selection bias of grouping: how far lost rollouts shift mean length and reward, by environment.

It is computed from the counts in the journal. Groups without variance carry no gradient whatever their length, so
dropping them biases nothing. Late, stale, too large and cancelled rollouts would have been trained on: if they are
longer or better than other rollouts, training drifts away from them.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollstream.topics.logs import event
from rollstream.topics.records import FateCount, TrainingBatch
from rollstream.topics.records.fates import BATCHED, DROPPED, dropped_for, fate_and_reason

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest shift of a mean without an alert, in standard deviations of the produced rollouts."""
SIGNIFICANT = 3.29
"""Standard errors by which a shift must differ from zero: one false alarm in a thousand checks, two-sided."""
DEPENDENT = 16
"""Rollouts that count as one observation: the members of a group share a prompt, so sixteen of them are hardly more
informative than one. Alerts on larger groups are less certain than `SIGNIFICANT` says."""

WITHOUT_GRADIENT = tuple(
    dropped_for(reason) for reason in ("zero_variance", "zero_advantage", "no_pair", "duplicate_uid")
)
"""Fates of valid rollouts that would have changed no parameter, or that were produced twice."""
_ROUNDING = 1e-9
MEASURES = ("length", "reward")


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of one measure over some rollouts."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def __sub__(self, other: "Moments") -> "Moments":
        return Moments(self.count - other.count, self.total - other.total, self.squares - other.squares)

    @property
    def mean(self) -> float | None:
        """Mean; None without rollouts."""
        return self.total / self.count if self.count else None

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 if it cannot be distinguished from rounding errors."""
        if not self.count:
            return 0.0
        mean_square = self.squares / self.count
        variance = mean_square - (self.total / self.count) ** 2
        return math.sqrt(variance) if variance > _ROUNDING * mean_square else 0.0


_NOTHING = Moments()


@dataclass(frozen=True)
class RolloutMoments:
    """Number of rollouts, and length and reward of those that were measured."""

    rollouts: int = 0
    length: Moments = _NOTHING
    """Sampled tokens."""
    reward: Moments = _NOTHING

    def __add__(self, other: "RolloutMoments") -> "RolloutMoments":
        return RolloutMoments(self.rollouts + other.rollouts, self.length + other.length, self.reward + other.reward)

    def __sub__(self, other: "RolloutMoments") -> "RolloutMoments":
        return RolloutMoments(self.rollouts - other.rollouts, self.length - other.length, self.reward - other.reward)

    @classmethod
    def of(cls, count: FateCount) -> "RolloutMoments":
        return cls(
            count.rollouts,
            Moments(count.measured, float(count.sampled_tokens), count.sampled_tokens_squared),
            Moments(count.measured, count.reward, count.reward_squared),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return means and standard deviations, None if no rollout was measured."""
        known = self.length.count > 0
        return {
            "rollouts": self.rollouts,
            "measured": self.length.count,
            "mean_length": self.length.mean,
            "deviation_length": self.length.deviation if known else None,
            "mean_reward": self.reward.mean,
            "deviation_reward": self.reward.deviation if known else None,
        }


_NONE = RolloutMoments()


@dataclass(frozen=True)
class Selection:
    """Valid rollouts of one environment that have a fate: batched, without gradient, or lost."""

    environment: str
    batched: RolloutMoments = _NONE
    without_gradient: RolloutMoments = _NONE
    lost: RolloutMoments = _NONE

    @property
    def produced(self) -> RolloutMoments:
        """All valid rollouts with a fate."""
        return self.batched + self.without_gradient + self.lost

    def shift(self, measure: str) -> float:
        """Return how far lost rollouts moved the mean of a measure, in standard deviations of the produced rollouts.

        The shift is positive if the kept rollouts (batched or without gradient) are longer or better than the produced
        rollouts, and 0 if it cannot be computed.
        """
        kept, produced = getattr(self.batched + self.without_gradient, measure), getattr(self.produced, measure)
        if not kept.count or not produced.deviation:
            return 0.0
        return float((kept.total / kept.count - produced.total / produced.count) / produced.deviation)

    def standard_errors(self, measure: str) -> float:
        """Return the shift in standard errors, under the hypothesis that kept and lost rollouts have one distribution.

        This is a z-score with the deviation of all rollouts, in which `DEPENDENT` rollouts count as one. With k kept
        and l lost of n rollouts, mean(kept) - mean(produced) = l/n (mean(kept) - mean(lost)), and the variance of
        mean(kept) - mean(lost) is the variance of one rollout times (1/k + 1/l) = n / (k l).
        """
        kept, lost = getattr(self.batched + self.without_gradient, measure).count, getattr(self.lost, measure).count
        if not kept or not lost:
            return 0.0
        return self.shift(measure) * math.sqrt((kept + lost) * kept / (lost * DEPENDENT))

    def alerts(self, tolerance: float = TOLERANCE) -> tuple[str, ...]:
        """Return the measures whose mean lost rollouts shifted by more than the tolerance, and not by chance."""
        return tuple(
            measure
            for measure in MEASURES
            if abs(self.shift(measure)) > tolerance and abs(self.standard_errors(measure)) > SIGNIFICANT
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the selection as JSON-compatible values."""
        return {
            **{name: getattr(self, name).as_dict() for name in ("produced", "batched", "without_gradient", "lost")},
            **{f"shift_{measure}": self.shift(measure) for measure in MEASURES},
            "alerts": list(self.alerts()),
        }


def selections(counts: Iterable[FateCount]) -> dict[str, Selection]:
    """Return the selections by environment, without environments that have no valid rollout.

    `counts` are the counts in the newest journal record of each partition. Invalid records, dead letters and control
    records are not in any selection, because none of them could have been trained on.
    """
    by_environment: dict[str, Selection] = {}
    for count in counts:
        kind = _kind(count.fate)
        if kind is None or not count.rollouts or (not count.environment and not count.measured):
            continue
        before = by_environment.get(count.environment, Selection(count.environment))
        kinds = {name: getattr(before, name) for name in ("batched", "without_gradient", "lost")}
        kinds[kind] = kinds[kind] + RolloutMoments.of(count)
        by_environment[count.environment] = Selection(count.environment, **kinds)
    return dict(sorted(by_environment.items()))


def batch_moments(batch: TrainingBatch, rows: Iterable[int]) -> dict[str, RolloutMoments]:
    """Return the moments of some rows of a batch, by environment."""
    by_environment: dict[str, RolloutMoments] = {}
    for row in rows:
        length = float(batch.loss_mask[batch.splits[row] : batch.splits[row + 1]].sum())
        reward = float(batch.rewards[row])
        moments = RolloutMoments(1, Moments(1, length, length * length), Moments(1, reward, reward * reward))
        environment = batch.groups[int(batch.group_index[row])].environment
        by_environment[environment] = by_environment.get(environment, _NONE) + moments
    return by_environment


def with_skipped(selected: Mapping[str, Selection], skipped: Mapping[str, RolloutMoments]) -> dict[str, Selection]:
    """Return the selections with the rollouts that learners skipped, by environment, as lost instead of batched.

    An environment stays unchanged if the journals measured fewer rollouts than learners skipped.
    """
    return {
        environment: replace(selection, batched=selection.batched - moved, lost=selection.lost + moved)
        if (moved := skipped.get(environment, _NONE)).rollouts <= selection.batched.length.count
        else selection
        for environment, selection in selected.items()
    }


def _kind(fate: str) -> str | None:
    if fate == BATCHED:
        return "batched"
    if fate in WITHOUT_GRADIENT:
        return "without_gradient"
    name, reason = fate_and_reason(fate)
    return "lost" if name == DROPPED and reason != "invalid" else None


def warning(environment: str, measure: str, selection: Mapping[str, Any]) -> str:
    """Return a one-line warning about an alert, from `Selection.as_dict()`."""
    lost, produced = selection["lost"], selection["produced"]
    return (
        f"environment {environment}: lost rollouts have mean {measure} {lost[f'mean_{measure}']:.4g}, all "
        f"produced rollouts {produced[f'mean_{measure}']:.4g}; this shifts the mean of the kept rollouts by "
        f"{selection[f'shift_{measure}']:+.2f} standard deviations"
    )


class SelectionWatch:
    """Warns once about each environment and measure whose mean was shifted."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def check(self, selected: Mapping[str, Selection]) -> None:
        """Log `selection_biased` for new alerts."""
        for environment, selection in selected.items():
            for measure in selection.alerts():
                if (environment, measure) not in self._warned:
                    self._warned.add((environment, measure))
                    event(
                        logger,
                        "selection_biased",
                        level=logging.WARNING,
                        environment=environment,
                        figure=measure,
                        shift=round(selection.shift(measure), 3),
                        what=warning(environment, measure, selection.as_dict()),
                    )

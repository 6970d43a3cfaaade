"""Whether what grouping lost is of another kind than what it kept: lengths and rewards by environment, from the counts
in the journal. Pure, but for a warning in the log.

Groups without variance carry no gradient whatever their length, so leaving them out biases nothing: that is expected
selection. What is late, stale, too large or cancelled would have been trained on: where it is longer or better than the
rest, training drifts away from it.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from consumers.grouping.changes import BATCHED, DROPPED
from topics.logs import event
from topics.records import FateCount, TrainingBatch

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest shift of a mean that is put up with, in standard deviations of what was produced."""
SIGNIFICANT = 3.29
"""Standard errors a shift must be off zero: one false alarm in a thousand looks, two-sided."""
DEPENDENT = 16
"""Rollouts taken to count as one: members of a group share a prompt, so that sixteen of them tell hardly more than one
of each of sixteen prompts. Groups larger than this make the alert less sure than `SIGNIFICANT` says."""

WITHOUT_GRADIENT = tuple(f"{DROPPED}:{reason}" for reason in ("zero_variance", "zero_advantage", "duplicate_uid"))
"""Fates of sound rollouts that would have changed no parameter, or that are there a second time."""
_ROUNDING = 1e-9
FIGURES = ("length", "reward")


@dataclass(frozen=True)
class Spread:
    """Sums over some rollouts of one figure."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def __add__(self, other: "Spread") -> "Spread":
        return Spread(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def __sub__(self, other: "Spread") -> "Spread":
        return Spread(self.count - other.count, self.total - other.total, self.squares - other.squares)

    @property
    def mean(self) -> float | None:
        """None over nothing."""
        return self.total / self.count if self.count else None

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 where it cannot be told from rounding."""
        if not self.count:
            return 0.0
        mean_square = self.squares / self.count
        variance = mean_square - (self.total / self.count) ** 2
        return math.sqrt(variance) if variance > _ROUNDING * mean_square else 0.0


_NOTHING = Spread()


@dataclass(frozen=True)
class Kind:
    """Rollouts of one kind: how many, and figures of those that were measured."""

    rollouts: int = 0
    length: Spread = _NOTHING
    """Sampled tokens."""
    reward: Spread = _NOTHING

    def __add__(self, other: "Kind") -> "Kind":
        return Kind(self.rollouts + other.rollouts, self.length + other.length, self.reward + other.reward)

    def __sub__(self, other: "Kind") -> "Kind":
        return Kind(self.rollouts - other.rollouts, self.length - other.length, self.reward - other.reward)

    @classmethod
    def of(cls, count: FateCount) -> "Kind":
        return cls(
            count.rollouts,
            Spread(count.measured, float(count.sampled_tokens), count.sampled_tokens_squared),
            Spread(count.measured, count.reward, count.reward_squared),
        )

    def as_dict(self) -> dict[str, Any]:
        """Means and standard deviations; None, unknown, where no rollout was measured."""
        known = self.length.count > 0
        return {
            "rollouts": self.rollouts,
            "measured": self.length.count,
            "mean_length": self.length.mean,
            "deviation_length": self.length.deviation if known else None,
            "mean_reward": self.reward.mean,
            "deviation_reward": self.reward.deviation if known else None,
        }


_NONE = Kind()


@dataclass(frozen=True)
class Selection:
    """What became of the sound rollouts of one environment that have a fate."""

    environment: str
    batched: Kind = _NONE
    without_gradient: Kind = _NONE
    lost: Kind = _NONE

    @property
    def produced(self) -> Kind:
        """All of them."""
        return self.batched + self.without_gradient + self.lost

    def shift(self, figure: str) -> float:
        """How far losing what was lost moved the mean of a figure, in standard deviations of what was produced.

        Positive where what was kept (batched or without gradient) is longer or better than what was produced; 0 where
        nothing can be said.
        """
        kept, produced = getattr(self.batched + self.without_gradient, figure), getattr(self.produced, figure)
        if not kept.count or not produced.deviation:
            return 0.0
        return float((kept.total / kept.count - produced.total / produced.count) / produced.deviation)

    def standard_errors(self, figure: str) -> float:
        """The shift in its standard errors, were kept and lost drawn alike: Student's z with the deviation of all, each
        `DEPENDENT` rollouts counted as one.

        With k kept and l lost of n, mean(kept) - mean(produced) = l/n (mean(kept) - mean(lost)), and the variance of
        the difference of the means is that of one rollout times (1/k + 1/l) = n / (k l).
        """
        kept, lost = getattr(self.batched + self.without_gradient, figure).count, getattr(self.lost, figure).count
        if not kept or not lost:
            return 0.0
        return self.shift(figure) * math.sqrt((kept + lost) * kept / (lost * DEPENDENT))

    def alerts(self, tolerance: float = TOLERANCE) -> tuple[str, ...]:
        """Figures whose mean what was lost has shifted, by more than the tolerance and not by chance."""
        return tuple(
            figure
            for figure in FIGURES
            if abs(self.shift(figure)) > tolerance and abs(self.standard_errors(figure)) > SIGNIFICANT
        )

    def as_dict(self) -> dict[str, Any]:
        """The selection as programs read it."""
        return {
            **{name: getattr(self, name).as_dict() for name in ("produced", "batched", "without_gradient", "lost")},
            **{f"shift_{figure}": self.shift(figure) for figure in FIGURES},
            "alerts": list(self.alerts()),
        }


def selections(counts: Iterable[FateCount]) -> dict[str, Selection]:
    """By environment what the counts of any number of partitions say; environments without a sound rollout are absent.

    Counts are those of the newest journal record of each partition. Invalid records, dead letters and control records
    are of no kind: nothing of them could have been trained on.
    """
    found: dict[str, Selection] = {}
    for count in counts:
        kind = _kind(count.fate)
        if kind is None or not count.rollouts or (not count.environment and not count.measured):
            continue
        before = found.get(count.environment, Selection(count.environment))
        kinds = {name: getattr(before, name) for name in ("batched", "without_gradient", "lost")}
        kinds[kind] = kinds[kind] + Kind.of(count)
        found[count.environment] = Selection(count.environment, **kinds)
    return dict(sorted(found.items()))


def measured(batch: TrainingBatch, rows: Iterable[int]) -> dict[str, Kind]:
    """Rows of a batch, by environment."""
    found: dict[str, Kind] = {}
    for row in rows:
        length = float(batch.loss_mask[batch.splits[row] : batch.splits[row + 1]].sum())
        reward = float(batch.rewards[row])
        one = Kind(1, Spread(1, length, length * length), Spread(1, reward, reward * reward))
        environment = batch.groups[int(batch.group_index[row])].environment
        found[environment] = found.get(environment, _NONE) + one
    return found


def with_skipped(found: Mapping[str, Selection], skipped: Mapping[str, Kind]) -> dict[str, Selection]:
    """Selections in which what learners skipped, by environment, is lost instead of batched.

    An environment stays as it is where the journal, begun by an earlier release, measured fewer rollouts than that.
    """
    return {
        environment: replace(selection, batched=selection.batched - gone, lost=selection.lost + gone)
        if (gone := skipped.get(environment, _NONE)).rollouts <= selection.batched.length.count
        else selection
        for environment, selection in found.items()
    }


def _kind(fate: str) -> str | None:
    if fate == BATCHED:
        return "batched"
    if fate in WITHOUT_GRADIENT:
        return "without_gradient"
    if fate.startswith(f"{DROPPED}:") and fate != f"{DROPPED}:invalid":
        return "lost"
    return None


def warning(environment: str, figure: str, selection: Mapping[str, Any]) -> str:
    """One line on an alert, from `Selection.as_dict()`."""
    lost, produced = selection["lost"], selection["produced"]
    return (
        f"environment {environment}: what was lost has mean {figure} {lost[f'mean_{figure}']:.4g} where "
        f"{produced[f'mean_{figure}']:.4g} was produced, and shifts what is trained on by "
        f"{selection[f'shift_{figure}']:+.2f} standard deviations"
    )


class SelectionWatch:
    """Warns once of each environment and figure whose mean was shifted."""

    def __init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def look(self, found: Mapping[str, Selection]) -> None:
        """Log `selection_biased` for alerts that were not there before."""
        for environment, selection in found.items():
            for figure in selection.alerts():
                if (environment, figure) not in self._warned:
                    self._warned.add((environment, figure))
                    event(
                        logger,
                        "selection_biased",
                        level=logging.WARNING,
                        environment=environment,
                        figure=figure,
                        shift=round(selection.shift(figure), 3),
                        what=warning(environment, figure, selection.as_dict()),
                    )

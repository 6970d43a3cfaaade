"""Advantage estimators: small pure functions from the outcomes of a group's episodes to an advantage for each.

They compute in float64. They sum with math.fsum, which rounds correctly whatever the order, so that a batch has the
same bits on every machine.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollstream.topics.errors import ConfigurationError

EPSILON = 1e-8
"""Added to a standard deviation before dividing by it; also the minimum variance for the normalisation of a batch."""


NOISE = 2.0**-20
"""Largest difference between rewards, as a part of the largest absolute reward, that is taken for rounding: eight
units in the last place of float32. A sum of a few dozen float32 numbers in another order differs by less."""


class TurnOutcome(NamedTuple):
    """One turn of a rollout."""

    role: str
    start: int
    """Index of its first token."""
    stop: int
    """Index after its last token."""
    reward: float


class RolloutDetails(NamedTuple):
    """What else a rollout says about its episode."""

    components: Mapping[str, float]
    """Parts of the reward by name."""
    truncated: bool
    turns: tuple[TurnOutcome, ...]


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Rewards and lengths of the N episodes of a sealed group, in the order in which their first rollouts arrived."""

    rewards: tuple[float, ...]
    """Reward of each episode, [N]: the mean over its branches; equal rewards if they differ by no more than `NOISE`."""
    lengths: tuple[int, ...]
    """Number of sampled tokens of each episode, [N]: the sum over the loss masks of its branches."""
    details: tuple[tuple[RolloutDetails, ...], ...] = ()
    """Details of the branches of each episode, [N], in order of arrival; empty for an estimator without `details`."""


@dataclass(frozen=True)
class Estimator:
    """Computation of advantages: within each group when it seals, and for some estimators again over each batch."""

    within_group: Callable[[Outcomes], list[float]]
    over_batch: Callable[[Sequence[float], Sequence[float]], list[float]] | None = None
    """New advantages of a batch's rows, from their advantages and weights."""
    keeps_equal_rewards: bool = False
    """Whether a group of equal rewards still teaches something; otherwise it is dropped as `zero_variance`, unless
    grouping.keep_zero_variance is set."""
    details: bool = False
    """Whether it needs `Outcomes.details`, which the groups of its environments then hold in memory."""


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value; the mean of equal values is exactly that value."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def without_noise(rewards: Sequence[float]) -> tuple[float, ...]:
    """Return the rewards of a group, all equal to the first if they differ by rounding alone (`NOISE`).

    Otherwise an estimator that divides by the standard deviation would turn rounding into advantages of order 1.
    """
    noise = NOISE * max(abs(reward) for reward in rewards)
    return (rewards[0],) * len(rewards) if max(rewards) - min(rewards) <= noise else tuple(rewards)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation."""
    middle = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - middle) * (v - middle) for v in values) / len(values))


def rloo(outcomes: Outcomes) -> list[float]:
    """r_i minus the mean of the other members; 0 for a group of one. REINFORCE Leave-One-Out, arXiv:2402.14740."""
    rewards = outcomes.rewards
    count = len(rewards)
    if min(rewards) == max(rewards):  # exactly 0, without the rounding of the sums
        return [0.0] * count
    total = math.fsum(rewards)
    return [r - (total - r) / (count - 1) for r in rewards]


def rloo_normalized(outcomes: Outcomes) -> list[float]:
    """rloo divided by the standard deviation of the whole group plus EPSILON."""
    scale = _std(outcomes.rewards) + EPSILON
    return [a / scale for a in rloo(outcomes)]


def grpo(outcomes: Outcomes) -> list[float]:
    """(r_i - mean) / (std + EPSILON) over the whole group. GRPO, arXiv:2402.03300."""
    scale = _std(outcomes.rewards) + EPSILON
    return [a / scale for a in dr_grpo(outcomes)]


def dr_grpo(outcomes: Outcomes) -> list[float]:
    """r_i - mean: GRPO without the division that favours questions of low variance. Dr. GRPO, arXiv:2503.20783."""
    middle = mean(outcomes.rewards)
    return [r - middle for r in outcomes.rewards]


def opo(outcomes: Outcomes) -> list[float]:
    """r_i - sum(l_j r_j) / sum(l_j): the baseline with the least variance if a gradient's norm grows with length. OPO,
    arXiv:2505.23585. If nothing was sampled, the baseline is the plain mean."""
    total = math.fsum(outcomes.lengths)
    if not total or min(outcomes.rewards) == max(outcomes.rewards):
        return dr_grpo(outcomes)
    weighted = (length * r for length, r in zip(outcomes.lengths, outcomes.rewards, strict=True))
    baseline = math.fsum(weighted) / total
    return [r - baseline for r in outcomes.rewards]


def reward_alone(outcomes: Outcomes) -> list[float]:
    """r_i without a baseline: the first stage of REINFORCE++ (arXiv:2501.03262, section 3.1), whose only baseline is
    the mean over the whole batch."""
    return list(outcomes.rewards)


def best(outcomes: Outcomes) -> list[float]:
    """1 for the first episode of the highest reward, if that is above 0, and 0 for the others: rejection sampling, for
    supervised training on the best of each group (RAFT, arXiv:2304.06767)."""
    rewards = outcomes.rewards
    chosen = rewards.index(max(rewards)) if max(rewards) > 0 else -1
    return [float(number == chosen) for number in range(len(rewards))]


def best_worst(outcomes: Outcomes) -> list[float]:
    """1 for the first episode of the highest reward, -1 for the first of the lowest, and 0 for the others: pairs, for
    direct preference optimisation (DPO, arXiv:2305.18290). Equal rewards make no pair: 0 for all."""
    rewards = outcomes.rewards
    highest, lowest = max(rewards), min(rewards)
    chosen, rejected = rewards.index(highest), rewards.index(lowest)
    return [float(number == chosen) - float(number == rejected) for number in range(len(rewards))]


def standardized(advantages: Sequence[float], weights: Sequence[float]) -> list[float]:
    """(a_i - mean) / sqrt(max(variance, EPSILON)), with weighted mean and variance; a_i if all weights are 0.

    If the weight of each row is its number of sampled tokens, this is the normalisation over the tokens of a batch in
    REINFORCE++, arXiv:2501.03262.
    """
    total = math.fsum(weights)
    if not total:
        return list(advantages)
    middle = math.fsum(w * a for w, a in zip(weights, advantages, strict=True)) / total
    squares = (w * (a - middle) * (a - middle) for w, a in zip(weights, advantages, strict=True))
    scale = math.sqrt(max(math.fsum(squares) / total, EPSILON))
    return [(a - middle) / scale for a in advantages]


ESTIMATORS: dict[str, Estimator] = {
    "rloo": Estimator(rloo),
    "rloo_normalized": Estimator(rloo_normalized),
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "opo": Estimator(opo),
    "reinforce_pp": Estimator(dr_grpo, standardized),
    "reinforce_pp_global": Estimator(reward_alone, standardized, keeps_equal_rewards=True),
    "best": Estimator(best, keeps_equal_rewards=True),
    "best_worst": Estimator(best_worst),
}


def is_user_estimator(name: str) -> bool:
    """Whether a name refers to a user's estimator: package.module:name or path/to/file.py:name."""
    return ":" in name


def estimator(name: str, estimators: Mapping[str, Estimator] = ESTIMATORS) -> Estimator:
    """Return the estimator with that name from `estimators`. Raises ConfigurationError for an unknown name."""
    if name not in estimators:
        remedy = "; an estimator of yours must be named in grouper.estimators, too" if is_user_estimator(name) else ""
        raise ConfigurationError(f"grouping.estimator is {name!r}; estimators are {', '.join(estimators)}{remedy}")
    return estimators[name]

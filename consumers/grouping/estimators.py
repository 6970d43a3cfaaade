"""Advantage estimators: small pure functions from a group's rewards to one number a member, in float64.

Sums are math.fsum, correctly rounded whatever the order, so that a batch has the same bits on every machine.
"""

import math
from collections.abc import Callable, Sequence

from topics.errors import ConfigurationError

Estimator = Callable[[Sequence[float]], list[float]]
EPSILON = 1e-8
"""Added to a standard deviation before dividing by it."""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) * (v - mean) for v in values) / len(values))


def rloo(rewards: Sequence[float]) -> list[float]:
    """r_i minus the mean of the other members; 0 for a group of one. REINFORCE Leave-One-Out, arXiv:2402.14740."""
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    total = math.fsum(rewards)
    return [r - (total - r) / (count - 1) for r in rewards]


def rloo_normalized(rewards: Sequence[float]) -> list[float]:
    """rloo divided by the standard deviation of the whole group plus EPSILON."""
    scale = _std(rewards) + EPSILON
    return [a / scale for a in rloo(rewards)]


def grpo(rewards: Sequence[float]) -> list[float]:
    """(r_i - mean) / (std + EPSILON) over the whole group. GRPO, arXiv:2402.03300."""
    mean, scale = _mean(rewards), _std(rewards) + EPSILON
    return [(r - mean) / scale for r in rewards]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r_i - mean: GRPO without the division that favours questions of low variance. Dr. GRPO, arXiv:2503.20783."""
    mean = _mean(rewards)
    return [r - mean for r in rewards]


ESTIMATORS: dict[str, Estimator] = {
    "rloo": rloo,
    "rloo_normalized": rloo_normalized,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
}


def estimator(name: str) -> Estimator:
    """The estimator of that name. Raises ConfigurationError for an unknown one."""
    if name not in ESTIMATORS:
        raise ConfigurationError(f"grouping.estimator is {name!r}; estimators are {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]

"""A rollout succeeds by its component `exact`, or by its reward where it has none."""

import math

import pytest

from rollstream.consumers.grouping.testing import example_rollout


@pytest.mark.parametrize(
    ("reward", "components", "success"),
    [
        (1.0, {}, True),
        (5.0, {"format": 0.0}, True),
        (0.99, {}, False),
        (-1.0, {}, False),
        (0.3, {"exact": 1.0}, True),
        (1.0, {"exact": 0.0}, False),
        (1.0, {"exact": 0.5}, False),
        (1.0, {"exact": math.nan}, False),
        (math.nan, {}, False),
    ],
)
def test_exact_says_whether_a_rollout_succeeded_and_without_it_a_reward_of_at_least_1(
    reward: float, components: dict[str, float], success: bool
) -> None:
    assert example_rollout("x", reward=reward, reward_components=components).success is success

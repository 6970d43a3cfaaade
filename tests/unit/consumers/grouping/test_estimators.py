"""Advantage estimators against hand-computed cases and formulas written a second time, in numpy float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from consumers.grouping.config import GroupingConfig
from consumers.grouping.estimators import ESTIMATORS, estimator
from consumers.grouping.testing import GroupingTestDriver, example_rollout
from topics.errors import ConfigurationError

rewards = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16)

Formula = Callable[[NDArray[np.float64]], NDArray[np.float64]]

INDEPENDENT: dict[str, Formula] = {
    "rloo": lambda r: len(r) / (len(r) - 1) * (r - r.mean()),
    "rloo_normalized": lambda r: len(r) / (len(r) - 1) * (r - r.mean()) / (r.std() + 1e-8),
    "grpo": lambda r: (r - r.mean()) / (r.std() + 1e-8),
    "dr_grpo": lambda r: r - r.mean(),
}


def test_every_estimator_has_an_independent_formula() -> None:
    assert set(INDEPENDENT) == set(ESTIMATORS)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(values=rewards)
def test_an_estimator_agrees_with_its_formula_in_float64(name: str, values: list[float]) -> None:
    r = np.array(values)
    spread = float(np.abs(r).max())
    expected = INDEPENDENT[name](r)
    # A standard deviation of rounding errors alone says nothing.
    if name in ("grpo", "rloo_normalized") and r.std() < 1e-6 * max(spread, 1.0):
        return
    tolerance = 1e-12 * max(spread, 1.0) / (1.0 if name in ("rloo", "dr_grpo") else max(float(r.std()), 1e-9))
    np.testing.assert_allclose(ESTIMATORS[name](values), expected, rtol=1e-9, atol=max(tolerance, 1e-12))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", [1, 0], [1, -1]),
        ("rloo", [3, 1, 2], [1.5, -1.5, 0]),
        ("rloo", [1, 0, 0, 0, 0, 0, 0, 0], [1, *[-1 / 7] * 7]),
        ("dr_grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("dr_grpo", [3, 1, 2], [1, -1, 0]),
        ("grpo", [1, 0, 0, 1], [1, -1, -1, 1]),
        ("grpo", [1, 0, 0, 0], [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]),
        ("rloo_normalized", [1, 0, 0, 1], [4 / 3, -4 / 3, -4 / 3, 4 / 3]),
        ("rloo_normalized", [3, 1], [2, -2]),
    ],
)
def test_an_estimator_on_a_case_computed_by_hand(name: str, values: list[float], expected: list[float]) -> None:
    assert ESTIMATORS[name](values) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(values=rewards, data=st.data())
def test_a_member_s_advantage_does_not_depend_on_the_order_of_the_others(
    name: str, values: list[float], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(values))))
    before, after = ESTIMATORS[name](values), ESTIMATORS[name]([values[i] for i in order])
    assert after == [before[i] for i in order]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("values", [[1e30, -1e30], [1e30, 1e30, -1e30, 0], [5e-324, 0], [1e-200, -1e-200]])
def test_advantages_of_extreme_rewards_are_finite_in_float32(name: str, values: list[float]) -> None:
    assert np.isfinite(np.array(ESTIMATORS[name](values), "<f4")).all()


def test_a_group_of_one_has_no_advantage() -> None:
    assert ESTIMATORS["rloo"]([5.0]) == [0.0]


def test_dividing_by_the_deviation_of_the_whole_group_keeps_two_successes_below_a_lone_one() -> None:
    alone = ESTIMATORS["rloo_normalized"]([1, 0, 0, 0, 0, 0, 0, 0])[0]
    two = ESTIMATORS["rloo_normalized"]([1, 1, 0, 0, 0, 0, 0, 0])[0]
    assert alone > two > 0


def test_batches_carry_advantages_as_float32_on_every_token() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=4))
    for i, reward in enumerate([1.0, 0.0, 0.0, 1.0]):
        driver.pipe(example_rollout(str(i), reward, group_size=4))
    (batch,) = driver.batches
    assert batch.advantages.dtype == np.dtype("<f4")
    expected = np.float32([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert batch.advantages.reshape(4, 4).tolist() == np.repeat(expected[:, None], 4, axis=1).tolist()


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="estimators are rloo, rloo_normalized, grpo, dr_grpo"):
        estimator("ppo")

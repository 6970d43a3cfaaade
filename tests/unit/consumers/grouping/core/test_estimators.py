"""Advantage estimators agree with independent formulas in numpy and with cases computed by hand."""

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.estimators import (
    ESTIMATORS,
    Outcomes,
    estimator,
    mean,
    standardized,
    without_noise,
)
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.errors import ConfigurationError

Array = NDArray[np.float64]

episodes = st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 5_000)), min_size=2, max_size=16)
rows = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 5_000)), min_size=1, max_size=16)
BASED = ("dr_grpo", "grpo", "opo", "reinforce_pp", "rloo", "rloo_normalized")
"""They compare the members of a group."""


def outcomes(rewards: Sequence[float], lengths: Sequence[int] | None = None) -> Outcomes:
    return Outcomes(rewards=tuple(rewards), lengths=tuple(lengths or [10] * len(rewards)))


def within(name: str, rewards: Sequence[float], lengths: Sequence[int] | None = None) -> list[float]:
    return ESTIMATORS[name].within_group(outcomes(rewards, lengths))


def _weighted(r: Array, n: Array) -> Array:
    return r - (np.average(r, weights=n) if n.any() else r.mean())


INDEPENDENT: dict[str, Callable[[Array, Array], Array]] = {
    "rloo": lambda r, n: len(r) / (len(r) - 1) * (r - r.mean()),
    "rloo_normalized": lambda r, n: len(r) / (len(r) - 1) * (r - r.mean()) / (r.std() + 1e-8),
    "grpo": lambda r, n: (r - r.mean()) / (r.std() + 1e-8),
    "dr_grpo": lambda r, n: r - r.mean(),
    "opo": _weighted,
    "reinforce_pp": lambda r, n: r - r.mean(),
    "reinforce_pp_global": lambda r, n: r,
    "best": lambda r, n: np.eye(len(r))[r.argmax()] * (r.max() > 0),
    "best_worst": lambda r, n: np.eye(len(r))[r.argmax()] - np.eye(len(r))[r.argmin()],
}


def over_tokens(advantages: Array, tokens: NDArray[np.int64]) -> Array:
    """The second stage of REINFORCE++ spelt out token by token, as trainers with padded arrays do it."""
    each = np.repeat(advantages, tokens)
    if not len(each):
        return advantages
    return np.asarray((advantages - each.mean()) / np.sqrt(max(each.var(), 1e-8)), "<f8")


def test_every_estimator_has_an_independent_formula() -> None:
    assert set(INDEPENDENT) == set(ESTIMATORS)
    assert [name for name, how in ESTIMATORS.items() if how.over_batch] == ["reinforce_pp", "reinforce_pp_global"]
    assert {*BASED, "reinforce_pp_global", "best", "best_worst"} == set(ESTIMATORS)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=settings().max_examples // 2)
@given(group=episodes)
def test_an_estimator_agrees_with_its_formula_in_float64(name: str, group: list[tuple[float, int]]) -> None:
    r, n = np.array([g[0] for g in group]), np.array([g[1] for g in group], "<f8")
    spread = float(np.abs(r).max())
    divides = name in ("grpo", "rloo_normalized")
    # A standard deviation of rounding errors alone means nothing.
    if divides and r.std() < 1e-6 * max(spread, 1.0):
        return
    tolerance = 1e-12 * max(spread, 1.0) / (max(float(r.std()), 1e-9) if divides else 1.0)
    got = within(name, r.tolist(), n.astype(int).tolist())
    np.testing.assert_allclose(got, INDEPENDENT[name](r, n), rtol=1e-9, atol=max(tolerance, 1e-12))


@given(batch=st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 300)), min_size=1, max_size=16))
def test_normalising_over_a_batch_agrees_with_its_formula_token_by_token(batch: list[tuple[float, int]]) -> None:
    a, n = np.array([b[0] for b in batch]), np.array([b[1] for b in batch])
    np.testing.assert_allclose(standardized(a.tolist(), n.tolist()), over_tokens(a, n), rtol=1e-6, atol=1e-6)


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
        ("opo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("reinforce_pp", [3, 1, 2], [1, -1, 0]),
        ("best", [1, 3, 2, 3], [0, 1, 0, 0]),
        ("best", [0.5, 0.5], [1, 0]),
        ("best", [0, -1, 0], [0, 0, 0]),
        ("best_worst", [1, 3, 1, 3], [-1, 1, 0, 0]),
        ("best_worst", [2, 2], [0, 0]),
    ],
)
def test_an_estimator_on_a_case_computed_by_hand(name: str, values: list[float], expected: list[float]) -> None:
    assert within(name, values) == pytest.approx(expected, rel=1e-7)


def test_normalising_over_a_batch_on_cases_computed_by_hand() -> None:
    assert standardized([1, -1], [5, 5]) == pytest.approx([1, -1])
    # Three tokens at 1 and one at -1: mean 1/2, variance 3/4.
    assert standardized([1, -1], [3, 1]) == pytest.approx([0.5 / math.sqrt(0.75), -1.5 / math.sqrt(0.75)])
    # A variance below 1e-8 counts as 1e-8.
    assert standardized([1e-6, -1e-6], [1, 1]) == pytest.approx([1e-2, -1e-2])
    assert standardized([0.3, -0.2], [0, 0]) == [0.3, -0.2]


@given(name=st.sampled_from(sorted(ESTIMATORS)), group=episodes, data=st.data())
def test_a_member_s_advantage_does_not_depend_on_the_order_of_the_others(
    name: str, group: list[tuple[float, int]], data: st.DataObject
) -> None:
    # These take the first of equals.
    assume(name not in {"best", "best_worst"} or len({reward for reward, _length in group}) == len(group))
    order = data.draw(st.permutations(range(len(group))))
    shuffled = [group[i] for i in order]
    before = within(name, *map(list, zip(*group, strict=True)))  # type: ignore[arg-type]
    after = within(name, *map(list, zip(*shuffled, strict=True)))  # type: ignore[arg-type]
    assert after == [before[i] for i in order]


@given(batch=rows, data=st.data())
def test_normalising_over_a_batch_does_not_depend_on_the_order_of_rows(
    batch: list[tuple[float, float]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    before = standardized([b[0] for b in batch], [b[1] for b in batch])
    assert standardized([batch[i][0] for i in order], [batch[i][1] for i in order]) == [before[i] for i in order]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("values", [[1e30, -1e30], [1e30, 1e30, -1e30, 0], [5e-324, 0], [1e-200, -1e-200]])
@pytest.mark.parametrize("length", [0, 1, 2**20])
def test_advantages_of_extreme_rewards_are_finite_in_float32(name: str, values: list[float], length: int) -> None:
    advantages = within(name, values, [length] * len(values))
    assert np.isfinite(np.array(advantages, "<f4")).all()
    assert np.isfinite(np.array(standardized(advantages, [length] * len(values)), "<f4")).all()


def test_a_group_of_one_has_no_advantage() -> None:
    assert within("rloo", [5.0]) == [0.0]


@given(value=st.floats(-1e30, 1e30), count=st.integers(1, 9))
def test_the_mean_of_equal_rewards_is_that_reward(value: float, count: int) -> None:
    assert mean([value] * count) == value


# ---------------------------------------------------------------------- the trap


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_no_estimator_falls_into_the_trap(name: str) -> None:
    per_success = [within(name, [1.0] * n + [0.0] * (8 - n))[0] for n in range(1, 8)]
    assert per_success == sorted(per_success, reverse=True)


# ---------------------------------------------------------------------- in batches


def test_batches_carry_advantages_as_float32_on_every_token() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=4))
    for i, reward in enumerate([1.0, 0.0, 0.0, 1.0]):
        driver.pipe(example_rollout(str(i), reward, group_size=4))
    (batch,) = driver.batches
    assert batch.advantages.dtype == np.dtype("<f4")
    expected = np.float32([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert batch.advantages.reshape(4, 4).tolist() == np.repeat(expected[:, None], 4, axis=1).tolist()


def test_a_batch_is_normalised_over_the_sampled_tokens_of_all_its_groups() -> None:
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=4, estimator="reinforce_pp"))
    rewards, sampled = [1.0, 0.0, 3.0, 0.0], [1, 4, 2, 8]
    for i, (reward, count) in enumerate(zip(rewards, sampled, strict=True)):
        mask = np.arange(10) >= 10 - count
        driver.pipe(
            example_rollout(str(i), reward, example_id=str(i // 2), tokens=np.arange(10, dtype="<i4"), loss_mask=mask)
        )
    (batch,) = driver.batches
    per_token = batch.advantages[batch.loss_mask].astype("<f8")
    assert per_token.mean() == pytest.approx(0, abs=1e-6)
    assert per_token.std() == pytest.approx(1, abs=1e-6)
    expected = over_tokens(np.array([0.5, -0.5, 1.5, -1.5]), np.array(sampled))
    assert batch.advantages.reshape(4, 10)[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_reinforce_pp_without_a_group_baseline_compares_groups_of_equal_rewards_with_the_batch() -> None:
    """arXiv:2501.03262: (r - mean) / std over the tokens of the global batch, and no other baseline."""
    driver = GroupingTestDriver(GroupingConfig(batch_rollouts=6, estimator="reinforce_pp_global"))
    rewards, sampled = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0], [1, 4, 2, 8, 3, 5]
    for i, (reward, count) in enumerate(zip(rewards, sampled, strict=True)):
        mask = np.arange(10) >= 10 - count
        driver.pipe(
            example_rollout(str(i), reward, example_id=str(i // 2), tokens=np.arange(10, dtype="<i4"), loss_mask=mask)
        )
    (batch,) = driver.batches
    expected = over_tokens(np.array(rewards), np.array(sampled))
    assert batch.advantages.reshape(6, 10)[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert driver.drops == []


def test_groups_of_equal_rewards_are_kept_if_the_configuration_says_so() -> None:
    for keeps, reasons in ((False, ["zero_variance"] * 2), (True, [])):
        driver = GroupingTestDriver(GroupingConfig(batch_rollouts=2, keep_zero_variance=keeps))
        for uid in "ab":
            driver.pipe(example_rollout(uid, 1.0))
        assert [drop.reason for drop in driver.drops] == reasons
        assert [batch.advantages.tolist() for batch in driver.batches] == [[0.0] * 8] * keeps


def test_an_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="estimators are rloo, rloo_normalized, grpo, dr_grpo, opo"):
        estimator("ppo")


@given(
    name=st.sampled_from(BASED),
    items=st.lists(st.floats(2**-7, 1.0, width=32), min_size=2, max_size=24),
    orders=st.lists(st.randoms(use_true_random=False), min_size=2, max_size=8),
    scale=st.sampled_from((1.0, -1.0, 1e7)),
)
def test_rewards_that_differ_by_the_order_of_a_sum_teach_nothing(
    name: str, items: list[float], orders: list[random.Random], scale: float
) -> None:
    rewards = [scale * float(sum(map(np.float32, order.sample(items, len(items))), np.float32(0))) for order in orders]
    for keep in (False, True):
        driver = GroupingTestDriver(GroupingConfig(estimator=name, keep_zero_variance=keep))
        for member, reward in enumerate(rewards):
            driver.pipe(example_rollout(str(member), reward, group_size=len(rewards)))
        driver.drain()
        assert {drop.reason for drop in driver.drops} == (set() if keep else {"zero_variance"})
        assert [set(batch.advantages.tolist()) for batch in driver.batches] == ([{0.0}] if keep else [])


@given(reward=st.floats(1e-300, 1e8), apart=st.sampled_from((-1, 1)))
def test_only_rewards_that_differ_by_a_millionth_or_less_are_equal(reward: float, apart: int) -> None:
    less, more = reward * (1 - apart * 2.0**-21), reward * (1 - 2.0**-19)
    assert without_noise([reward, less, reward]) == (reward,) * 3
    assert without_noise([reward, more]) == (reward, more)
    assert without_noise([0.0, reward]) == (0.0, reward)

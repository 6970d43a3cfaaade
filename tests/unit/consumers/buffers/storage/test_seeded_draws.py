"""Counter-based random choices: the same arguments give the same draws, with the documented probabilities."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.buffers.storage.seeded_draws import generator_at, weighted_without_replacement


def test_a_generator_is_a_function_of_its_numbers() -> None:
    actual = {
        numbers: tuple(generator_at(*numbers).integers(0, 2**63, 4))
        for numbers in [(0,), (1,), (0, 1), (0, 0, 1), (0, 0, 0, 1), (2**64, 0), (-1, 3), (0, -1)]
    }
    assert len(set(actual.values())) == len(actual)
    assert all(tuple(generator_at(*numbers).integers(0, 2**63, 4)) == drawn for numbers, drawn in actual.items())
    assert tuple(generator_at(0, 0).integers(0, 2**63, 4)) == actual[(0,)]


def test_long_draws_of_one_counter_do_not_run_into_the_next() -> None:
    first, second = generator_at(7, 1).random(20_000), generator_at(7, 2).random(20_000)
    assert not np.isin(first, second).any()


def test_orders_without_replacement_have_the_probabilities_of_successive_draws() -> None:
    """All 24 orders of four items, chi-square with 23 degrees of freedom: 49.7 at 0.001."""
    weights, rounds = np.array([1.0, 4.0, 9.0, 16.0]), 5_000
    counts = Counter(
        tuple(weighted_without_replacement(generator_at(5, number), np.log(weights), 4).tolist())
        for number in range(rounds)
    )
    statistic = 0.0
    for order in permutations(range(4)):
        left, probability = weights.sum(), 1.0
        for item in order:
            probability *= weights[item] / left
            left -= weights[item]
        statistic += (counts[order] - rounds * probability) ** 2 / (rounds * probability)
    assert statistic < 49.7


@given(
    st.integers(1, 3000), st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False), st.data(), st.integers(0, 2**70)
)
def test_no_exponent_overflows(count: int, alpha: float, data: st.DataObject, seed: int) -> None:
    wanted = data.draw(st.integers(0, count))
    log_weights = alpha * np.log(np.arange(1, count + 1))
    drawn = weighted_without_replacement(generator_at(seed), log_weights, wanted)
    assert len(set(drawn.tolist())) == wanted
    assert all(0 <= item < count for item in drawn.tolist())
    if abs(alpha) > 1e5 and wanted and count < 1000:
        assert drawn[0] == (count - 1 if alpha > 0 else 0)
    assert math.isfinite(log_weights.sum())


def test_drawing_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="4 of 3 without replacement"):
        weighted_without_replacement(generator_at(0), np.zeros(3), 4)

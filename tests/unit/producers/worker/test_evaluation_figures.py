"""Figures of evaluations: pass@k counts every choice of k answers; intervals are seeded and hold the means."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.testing import example_rollout
from rollstream.producers.worker.evaluation_figures import Answer, figures, means, pass_at, prompts_named

PROMPTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8)


def answers_of(prompts: list[list[bool]]) -> list[Answer]:
    return [Answer(f"x{n}", float(success), success) for n, given in enumerate(prompts) for success in given]


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_success(
    outcomes: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    choices = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
    assert pass_at(k, len(outcomes), sum(outcomes)) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


@given(prompts=PROMPTS, data=st.data())
def test_figures_do_not_depend_on_the_order_and_lie_within_their_intervals_if_prompts_are_alike(
    prompts: list[list[bool]], data: st.DataObject
) -> None:
    answers = answers_of(prompts)
    shuffled = data.draw(st.permutations(answers))
    assert means(shuffled) == means(answers)
    assert figures([shuffled]) == figures([answers])
    alike = figures([answers_of([prompts[0]] * 5)])
    assert all(figure.low == pytest.approx(figure.mean) == pytest.approx(figure.high) for figure in alike.values())


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6)), (8, (2, 4, 8))]
)
def test_k_is_each_power_of_two_up_to_the_fewest_answers_of_a_prompt_and_that(
    samples: int, ks: tuple[int, ...]
) -> None:
    answers = answers_of([[True] * samples, [False] * (samples + 1)])
    assert means(answers) == {"reward": 0.5, "success": 0.5, **{f"pass@{k}": 0.5 for k in ks}}


def test_an_interval_has_the_width_that_the_spread_of_prompts_gives_it() -> None:
    figure = figures([answers_of([[n % 4 == 0] for n in range(400)])])["success"]
    error = math.sqrt(0.25 * 0.75 / 400)
    assert figure.mean == 0.25
    assert figure.low == pytest.approx(0.25 - 1.96 * error, abs=0.2 * error)
    assert figure.high == pytest.approx(0.25 + 1.96 * error, abs=0.2 * error)


def test_a_suite_gives_each_of_its_environments_the_same_weight_and_has_the_figures_that_all_have() -> None:
    few, many = answers_of([[True, True], [True, False]]), answers_of([[False] for _ in range(98)])
    suite = figures([few, many])
    assert list(suite) == ["reward", "success"]
    assert suite["success"].mean == 0.375
    assert 0.25 <= suite["success"].low < 0.375 < suite["success"].high <= 0.5
    draws = np.random.default_rng(1).choice([1.0, 0.5], (10_000, 2)).mean(axis=1) / 2
    assert suite["success"].low == np.quantile(draws, 0.025)


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("0", 0), ("", None), ("many", None), ("-1", None), ("²", None), ("9" * 10, None)]
)
def test_only_a_short_number_says_how_many_prompts_an_evaluation_has(text: str, number: int | None) -> None:
    assert prompts_named(example_rollout("x", extra={"prompts": text})) == number

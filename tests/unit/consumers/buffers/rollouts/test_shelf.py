"""The shelf holds and draws by the rules, with the documented probabilities, and counts every rollout that leaves."""

import dataclasses
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.buffers.rollouts.shelf import Shelf, ShelfEntry, ShelfRules
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.topics.errors import ConfigurationError

FOREVER = ShelfRules(max_samples=-1, max_rollout_step_delay=-1, max_rollout_timestamp_delay=-1)


def entries(
    count: int, environment: str = "env", *, weight_step: int = 0, timestamp: float = 0.0
) -> list[ShelfEntry[str]]:
    return [ShelfEntry(f"{environment}{i}", environment, weight_step, timestamp) for i in range(count)]


def filled(rules: ShelfRules, **counts: int) -> Shelf[str]:
    shelf: Shelf[str] = Shelf(rules)
    for name, count in counts.items():
        assert shelf.add(entries(count, name), 0, 0.0) == []
    return shelf


def chi_square(counts: Counter[object], expected: dict[object, float], rounds: int) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[key] - rounds * p) ** 2 / (rounds * p) for key, p in expected.items())


@pytest.mark.parametrize(
    ("weight_step", "timestamp", "fresh"),
    [
        (10, 1000.0, True),
        (8, 1000.0, True),
        (7, 1000.0, False),  # a step too old
        (11, 1000.0, True),  # of weights that this learner has not yet heard of
        (10, 901.0, True),
        (10, 900.0, False),  # exactly at the limit is stale
        (7, 900.0, False),
    ],
)
def test_freshness_depends_on_step_and_time(weight_step: int, timestamp: float, fresh: bool) -> None:
    rules = ShelfRules(max_rollout_step_delay=2, max_rollout_timestamp_delay=100)
    assert (rules.stale(weight_step, timestamp, 10, 1000.0) == "") is fresh
    admitted: Shelf[str] = Shelf(rules)
    left = admitted.add([ShelfEntry("a", "env", weight_step, timestamp)], 10, 1000.0)
    assert (len(admitted), len(left)) == ((1, 0) if fresh else (0, 1))
    kept: Shelf[str] = Shelf(dataclasses.replace(FOREVER))
    kept.add([ShelfEntry("a", "env", weight_step, timestamp)], 99, 1000.0)
    kept.rules = rules
    assert (kept.refresh(10, 1000.0) == []) is fresh
    assert len(kept) == fresh


def test_a_stale_rollout_has_a_code_and_a_text() -> None:
    rules = ShelfRules(max_rollout_step_delay=2, max_rollout_timestamp_delay=100)
    for place, code, text in (
        ((7, 1000.0), "old_step", "weight step 7 is 3 steps old, at most 2 may be"),
        ((10, 900.0), "too_old", "100 s old or more"),
        ((10, 1000.0), "", ""),
    ):
        assert (rules.stale_code(*place, 10, 1000.0), rules.stale(*place, 10, 1000.0)) == (code, text)


def test_a_negative_delay_means_no_limit() -> None:
    assert FOREVER.stale(-1, 0.0, 10**9, 1e18) == ""
    by_time = ShelfRules(max_rollout_step_delay=-1, max_rollout_timestamp_delay=10)
    assert by_time.stale(-1, 0.0, 10**9, 9.0) == ""
    assert by_time.stale(-1, 0.0, 10**9, 10.0) == "10 s old or more"
    by_step = ShelfRules(max_rollout_step_delay=0, max_rollout_timestamp_delay=-1)
    assert by_step.stale(5, 0.0, 5, 1e18) == ""
    assert "1 steps old" in by_step.stale(4, 1e18, 5, 0.0)


def test_the_newest_of_each_environment_stay() -> None:
    shelf = filled(ShelfRules(capacity=3), a=2, b=3)
    left = shelf.add([ShelfEntry(f"a-{i}", "a", 0, 0.0) for i in range(3)], 0, 0.0)
    assert [(entry.item, reason) for entry, reason, _code in left] == [
        ("a0", "3 newer ones fill the buffer"),
        ("a1", "3 newer ones fill the buffer"),
    ]
    assert shelf.sizes == {"a": 3, "b": 3}
    assert [entry.item for entry in shelf.entries()] == ["a-0", "a-1", "a-2", "b0", "b1", "b2"]


def test_recency_of_four_with_exponent_two_is_one_four_nine_sixteen_thirtieths() -> None:
    """Chi-square with 3 degrees of freedom: 16.3 at 0.001."""
    shelf, rounds = filled(dataclasses.replace(FOREVER, alpha=2.0), env=4), 2_000
    counts: Counter[object] = Counter()
    for number in range(rounds):
        drawn = shelf.draw(1, generator_at(11, number))
        assert drawn is not None
        counts[drawn[0].item] += 1
    assert chi_square(counts, {f"env{i}": (i + 1) ** 2 / 30 for i in range(4)}, rounds) < 16.3


def test_pairs_are_drawn_without_replacement_by_recency_of_what_is_left() -> None:
    """Ten unordered pairs of five, exponent 1.5: 27.9 at 0.001 with 9 degrees of freedom."""
    shelf, rounds = filled(dataclasses.replace(FOREVER, alpha=1.5), env=5), 2_000
    weights = np.arange(1, 6) ** 1.5
    total = weights.sum()
    expected: dict[object, float] = {
        frozenset((f"env{i}", f"env{j}")): weights[i] / total * weights[j] / (total - weights[i])
        + weights[j] / total * weights[i] / (total - weights[j])
        for i, j in combinations(range(5), 2)
    }
    counts: Counter[object] = Counter()
    for number in range(rounds):
        drawn = shelf.draw(2, generator_at(12, number))
        assert drawn is not None
        counts[frozenset(entry.item for entry in drawn)] += 1
    assert chi_square(counts, expected, rounds) < 27.9


def test_environments_are_drawn_in_proportion_to_their_rollouts() -> None:
    """30 and 10: hypergeometric draws of 4; chi-square over 0 to 4 of the first, 18.5 at 0.001."""
    from math import comb

    shelf, rounds = filled(FOREVER, a=30, b=10), 2_000
    counts: Counter[object] = Counter()
    for number in range(rounds):
        drawn = shelf.draw(4, generator_at(13, number))
        assert drawn is not None
        counts[sum(entry.environment == "a" for entry in drawn)] += 1
    expected: dict[object, float] = {k: comb(30, k) * comb(10, 4 - k) / comb(40, 4) for k in range(5)}
    assert chi_square(counts, expected, rounds) < 18.5
    mean = sum(int(str(k)) * n for k, n in counts.items()) / rounds / 4
    assert abs(mean - 0.75) < 0.02


def test_balanced_environments_are_drawn_equally_and_the_remainder_at_random() -> None:
    shelf, rounds = filled(dataclasses.replace(FOREVER, balanced=True), a=1000, b=10, c=10), 1_000
    counted: Counter[object] = Counter()
    for number in range(rounds):
        drawn = shelf.draw(7, generator_at(14, number))
        assert drawn is not None
        counts = Counter(entry.environment for entry in drawn)
        assert sorted(counts.values()) == [2, 2, 3]
        counted[max(counts, key=lambda name: counts[name])] += 1
    assert chi_square(counted, dict.fromkeys("abc", 1 / 3), rounds) < 13.8


def test_the_other_environments_fill_the_share_of_one_with_too_few() -> None:
    shelf = filled(dataclasses.replace(FOREVER, balanced=True), a=100, b=2, c=100)
    drawn = shelf.draw(20, generator_at(0))
    assert drawn is not None
    assert Counter(entry.environment for entry in drawn) == {"a": 9, "b": 2, "c": 9}


def test_no_exponent_and_no_size_overflows() -> None:
    with np.errstate(all="raise"):
        for alpha in (0.0, 3.0, 700.0, 1e6, -1e6):
            shelf = filled(dataclasses.replace(FOREVER, alpha=alpha, capacity=50_000), env=20_000)
            drawn = shelf.draw(16, generator_at(3))
            assert drawn is not None
            assert len({entry.item for entry in drawn}) == 16
            if alpha == 1e6:
                assert {entry.item for entry in drawn} == {f"env{i}" for i in range(19_984, 20_000)}


def test_a_rollout_is_retired_when_it_is_used_up_and_never_without_a_limit() -> None:
    shelf = filled(ShelfRules(max_samples=2), env=4)
    assert [len(shelf.draw(4, generator_at(n)) or ()) for n in range(2)] == [4, 4]
    assert len(shelf) == 0
    assert shelf.draw(1, generator_at(2)) is None
    endless = filled(FOREVER, env=4)
    for number in range(50):
        assert endless.draw(4, generator_at(number)) is not None
    assert {entry.usage_count for entry in endless.entries()} == {50}


def test_invalid_rules_are_refused() -> None:
    for wrong in ({"capacity": 0}, {"max_samples": 0}, {"alpha": float("nan")}, {"alpha": float("inf")}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            ShelfRules(**wrong)  # type: ignore[arg-type]


@given(st.data())
def test_every_rollout_is_held_used_up_or_removed_with_a_reason(data: st.DataObject) -> None:
    rules = ShelfRules(
        capacity=data.draw(st.integers(1, 6)),
        alpha=data.draw(st.floats(-3, 8)),
        max_samples=data.draw(st.sampled_from([-1, 1, 2])),
        max_rollout_step_delay=data.draw(st.integers(-1, 3)),
        max_rollout_timestamp_delay=data.draw(st.sampled_from([-1.0, 0.0, 3.0])),
        balanced=data.draw(st.booleans()),
    )
    shelf: Shelf[int] = Shelf(rules)
    given_, left, step, now = 0, 0, 0, 0.0
    drawn: Counter[int] = Counter()
    for _ in range(data.draw(st.integers(1, 12))):
        step += data.draw(st.integers(0, 2))
        now += data.draw(st.integers(0, 2))
        left += len(shelf.refresh(step, now))
        new = [
            ShelfEntry(given_ + i, data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 8)), now)
            for i in range(data.draw(st.integers(0, 5)))
        ]
        given_ += len(new)
        left += len(shelf.add(new, step, now))
        assert all(size <= rules.capacity for size in shelf.sizes.values())
        assert all(not rules.stale(e.weight_step, e.timestamp, step, now) for e in shelf.entries())
        taken = shelf.draw(data.draw(st.integers(0, 4)), generator_at(0, given_, step))
        drawn.update([] if taken is None else [entry.item for entry in taken])
    used_up = sum(count == rules.max_samples for count in drawn.values())
    assert given_ == len(shelf) + left + used_up
    assert all(count <= rules.max_samples or rules.max_samples < 0 for count in drawn.values())

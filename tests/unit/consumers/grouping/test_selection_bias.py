"""An alert is raised if losses shift the trained rollouts by more than the tolerance and not by chance."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.core.task_journal import FateCounts
from rollstream.consumers.grouping.selection_bias import (
    DEPENDENT,
    RolloutMoments,
    Selection,
    batch_moments,
    selections,
    with_skipped,
)
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.pipeline.audit.texts import selection_text
from rollstream.topics.records import FateCount
from tests.support.batches import random_batch

Sample = list[tuple[int, float]]
"""Length and reward of each rollout."""


def counts(**fates: Sample) -> tuple[FateCount, ...]:
    """Counts of one environment, as a partition of the journal holds them."""
    counts = FateCounts()
    for fate, sample in fates.items():
        for number, (length, reward) in enumerate(sample):
            tokens = np.zeros(length, "<i4")
            rollout = example_rollout(str(number), reward, tokens=tokens, loss_mask=np.ones(length, bool))
            counts.add("env", fate.replace("dropped_", "dropped:"), length, HeldRollout.of(rollout))
    return counts.records()


def selection(**fates: Sample) -> Selection:
    return selections(counts(**fates))["env"]


def drawn(random: Random, count: int, length: Callable[[], float]) -> Sample:
    return [(int(length()), random.random()) for _ in range(count)]


def test_selections_and_their_means_agree_with_a_case_computed_by_hand() -> None:
    selected = selection(
        batched=[(10, 1.0), (20, 0.0)],
        dropped_zero_variance=[(30, 0.5)],
        dropped_duplicate_uid=[(20, 0.0)],
        dropped_late=[(40, 2.0)],
        dropped_too_large=[(60, 0.25)],
        dropped_invalid=[(10_000, 9.0)],
    ).as_dict()
    assert {name: selected[name]["rollouts"] for name in ("produced", "batched", "without_gradient", "lost")} == {
        "produced": 6,
        "batched": 2,
        "without_gradient": 2,
        "lost": 2,
    }
    assert (selected["batched"]["mean_length"], selected["batched"]["mean_reward"]) == (15.0, 0.5)
    assert (selected["without_gradient"]["mean_length"], selected["lost"]["mean_length"]) == (25.0, 50.0)
    assert selected["lost"]["mean_reward"] == 1.125
    assert selected["produced"]["mean_length"] == 30.0
    lengths = [10, 20, 30, 20, 40, 60]
    assert selected["produced"]["deviation_length"] == pytest.approx(statistics.pstdev(lengths))
    assert selected["shift_length"] == pytest.approx((20.0 - 30.0) / statistics.pstdev(lengths))
    assert selected["alerts"] == []


def test_a_shift_of_few_rollouts_is_no_alert_because_it_may_be_chance() -> None:
    kept, lost = [(10 + n % 5, 0.5) for n in range(30)], [(40, 0.5)] * 6
    assert abs(selection(batched=kept, dropped_late=lost).shift("length")) > 0.05
    assert selection(batched=kept, dropped_late=lost).alerts() == ()
    assert selection(batched=kept * 60, dropped_late=lost * 60).alerts() == ("length",)


def test_a_significant_shift_within_the_tolerance_is_no_alert() -> None:
    random = Random(3)
    sample = drawn(random, 20_000, lambda: random.uniform(100, 200))
    selected = selection(batched=sample, dropped_late=[(200, 0.5)] * 200)
    assert abs(selected.standard_errors("length")) > 3.29
    assert 0 < abs(selected.shift("length")) < 0.05
    assert selected.alerts() == ()
    assert selected.alerts(tolerance=0.01) == ("length",)


def test_loss_at_random_is_no_alert_though_members_of_a_group_are_alike() -> None:
    """Groups of eight that share length and reward, dropped whole: thirty runs, at most one false alarm."""
    alarms = 0
    for seed in range(30):
        random = Random(seed)
        fates: dict[str, Sample] = {"batched": [], "dropped_capacity": []}
        for _ in range(120):
            member = (int(random.uniform(1, 100)), random.random())
            fates["dropped_capacity" if random.random() < 0.2 else "batched"] += [member] * 8
        alarms += bool(selection(**fates).alerts(tolerance=0.0))
    assert alarms <= 1


def test_there_is_no_shift_if_everything_is_lost_or_alike() -> None:
    assert selection(dropped_late=[(5, 1.0)] * 10_000).alerts() == ()
    assert selection(batched=[(5, 0.1)] * 10_000, dropped_late=[(5, 0.1)] * 10_000).alerts() == ()


def test_counts_of_an_older_journal_are_unknown_and_never_a_wrong_mean() -> None:
    old = FateCount(environment="env", fate="batched", rollouts=1_000, tokens=4_000)
    [selected] = selections([old]).values()
    assert selected.as_dict()["batched"]["mean_length"] is None
    assert selected.as_dict()["produced"]["deviation_reward"] is None
    assert selected.alerts() == ()
    mixed = selections([old, *counts(batched=[(10, 1.0), (20, 1.0)])])["env"].as_dict()
    assert (mixed["batched"]["rollouts"], mixed["batched"]["measured"]) == (1_002, 2)
    assert mixed["batched"]["mean_length"] == 15.0
    assert "unknown" in selection_text({"env": selected.as_dict()})
    assert "unknown" not in selection_text({"env": mixed})


SAMPLES = st.lists(st.tuples(st.integers(1, 50), st.floats(-1e6, 1e6)), max_size=30)


@given(batched=SAMPLES, flat=SAMPLES, late=SAMPLES, stale=SAMPLES)
def test_partitions_add_up_and_the_shift_is_that_of_the_rollouts(
    batched: Sample, flat: Sample, late: Sample, stale: Sample
) -> None:
    everything = {
        "batched": batched,
        "dropped_zero_variance": flat,
        "dropped_late": late,
        "dropped_stale_version": stale,
    }
    whole = selections(counts(**everything))
    halves = [
        *counts(**{fate: sample[::2] for fate, sample in everything.items()}),
        *counts(**{fate: sample[1::2] for fate, sample in everything.items()}),
    ]
    assert selections(halves).keys() == whole.keys() == ({"env"} if any(everything.values()) else set())
    for selected in (whole, selections(halves)):
        if "env" not in selected or not batched + flat:
            continue
        lengths = [float(length) for length, _ in batched + flat + late + stale]
        spread = statistics.pstdev(lengths)
        kept = statistics.mean(lengths[: len(batched + flat)])
        expected = (kept - statistics.mean(lengths)) / spread if spread > 0.01 else 0.0
        assert selected["env"].shift("length") == pytest.approx(expected, abs=1e-6)
        lost = len(late + stale)
        if spread > 0.01 and lost:
            k, n = len(batched + flat), len(lengths)
            difference = kept - statistics.mean(lengths[-lost:])
            error = spread * (DEPENDENT * (1 / k + 1 / lost)) ** 0.5
            assert selected["env"].standard_errors("length") == pytest.approx(difference / error, abs=1e-6)
            assert n == k + lost


def test_a_warning_names_environment_measure_and_both_means() -> None:
    sample = [(10 + n % 5, 0.5) for n in range(4_000)]
    selected = selection(batched=sample, dropped_late=[(40, 0.5)] * 500)
    text = selection_text({"env": selected.as_dict()})
    assert "WARNING: environment env: lost rollouts have mean length 40, all" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert "shift no mean" in selection_text({"env": selection(batched=sample, dropped_late=sample[:500]).as_dict()})


def test_rollouts_that_learners_skip_are_lost_and_raise_an_alert() -> None:
    batches = [random_batch(number, answers=(1, 60)) for number in range(40)]
    lengths = [
        [int(batch.loss_mask[begin:end].sum()) for begin, end in pairwise(batch.splits.tolist())] for batch in batches
    ]
    samples = [
        list(zip(of_batch, batch.rewards.tolist(), strict=True))
        for of_batch, batch in zip(lengths, batches, strict=True)
    ]
    before = selections(counts(batched=[pair for sample in samples for pair in sample]))
    assert before["env"].alerts() == ()
    skipped = RolloutMoments()
    for of_batch, batch in zip(lengths, batches, strict=True):
        skipped += batch_moments(batch, [row for row, length in enumerate(of_batch) if length > 40]).get(
            "env", RolloutMoments()
        )
    selected = with_skipped(before, {"env": skipped})["env"]
    long = [length for of_batch in lengths for length in of_batch if length > 40]
    assert (selected.lost.rollouts, selected.batched.rollouts) == (len(long), 640 - len(long))
    assert selected.lost.length.mean == pytest.approx(statistics.mean(long))
    assert selected.produced.length.mean == pytest.approx(
        statistics.mean(length for of_batch in lengths for length in of_batch)
    )
    assert selected.alerts() == ("length",)


def test_rollouts_that_the_journal_did_not_measure_are_not_taken_from_the_batched_ones() -> None:
    before = selections(counts(batched=[(4, 1.0)]))
    assert with_skipped(before, batch_moments(random_batch(0), range(2))) == before

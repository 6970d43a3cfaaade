"""The rule of the autoscaler: its bounds, its formula, and that it comes to rest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import AutoscaleConfig, GrouperConfig
from rollstream.pipeline.config import load
from rollstream.pipeline.deployment.scaling import (
    TOLERANCE,
    Autoscaler,
    bounds,
    lag_query,
    recommended,
    stabilized,
)
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS, COMMON

COUNTS = st.integers(1, 100)
LAGS = st.integers(0, 10**9)


@st.composite
def rules(draw: st.DrawFn) -> AutoscaleConfig:
    least = draw(COUNTS)
    most = draw(st.one_of(st.just(0), st.integers(least, 200)))
    target = draw(st.integers(1, 100_000))
    return AutoscaleConfig(min_processes=least, max_processes=most, lag_per_process=target, cooldown_s=60.0)


@pytest.mark.parametrize(
    ("lag", "processes", "wanted"),
    [
        (0, 4, 1),
        (999, 1, 1),
        (1100, 1, 1),  # a tenth beyond the target
        (1101, 1, 2),
        (1801, 2, 2),  # a tenth below it
        (1799, 2, 2),
        (1000, 2, 1),
        (7001, 2, 8),
        (50_000, 2, 8),
    ],
)
def test_the_formula_of_kubernetes(lag: int, processes: int, wanted: int) -> None:
    rule = AutoscaleConfig(lag_per_process=1000)
    assert recommended(rule, 8, lag, processes) == wanted


@given(rules(), COUNTS, LAGS, COUNTS)
def test_there_are_never_fewer_or_more_than_the_bounds_nor_idle_ones(
    rule: AutoscaleConfig, partitions: int, lag: int, processes: int
) -> None:
    least, most = bounds(rule, partitions)
    assert 1 <= least <= most <= partitions
    assert most <= (rule.max_processes or partitions)
    assert least <= recommended(rule, partitions, lag, processes) <= most
    scaler = Autoscaler(rule, partitions, processes, 0.0)
    assert least <= scaler.decide(lag, processes, 1.0) <= most


@given(rules(), COUNTS, COUNTS, st.lists(LAGS, min_size=2, max_size=20))
def test_more_lag_never_means_fewer_processes(
    rule: AutoscaleConfig, partitions: int, processes: int, lags: list[int]
) -> None:
    wanted = [recommended(rule, partitions, lag, processes) for lag in sorted(lags)]
    assert wanted == sorted(wanted)


@given(rules(), COUNTS, COUNTS, LAGS)
def test_constant_lag_comes_to_rest(rule: AutoscaleConfig, partitions: int, processes: int, lag: int) -> None:
    scaler = Autoscaler(rule, partitions, processes, 0.0)
    history = []
    for second in range(1, 200):
        processes = scaler.decide(lag, processes, float(second))
        history.append(processes)
    # The number never falls before its peak, and never rises after it.
    peak = max(history)
    assert history == sorted(history[: history.index(peak)]) + sorted(history[history.index(peak) :], reverse=True)
    settled = set(history[int(2 * rule.cooldown_s) :])
    assert len(settled) == 1
    least, most = bounds(rule, partitions)
    [last] = settled
    exact = min(max(math.ceil(lag / rule.lag_per_process), least), most)
    within = 1 - TOLERANCE <= lag / (rule.lag_per_process * last) <= 1 + TOLERANCE
    assert last == exact or within


@given(rules(), st.lists(LAGS, min_size=1, max_size=100))
def test_processes_are_removed_only_if_not_needed_for_a_whole_window(rule: AutoscaleConfig, lags: list[int]) -> None:
    processes, wanted = 1, [(0.0, 1)]
    scaler = Autoscaler(rule, 64, processes, 0.0)
    for second, lag in enumerate(lags, 1):
        wanted.append((float(second), recommended(rule, 64, lag, processes)))
        after = scaler.decide(lag, processes, float(second))
        within = [count for at, count in wanted if at >= second - rule.cooldown_s]
        if after < processes:
            assert max(within) == after
        processes = after


def test_more_are_added_at_once() -> None:
    scaler = Autoscaler(AutoscaleConfig(lag_per_process=100), 8, 1, 0.0)
    assert scaler.decide(750, 1, 1.0) == 8
    assert stabilized([1, 8, 3], 8) == 8
    assert stabilized([3, 2], 8) == 3


def test_the_query_names_a_gauge_that_grouping_serves_and_its_label() -> None:
    query = lag_query("main")
    assert query == 'sum(rollstream_grouping_lag{run="main"})'
    [gauge] = [spec for spec in CATALOGUE_OF_METRICS if spec.name == "rollstream_grouping_lag"]
    assert gauge.roles == ("group",)
    assert "run" in COMMON


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("min_processes=0", "must be at least 1"),
        ("max_processes=-1", "must be at least 0"),
        ("lag_per_process=0", "must be at least 1"),
        ("cooldown_s=-1", "must be at least 0"),
        ("interval_s=0", "must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load(flags=[f"grouper.autoscale.{setting}"])


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_processes 2 is below min_processes 3"):
        AutoscaleConfig(min_processes=3, max_processes=2)
    with pytest.raises(ConfigurationError, match="set it above 0"):
        GrouperConfig(autoscale=AutoscaleConfig(enabled=True), metrics_interval_s=0)
    with pytest.raises(ConfigurationError, match="records_per_s is -1"):
        GrouperConfig(records_per_s=-1)

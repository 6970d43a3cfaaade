"""A plan never shrinks as the load grows; a simulation of queues bears the load with it, not with one unit less."""

import json
import math
from dataclasses import Field, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.capacity import measured_rates
from rollstream.pipeline.capacity.measured_rates import MeasuredRate, MeasuredRates
from rollstream.pipeline.capacity.plan import CapacityPlan, Machines, Workload, plan
from rollstream.pipeline.cli import main
from rollstream.pipeline.tools.plan import number
from rollstream.topics.catalogue import CATALOGUE
from rollstream.topics.config import TopicsConfig
from rollstream.topics.errors import ConfigurationError
from tests.support.queues import Cluster, bears, disk_use

RATES = MeasuredRates(
    machine="a test",
    produce=MeasuredRate(per_s=400, size_bytes=10_000),
    group=MeasuredRate(per_s=100, size_bytes=10_000),
    restore=MeasuredRate(per_s=1_000, size_bytes=10_000),
    feed=MeasuredRate(per_s=300, size_bytes=14_000),
    publish_bytes_per_s=1e8,
    publish_to_files_bytes_per_s=2e8,
    broker_bytes_per_s=2e8,
)
FAST = MeasuredRate(per_s=1e5, size_bytes=10_000)
SIZES = (
    "partitions",
    "grouping_processes",
    "brokers",
    "producers",
    "learner_processes",
    "publishers",
)
loads = st.builds(
    Workload,
    parameters=st.floats(1e6, 2e12),
    environments=st.integers(1, 2_000_000),
    tokens=st.floats(1, 200_000),
    rollouts_per_s=st.floats(0.01, 1e6),
    publish_every_s=st.floats(1, 3600),
    weights_in_files=st.booleans(),
    weight_readers=st.integers(0, 1000),
    batch_readers=st.integers(0, 8),
    retention_s=st.floats(0, 1e7),
    replication=st.integers(1, 5),
)


@given(
    loads,
    st.sampled_from(
        ["parameters", "environments", "tokens", "rollouts_per_s", "weight_readers", "batch_readers", "retention_s"]
    ),
    st.integers(2, 50),
)
def test_more_of_anything_never_needs_less(load: Workload, name: str, factor: int) -> None:
    more = replace(load, **{name: getattr(load, name) * factor})
    before, after = (plan(each, Machines(), RATES) for each in (load, more))
    for size in SIZES:
        assert getattr(after, size) >= getattr(before, size), size


@given(loads, st.floats(0.1, 1.0))
def test_no_capacity_is_used_beyond_the_utilisation_and_one_unit_fewer_would_be(
    load: Workload, utilisation: float
) -> None:
    result = plan(load, Machines(utilisation=utilisation), RATES)
    assert all(limit.share <= utilisation * (1 + 1e-9) for limit in result.limits)
    assert [limit.share for limit in result.limits] == sorted((limit.share for limit in result.limits), reverse=True)
    for resource in {limit.resource for limit in result.limits}:
        mine = [limit for limit in result.limits if limit.resource == resource]
        units = mine[0].units
        least = load.replication if resource == "brokers" else 1
        assert units == least or max(limit.needed for limit in mine) / (units - 1) > utilisation * (1 - 1e-9)


@given(loads, st.floats(1.1, 10))
def test_better_machines_never_need_more(load: Workload, factor: float) -> None:
    usual = Machines()
    better = replace(
        usual,
        disk_bytes=usual.disk_bytes * factor,
        disk_bytes_per_s=usual.disk_bytes_per_s * factor,
        network_bytes_per_s=usual.network_bytes_per_s * factor,
        memory_bytes=usual.memory_bytes * factor,
        restore_s=usual.restore_s * factor,
    )
    before, after = (plan(load, machines, RATES) for machines in (usual, better))
    for size in SIZES:
        assert getattr(after, size) <= getattr(before, size), size


@given(loads)
def test_brokers_bear_the_replicas_of_every_topic_that_a_run_has(load: Workload) -> None:
    result = plan(load, Machines(), RATES)
    config = TopicsConfig(partitions=result.partitions, weights_partitions=1)
    replicas = load.replication * sum(spec.partition_count(config) for spec in CATALOGUE)
    [limit] = [limit for limit in result.limits if limit.name == "replicas of partitions"]
    single = load.replication * len(CATALOGUE)
    assert replicas - single <= limit.needed * Machines().replicas_per_broker <= replicas


# ---------------------------------------------------------------------- the simulation as judge

EASY = Machines(disk_bytes=1e15, disk_bytes_per_s=1e12, network_bytes_per_s=1e12, memory_bytes=1e15, restore_s=1e9)
LOAD = Workload(
    parameters=1e6,
    environments=200,
    tokens=1_000,
    rollouts_per_s=330,
    weights_in_files=True,
    retention_s=100,
    replication=3,
)
"""A rollout of 10,024 bytes, 14,024 in a batch."""
CASES: dict[str, tuple[Workload, Machines, str]] = {
    "grouping": (LOAD, EASY, "processes"),
    "grouping of longer rollouts": (replace(LOAD, tokens=3_000, rollouts_per_s=110), EASY, "processes"),
    "network, out": (
        replace(LOAD, batch_readers=3),
        replace(EASY, network_bytes_per_s=6.8e6),
        "brokers",
    ),
    "network, in": (replace(LOAD, batch_readers=0), replace(EASY, network_bytes_per_s=8e6), "brokers"),
    "writing to disk": (LOAD, replace(EASY, disk_bytes_per_s=7e6), "brokers"),
    "taking records in": (LOAD, EASY, "brokers"),
}


def cluster(load: Workload, machines: Machines, rates: MeasuredRates, result: CapacityPlan) -> Cluster:
    return Cluster(
        brokers=result.brokers,
        processes=result.grouping_processes,
        partitions=result.partitions,
        replication=load.replication,
        network_bytes_per_s=machines.network_bytes_per_s,
        disk_bytes_per_s=machines.disk_bytes_per_s,
        intake_bytes_per_s=rates.broker_bytes_per_s,
        group_s=rates.group.seconds(load.rollout_bytes),
        rollout_bytes=load.rollout_bytes,
        batched_bytes=load.batched_bytes,
        batch_readers=load.batch_readers,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_simulation_bears_the_load_with_the_plan_and_not_with_one_unit_fewer(name: str) -> None:
    load, machines, resource = CASES[name]
    rates = RATES
    if resource == "brokers":
        rates = replace(rates, group=FAST)
    if name == "taking records in":
        rates = replace(rates, broker_bytes_per_s=7e6)
    result = plan(load, machines, rates)
    assert result.first.name == name.removesuffix(" of longer rollouts")
    planned = cluster(load, machines, rates, result)
    assert bears(planned, load.rollouts_per_s)

    # At the load where the plan says that its first limit is almost reached.
    most = 0.97 * load.rollouts_per_s * result.growth
    even = replace(planned, partitions=60 * result.brokers * result.grouping_processes)
    assert bears(even, most)
    fewer = replace(even, **{resource: getattr(even, resource) - 1})
    assert not bears(fewer, most)


def test_a_disk_holds_what_the_retention_keeps_and_one_broker_fewer_does_not() -> None:
    machines = replace(EASY, disk_bytes=4e8)
    result = plan(LOAD, machines, replace(RATES, group=FAST))
    assert (result.first.name, result.first.resource) == ("disk space", "brokers")
    written = LOAD.replication * LOAD.rollouts_per_s * (LOAD.rollout_bytes + LOAD.batched_bytes)
    most = result.growth * written
    for brokers, fits in ((result.brokers, True), (result.brokers - 1, False)):
        used = disk_use(most / brokers, LOAD.retention_s, 5 * LOAD.retention_s, 0.5)
        assert (used <= machines.disk_bytes * 1.005) is fits


def test_versions_in_files_are_published_at_the_rate_of_files() -> None:
    load = replace(LOAD, parameters=3e9, publish_every_s=10)
    in_files, on_the_log = (plan(replace(load, weights_in_files=w), EASY, RATES).publishers for w in (True, False))
    assert (in_files, on_the_log) == (5, 9), "3 s and 6 s of work for 1 s, at a utilisation of 0.7"


# ---------------------------------------------------------------------- rates and the command


def test_rates_of_a_users_own_benchmark_take_the_place_of_those_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = measured_rates.shipped()
    words = ("plan", "--parameters", "8B", "--environments", "10k", "--tokens", "2048")
    assert main([*words, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert usual["measured_on"] == shipped.machine
    rows = [
        {"name": name, "rollouts_per_s": 100.0, "baseline_rollouts_per_s": 200.0, "size_bytes": 20_000}
        for name in ("produce", "group-and-batch", "restore", "feed", "weights-1024", "weights-files-1024")
    ]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"machine": {"cores": 2, "load_before": 0.1}, "rows": rows}))
    assert main([*words, "--json", "--measured", str(own)]) == 0
    slower = json.loads(capsys.readouterr().out)
    assert slower["measured_on"] == "2 cores shared with the broker, load 0.1 before"
    assert slower["grouping_processes"] > usual["grouping_processes"]
    assert main([*words, "--measured", str(own)]) == 0
    report = capsys.readouterr().out
    assert "limit reached first: " in report
    assert f"{slower['grouping_processes']}" in report


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ("no json", "cannot be read as JSON"),
        ('{"machine": {"cores": 2}, "rows": []}', "--only produce --only group-and-batch"),
        ("[]", "is not the JSON of a benchmark"),
    ],
)
def test_a_file_that_is_no_benchmark_is_refused_with_the_remedy(tmp_path: Path, document: str, named: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(document)
    with pytest.raises(ConfigurationError, match=named):
        measured_rates.from_file(path)


@pytest.mark.parametrize(
    "changed",
    [
        *(("--tokens", "0"), ("--utilisation", "1.1"), ("--environments", "-1"), ("--tokens", "many")),
        *(("--environments", "inf"), ("--tokens", "nan"), ("--replication", "2.7"), ("--seconds-a-rollout", "0")),
    ],
)
def test_a_load_that_is_none_is_refused(changed: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--parameters", "8B", "--environments", "10k", "--tokens", "2048", *changed]
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert changed[0].removeprefix("--") in capsys.readouterr().err


MAY_BE_ZERO = ("versions_kept", "weight_readers", "batch_readers", "retention_s")
NUMBERS = [(values, each) for values in (LOAD, Machines()) for each in fields(values) if each.type is not bool]


@pytest.mark.parametrize(("values", "checked"), NUMBERS)
def test_every_number_of_a_load_and_of_machines_is_checked(values: Workload | Machines, checked: Field[object]) -> None:
    name, may_be_zero = checked.name, checked.name in MAY_BE_ZERO
    wrong: list[object] = [-1, math.nan, math.inf, "3", None, True]
    wrong += [] if may_be_zero else [0]
    wrong += [0.5] if checked.type is int else []
    for value in wrong:
        with pytest.raises(ConfigurationError, match=f"^{name} is {value}; it must be a "):
            replace(values, **{name: value})
    if may_be_zero:
        replace(values, **{name: 0})


@pytest.mark.parametrize("words", [("--parameters=1e308", "--parameter-bytes=1e308"), ("--disk-tb=1e-300",)])
def test_a_plan_beyond_all_numbers_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters=8e300", "--environments=10k", "--tokens=2048", *words]) == 2
    assert "than can be counted" in capsys.readouterr().err


def test_a_larger_record_takes_longer_in_proportion_and_a_smaller_one_no_less() -> None:
    assert RATES.group.seconds(20_000) == 2 * RATES.group.seconds(10_000) == 0.02
    assert RATES.group.seconds(1) == RATES.group.seconds(10_000)


def test_numbers_are_read_with_their_suffixes() -> None:
    assert [number(text) for text in ("12", "1.5k", "7B", "2T", "3M")] == [12, 1500, 7e9, 2e12, 3e6]
    for text in ("nan", "inf", "-inf", "1e307T", "k", ""):
        with pytest.raises(ValueError):
            number(text)

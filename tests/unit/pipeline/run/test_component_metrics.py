"""The tables of workers and servers: the newest record of each, in no more lines than there is room for."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.pipeline.run.component_metrics import NewestMetrics, component_lines
from rollstream.topics.records import Metrics


def record(component: str, role: str, at: float = 100.0, **values: float) -> Metrics:
    return Metrics(component=component, timestamp=at, values=values, labels={"role": role})


def worker(number: int, at: float = 100.0, **values: float) -> Metrics:
    figures = {"rollouts_per_s": 12.5, "tokens_per_s": 1234.4, "rollouts_total": 5000, "cancelled_total": 16}
    figures |= {"failed_total": 16, "capacity_wait_seconds_per_s": 0.25, "policy_version": 7, "running": 1}
    return record(f"env-{number}", "env", at, **{**figures, **values})


def server(at: float = 100.0) -> Metrics:
    figures = {"requests_per_s": 3.0, "completion_tokens_per_s": 900.0, "decoding_rows": 48, "waiting_requests": 2}
    return record("infer-0", "infer", at, **figures, errors_total=1, weight_swaps_total=8, policy_version=8)


SHOWN = [
    " workers         rollouts/s tokens/s rollouts cancelled  failed   waits version",
    " env-0                 12.5    1,234    5,000        16      16    25 %       7",
    " env-1                 12.5    1,234    5,000        16      16    25 %       7",
    " servers         requests/s tokens/s decoding   queue  errors   swaps version",
    " infer-0                3.0      900       48       2       1       8       8",
]


def newest(*records: Metrics) -> NewestMetrics:
    metrics = NewestMetrics()
    for each in records:
        metrics.add(each)
    return metrics


def test_each_component_is_a_row_with_its_newest_metrics() -> None:
    components = newest(worker(0, rollouts_total=1), worker(1), server(), worker(0, 101.0)).at(102.0)
    assert [(each.component, each.age_s) for each in components] == [("env-0", 1.0), ("env-1", 2.0), ("infer-0", 2.0)]
    assert component_lines(components, 5) == SHOWN


def test_a_grouping_process_is_a_row_and_its_partitions_are_none() -> None:
    labels = {"consumergroup": "r.grouping", "topic": "r.rollouts"}
    figures = {"lag": 120.0, "in_flight": 31.0, "batches_total": 8.0, "dropped_total": 2.0, "dead_lettered_total": 0.0}
    figures |= {"partitions": 2.0, "partitions_restoring": 0.0, "finished_groups_total": 64.0}
    whole = Metrics(component="grouper-run-0", timestamp=100.0, values=figures, labels=labels)
    partition = Metrics(component="grouper-0", timestamp=100.0, values={"lag": 1.0}, labels=labels | {"partition": "0"})
    environment = Metrics(component="grouper-0", timestamp=100.0, values=figures, labels=labels | {"environment": "e"})
    lines = component_lines(newest(whole, partition, environment).at(101.0), 4)
    assert [line.split() for line in lines] == [
        ["grouping", "partitions", "lag", "in", "flight", "batches", "dropped", "dead", "restoring"],
        ["group-0", "2", "120", "31", "8", "2", "0", "0"],
    ]
    assert max(map(len, lines)) <= 80


def test_components_that_do_not_fit_are_one_row_of_sums() -> None:
    records = [worker(number, policy_version=7 + number % 2) for number in range(300)]
    lines = component_lines(newest(*records, server()).at(100.0), 4)
    assert lines[1].split() == ["300", "together", "3,750", "370,320", "1.5M", "4,800", "4,800", "25", "%", "7"]
    assert len(lines) == 4


def test_a_component_that_ended_leaves_once_another_of_its_role_writes() -> None:
    ended = worker(0, running=0)
    assert component_lines(newest(ended).at(100.0), 2)[1].startswith(" env-0 ended  ")
    assert component_lines(newest(worker(0)).at(1000.0), 2)[1].startswith(" env-0 silent ")
    assert [each.component for each in newest(ended, worker(1)).at(100.0)] == ["env-1"]


def test_records_of_other_components_and_values_that_are_no_numbers_are_left_out() -> None:
    components = newest(record("learn-a", ""), record("x\u202ey", "env", nan, tokens_per_s=inf)).at(5.0)
    assert [each.values for each in components] == [{}]
    assert component_lines(components, 9)[1].split() == ["x\\u202ey", *["-"] * 7]


@pytest.mark.parametrize("role", ["env", "infer", "gateway", "eval"])
def test_every_line_fits_whatever_the_numbers(role: str) -> None:
    names = ["rollouts_per_s", "tokens_per_s", "rollouts_total", "policy_version", "requests_per_s", "prompts_total"]
    for value in (1e300, -1e300, 0.0):
        lines = component_lines(newest(record("n" * 300, role, **dict.fromkeys(names, value))).at(1e9), 9)
        assert max(map(len, lines)) <= 80


@given(
    st.lists(st.tuples(st.sampled_from(["env", "infer", "gateway", "eval"]), st.integers(0, 30))), st.integers(0, 40)
)
def test_the_tables_never_take_more_lines_than_given(components: list[tuple[str, int]], most: int) -> None:
    lines = component_lines(newest(*(record(f"{role}-{n}", role) for role, n in components)).at(100.0), most)
    assert len(lines) <= most
    shown = {line.split()[0] for line in lines} & {"workers", "servers", "gateways", "evaluators"}
    assert len(shown) == min(len({role for role, _n in components}), most // 2)

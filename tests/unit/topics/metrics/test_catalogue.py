"""The catalogue of metrics keeps to Prometheus' rules for names, and components' values arrive under its names."""

import re
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS, COMMON, SERVING_ROLES, MetricSpec, of_role
from rollstream.topics.metrics.values import Exposition, MetricValues, text_of


@pytest.mark.parametrize("spec", CATALOGUE_OF_METRICS, ids=lambda spec: spec.name)
def test_a_name_says_kind_and_unit_as_prometheus_has_it(spec: MetricSpec) -> None:
    assert re.fullmatch(r"rollstream_[a-z][a-z0-9_]*[a-z]", spec.name)
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    if spec.unit in ("seconds", "bytes"):
        assert spec.unit in spec.name.split("_")
    assert spec.help.endswith(".")
    assert not set(spec.labels) & set(COMMON)
    assert set(spec.roles) <= set(SERVING_ROLES)


def test_no_two_metrics_share_the_name_of_a_family() -> None:
    """Parsers call a counter by its name without `_total`."""
    families = Counter(spec.name.removesuffix("_total") for spec in CATALOGUE_OF_METRICS)
    assert [name for name, count in families.items() if count > 1] == []


def value(values: MetricValues, name: str) -> dict[tuple[str, ...], float]:
    (spec,) = (spec for spec in CATALOGUE_OF_METRICS if spec.name == name)
    return values.values_of(spec)


def test_what_a_component_writes_is_served_by_role_and_subject() -> None:
    values = MetricValues()
    values.record("group", {"lag": 3, "position": 9}, {"partition": "2", "topic": "r.rollouts"})
    values.record("label", {"lag": 5})
    assert value(values, "rollstream_grouping_lag") == {("2",): 3}
    assert value(values, "rollstream_grouping_position") == {("2",): 9}
    assert value(values, "rollstream_labeling_lag") == {(): 5}
    assert values.uncatalogued == set()


def test_rates_and_sums_over_partitions_are_not_served_and_other_new_names_are_reported() -> None:
    values = MetricValues()
    values.record("env", {"tokens_per_s": 3, "running": 1})
    values.record("group", {"lag": 3, "commit_seconds_mean": 0.1})
    assert values.uncatalogued == set()
    values.record("env", {"lag": 3})
    values.record("group", {"position": 3})
    assert values.uncatalogued == {"env: lag", "group: position"}


def test_names_that_only_a_run_knows_become_labels() -> None:
    values = MetricValues()
    values.record("learn", {"left_out/vocabulary": 2, "time/step": 0.5})
    values.record(
        "eval",
        {"eval/exact": 0.25, "eval/reward": 1.0, "eval/pass@8": 0.75},
        {"environment": "add", "split": "heldout"},
    )
    assert value(values, "rollstream_learner_left_out") == {("vocabulary",): 2}
    assert value(values, "rollstream_learner_stage_seconds") == {("step",): 0.5}
    assert value(values, "rollstream_evaluation_component") == {("add", "exact"): 0.25}
    assert value(values, "rollstream_evaluation_pass_at") == {("add", "8"): 0.75}
    assert value(values, "rollstream_evaluation_reward") == {("add",): 1.0}


def test_the_time_of_a_change_stays_while_the_value_does() -> None:
    now_s = 1000.0
    values = MetricValues(lambda: now_s)
    values.record("infer", {"policy_version": 3})
    now_s = 1010.0
    values.record("infer", {"policy_version": 3})
    assert value(values, "rollstream_inference_version_timestamp_seconds") == {(): 1000.0}
    values.record("infer", {"policy_version": 4})
    assert value(values, "rollstream_inference_version_timestamp_seconds") == {(): 1010.0}


def test_a_record_about_a_subject_replaces_the_earlier_one_about_it() -> None:
    values = MetricValues()
    values.record("group", {"lag": 3, "position": 9}, {"partition": "2"})
    values.record("group", {"lag": 4}, {"partition": "5"})
    values.record("group", {"batches_total": 7})
    values.put("rollstream_grouping_rollouts_total", 4, "2", "dropped", "late")
    values.record("eval", {"eval/exact": 0.5, "eval/reward": 1.0}, {"environment": "add"})
    values.record("eval", {"eval/close": 0.25, "eval/reward": 1.0}, {"environment": "add"})
    values.record("group", {"position": 10}, {"partition": "2"})
    values.record("group", {"transactions_total": 1})
    assert value(values, "rollstream_grouping_position") == {("2",): 10}
    assert value(values, "rollstream_grouping_lag") == {("5",): 4}
    assert value(values, "rollstream_grouping_batches_total") == {(): 7}
    assert value(values, "rollstream_grouping_rollouts_total") == {("2", "dropped", "late"): 4}
    assert value(values, "rollstream_evaluation_component") == {("add", "close"): 0.25}


def test_partitions_that_went_to_another_process_are_forgotten() -> None:
    values = MetricValues()
    for partition in "01":
        values.record("group", {"lag": 3}, {"partition": partition})
        values.put("rollstream_grouping_rollouts_total", 4, partition, "dropped", "late")
    values.keep("group", "partition", {"1"})
    assert value(values, "rollstream_grouping_lag") == {("1",): 3}
    assert value(values, "rollstream_grouping_rollouts_total") == {("1", "dropped", "late"): 4}


def test_a_histogram_counts_below_its_bounds_and_is_there_before_the_first_value() -> None:
    values = MetricValues()
    specs = [spec for spec in of_role("group") if spec.name == "rollstream_transaction_seconds"]
    exposition = Exposition(specs, values, {"run": "r", "process": "group-0"})

    def buckets() -> dict[str, float]:
        (family,) = text_string_to_metric_families(exposition.text().decode())
        return {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}

    assert set(buckets().values()) == {0.0}
    values.observe("rollstream_transaction_seconds", [0.01, 0.011, 1e6])
    assert (buckets()["0.01"], buckets()["0.025"], buckets()["1800.0"], buckets()["+Inf"]) == (1, 2, 2, 3)


def test_labels_are_escaped() -> None:
    values = MetricValues()
    values.record("eval", {"eval/reward": 1.0}, {"environment": 'a "b"\\\n'})
    exposition = Exposition(of_role("eval"), values, {})
    (family,) = text_string_to_metric_families(exposition.text().decode())
    assert family.samples[0].labels == {"environment": 'a "b"\\\n'}


def test_a_role_with_a_port_of_its_own_serves_its_figures_there() -> None:
    lines = text_of("gateway", {"calls_total": 3, "open_sessions": 1}).decode().splitlines()
    assert "rollstream_gateway_calls_total 3.0" in lines
    assert "# TYPE rollstream_gateway_open_sessions gauge" in lines

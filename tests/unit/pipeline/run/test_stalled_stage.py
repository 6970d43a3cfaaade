"""A run that makes no step for long names the stage that starves or blocks it, in every way in which a stage can."""

from dataclasses import replace
from typing import Any

import pytest

from rollstream.pipeline.run.component_metrics import ComponentMetrics
from rollstream.pipeline.run.stalled_stage import FlowFacts, stalled_stage

PATIENCE_S = 600.0


def component(role: str, age_s: float = 1.0, **values: float) -> ComponentMetrics:
    return ComponentMetrics(component=f"{role}-0", role=role, timestamp=0.0, age_s=age_s, values=values)


WORKER = component("env", waiting_for_capacity=0.0, failed_per_s=0.0)
SERVER = component("infer", policy_version=7, errors_per_s=0.0)
GROUPING = component("group")
STILL = FlowFacts(
    step_age_s=700.0,
    rollout_age_s=690.0,
    read_age_s=690.0,
    batch_age_s=690.0,
    version_age_s=700.0,
    version=7,
    needed_rollouts=32,
    components=(WORKER, SERVER, GROUPING),
)


@pytest.mark.parametrize(
    ("change", "stage", "why"),
    [
        ({"waiting_rollouts": 32, "batch_age_s": 5.0}, "learn", "does not take batches: 32 rollouts wait"),
        ({"version": -1}, "weights", "no policy version was ever published"),
        (
            {"version": 9, "skipped": 64, "rollout_age_s": 1.0, "batch_age_s": 1.0},
            "weights",
            "servers have version 7, and 9 is published",
        ),
        ({"unread": 50}, "group", "grouping reads nothing: 50 records wait"),
        ({"unread": 900, "read_age_s": 1.0, "rollout_age_s": 1.0}, "group", "grouping lags: 900 records"),
        (
            {"rollout_age_s": 1.0, "read_age_s": 1.0, "dropped": {"zero_variance": 90, "late": 3}, "in_flight": 4},
            "group",
            "groups are dropped, 93 rollouts since the last step, most for zero_variance",
        ),
        (
            {"rollout_age_s": 1.0, "read_age_s": 1.0, "in_flight": 12},
            "group",
            "groups never complete: 12 rollouts wait for members",
        ),
        ({"unlabeled": 8}, "label", "labels do not arrive: 8 rollouts"),
        ({"components": (WORKER, replace(SERVER, age_s=300.0))}, "infer", "no server runs"),
        (
            {"components": (component("env", failed_per_s=0.5), SERVER)},
            "infer",
            "inference refuses: 0.5 rollouts and 0 requests fail",
        ),
        ({"components": (replace(WORKER, age_s=300.0), SERVER)}, "env", "produce nothing: no worker runs"),
        (
            {"components": (component("env", waiting_for_capacity=1.0), SERVER), "in_flight": 40},
            "env",
            "wait for room: 40 rollouts are in flight",
        ),
        ({}, "env", "environments produce nothing: 1 workers play"),
    ],
)
def test_the_stage_that_keeps_a_run_from_its_step_is_named(change: dict[str, Any], stage: str, why: str) -> None:
    stall = stalled_stage(replace(STILL, **change), PATIENCE_S)
    assert stall is not None
    assert (stall.stage, why in stall.why) == (stage, True), stall


@pytest.mark.parametrize(
    "change",
    [
        {"step_age_s": 599.0},
        {"median_step_s": 150.0},
        {"ends": True},
        {"components": ()},
        {"components": (replace(WORKER, age_s=900.0), component("group", running=0.0))},
    ],
    ids=["it steps", "its steps take long", "it is to end", "nothing is known of it", "it is over"],
)
def test_a_run_that_needs_no_step_is_no_stall(change: dict[str, Any]) -> None:
    assert stalled_stage(replace(STILL, **change), PATIENCE_S) is None


def test_five_steps_as_long_as_the_others_make_a_stall_of_a_slow_run() -> None:
    slow = replace(STILL, median_step_s=200.0, step_age_s=1000.0)
    assert stalled_stage(slow, PATIENCE_S) is not None
    assert stalled_stage(replace(slow, step_age_s=999.0), PATIENCE_S) is None

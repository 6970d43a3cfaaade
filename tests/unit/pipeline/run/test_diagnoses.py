"""A run that makes no step for long names the stage that starves or blocks it, in every way in which a stage can."""

import math
from dataclasses import replace
from typing import Any

import pytest

from rollstream.pipeline.run.component_metrics import ComponentMetrics
from rollstream.pipeline.run.diagnoses import (
    FLAT_VERSIONS,
    CrashLoop,
    FlatEnvironments,
    FlowFacts,
    LoopWatch,
    stalled_stage,
)
from rollstream.topics.records import FateCount

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


def counts(environment: str, **fates: int) -> list[FateCount]:
    return [
        FateCount(environment=environment, fate=fate.replace("__", ":"), rollouts=rollouts, tokens=0)
        for fate, rollouts in fates.items()
    ]


def test_an_environment_is_flat_from_the_last_version_on_and_until_a_rollout_is_batched() -> None:
    flat = FlatEnvironments()
    assert flat.look(counts("easy", dropped__zero_variance=40, batched=8), 5) == ()
    idle = counts("idle", batched=3, dropped__zero_variance=1)
    assert flat.look([*counts("easy", dropped__zero_variance=80, batched=8), *idle], 4 + FLAT_VERSIONS) == ()
    two = [
        *counts("easy", dropped__zero_variance=40, dropped__zero_advantage=1, batched=8),
        *counts("late", dropped__late=9),
    ]
    assert flat.look([*two, *idle], 5 + FLAT_VERSIONS) == ("easy",)
    assert flat.look([*two, *idle], 500) == ("easy",), "nothing of the others was dropped for equal rewards since"
    assert flat.look([*counts("easy", dropped__zero_variance=90, batched=12), *idle], 501) == ()
    assert flat.look(counts("easy", dropped__zero_variance=91, batched=12), 501 + FLAT_VERSIONS) == ("easy",)


def test_counts_of_all_partitions_are_one_environments() -> None:
    flat = FlatEnvironments()
    parts = [*counts("e", dropped__zero_variance=4), *counts("e", batched=4)]
    assert flat.look(parts, 0) == ()
    assert flat.look([*counts("e", dropped__zero_variance=8), *counts("e", batched=4)], FLAT_VERSIONS) == ("e",)
    assert flat.look([*counts("e", dropped__zero_variance=8), *counts("e", batched=8)], FLAT_VERSIONS) == ()


def loop(cause: str, exits: int = 4) -> CrashLoop:
    return CrashLoop(exits=exits, cause=cause, again_in_s=60.0)


def test_a_loop_is_told_once_for_each_cause_and_so_is_its_end() -> None:
    watch = LoopWatch("main")
    assert watch.look({}) == []
    (line,) = watch.look({"env-1": loop("exited with code 2: no server")})
    assert "role env-1 exited with code 2: no server; run main continues without this role" in line
    assert "in 60 s" in line
    assert watch.look({"env-1": loop("exited with code 2: no server", exits=5)}) == []
    assert len(watch.look({"env-1": loop("exited with signal SIGKILL")})) == 1
    assert watch.look({}) == ["role env-1 has recovered"]
    assert watch.look({}) == []


def test_a_role_that_gave_way_to_another_process_is_said_not_to_be_started_again() -> None:
    fenced = CrashLoop(exits=1, cause="gave way to another process", again_in_s=math.inf)
    (line,) = LoopWatch("main").look({"group-1": fenced})
    assert line.endswith("continues without this role, which is not started again")

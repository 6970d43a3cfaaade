"""A run that stands still says so after a minute, and names the number that tells why."""

import logging
from dataclasses import replace

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.run.run_statistics import RunSnapshot
from rollstream.pipeline.run.stall_watch import AGAIN_S, STILL_S, StallWatch
from rollstream.topics.metrics.catalogue import CATALOGUE_OF_METRICS
from rollstream.topics.metrics.values import VALUES

STALLED = next(spec for spec in CATALOGUE_OF_METRICS if spec.name == "rollstream_supervisor_stalled")

CONFIG = load(flags=["worker.group_size=8", "grouping.batch_rollouts=48", "learner.rollouts_per_step=96"])
THEN = RunSnapshot(
    run="r",
    produced=100,
    rollouts=90,
    batches=3,
    step=2,
    in_flight=4,
    unread=6,
    waiting=1,
    dropped={"late": 5, "zero_variance": 1},
)


def warnings(now: RunSnapshot, then: RunSnapshot = THEN) -> list[str]:
    watch = StallWatch(CONFIG)
    assert watch.look(then, 100.0) == []
    return watch.look(now, 100.0 + STILL_S)


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"rollouts": 190, "dropped": {"late": 6, "zero_variance": 90}}, "dropped, 89 in this time for zero_variance"),
        ({"dead_lettered": 7}, "dead letters, 7 in this time; `rollstream dlq ls --run r`"),
        (
            {"produced": 150, "rollouts": 140, "unread": 56},
            "unread, 56: grouping reads nothing; its logs are group-*.log, and `rollstream broker mend",
        ),
        (
            {"produced": 150, "rollouts": 140, "in_flight": 54},
            "in flight, 54: groups wait for members (worker.group_size 8), or there are too few for a batch "
            "(grouping.batch_rollouts 48)",
        ),
        (
            {"unread": 0, "in_flight": 9, "waiting_for_labels": 1200},
            "waiting for labels, 1,200 rollouts on `unlabelled`: no labeler reads them; labelers' logs are "
            "label-*.log, and `rollstream role label --run r` starts another",
        ),
        ({"unread": 0, "waiting": 9, "waiting_for_labels": 5, "read_by_labelers": 1}, "waiting, 9 batches"),
        ({"unread": 0, "waiting": 9}, "waiting, 9 batches: workers produce no more"),
        ({"unread": 0, "waiting": 0}, "rollouts, 90: no more are produced"),
    ],
)
def test_a_stall_of_batches_names_the_number_that_explains_it(change: dict[str, object], number: str) -> None:
    [batched, _trained] = warnings(replace(THEN, **change))  # type: ignore[arg-type]
    assert batched.startswith("warning: nothing was batched for 60 s: look at ")
    assert number in batched


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"skipped": 64}, "skipped, 64 rollouts in this time: they were too old"),
        ({"waiting": 9}, "waiting, 9 batches: the learner takes none, or they are too few for a step"),
        ({"waiting": 0}, "batches, 9: the learner has trained on all of them"),
    ],
)
def test_a_stall_of_steps_names_the_number_that_explains_it(change: dict[str, object], number: str) -> None:
    [trained] = warnings(replace(THEN, batches=9, **change))  # type: ignore[arg-type]
    assert trained.startswith("warning: nothing was trained for 60 s: look at ")
    assert number in trained


def test_labelers_that_read_and_then_stop_are_named_once_they_have_read_nothing_for_a_minute() -> None:
    watch = StallWatch(CONFIG)
    then = replace(THEN, waiting_for_labels=40, unread=0)
    now = replace(then, read_by_labelers=8, waiting_for_labels=32, in_flight=12)
    assert watch.look(then, 100.0) == []
    assert watch.look(now, 120.0) == []
    [first, _trained] = watch.look(now, 100.0 + STILL_S)
    assert "look at in flight, 12" in first
    [second, _trained] = watch.look(now, 100.0 + STILL_S + AGAIN_S)
    assert "look at waiting for labels, 32 rollouts" in second


def test_a_run_that_progresses_gives_no_warning() -> None:
    watch = StallWatch(CONFIG)
    for second in range(300):
        now = replace(THEN, batches=second // 50, step=second // 55)
        assert watch.look(now, float(second)) == []


def test_a_warning_is_given_again_now_and_then_and_at_once_after_the_run_went_on() -> None:
    watch = StallWatch(CONFIG)
    given = [second for second in range(1000) if watch.look(replace(THEN, batches=second), float(second))]
    assert given == [STILL_S, STILL_S + AGAIN_S, STILL_S + 2 * AGAIN_S, STILL_S + 3 * AGAIN_S]
    assert watch.look(replace(THEN, batches=1, step=3), 1000.0) == []
    assert len(watch.look(replace(THEN, batches=1, step=3), 1000.0 + STILL_S)) == 2


def test_a_stage_at_which_a_run_stalls_is_said_once_in_place_of_the_number_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    watch = StallWatch(CONFIG)
    stalled = replace(THEN, batches=9, stalled_stage="env", stalled="environments produce nothing: no worker runs")
    assert watch.look(THEN, 0.0) == []
    message = "warning: no step was made for long: look at env: environments produce nothing: no worker runs"
    assert watch.look(stalled, STILL_S) == [message]
    assert VALUES.values_of(STALLED) == {(): 1.0}
    assert watch.look(replace(stalled, batches=10), STILL_S + AGAIN_S) == []
    assert watch.look(replace(THEN, batches=11, step=3), STILL_S + AGAIN_S) == ["the run goes on"]
    assert VALUES.values_of(STALLED) == {(): 0.0}
    assert [record.getMessage() for record in caplog.records] == ["run_stalled", "run_steps_again"]


def test_nothing_is_said_of_a_run_whose_past_is_still_being_read() -> None:
    watch = StallWatch(CONFIG)
    past = replace(THEN, history=100, history_left=50)
    assert [line for second in range(300) for line in watch.look(past, float(second))] == []
    assert watch.look(THEN, 300.0) == []
    assert len(watch.look(THEN, 300.0 + STILL_S)) == 2


def test_an_environment_that_teaches_nothing_is_named_once_and_again_when_it_teaches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = StallWatch(CONFIG)
    flat = replace(THEN, flat_environments=("easy",))
    assert watch.look(replace(flat, history_left=1), 100.0) == []
    [line] = watch.look(flat, 101.0)
    assert line.startswith("warning: environment easy teaches nothing: for 20 policy versions, the rewards of each of")
    assert "`rollstream steer environment pause easy`" in line
    assert watch.look(flat, 102.0) == []
    assert watch.look(THEN, 103.0) == ["environment easy teaches again"]
    assert len(watch.look(flat, 104.0)) == 1
    assert [r.getMessage() for r in caplog.records].count("environment_flat") == 2

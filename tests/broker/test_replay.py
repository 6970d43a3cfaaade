"""A learner that draws from a rollout buffer, on a real broker: kill -9 costs only time, and all is on record."""

import json
import os
import signal
from dataclasses import replace

import pytest

from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import LearnerStep
from rollstream.topics.records.learner import rows_of, trained_rows
from rollstream.topics.wire.rl_examples import batch_digest
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun, with_batches
from tests.support.waiting import eventually

SETTINGS = {
    "learner__source": "rollout_buffer",
    "learner__rollouts_per_step": 24,
    "learner__max_steps": 8,
    "learner__max_policy_lag": 1000,
    "learner__buffer__max_samples": 2,
    "learner__buffer__alpha": 1.0,
    "learner__buffer__capacity": 80,
    "learner__buffer__max_rollout_step_delay": -1,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 3,
    "learner__checkpoint__every_steps": 4,
    "learner__threads": 1,
    "learner__model__num_hidden_layers": 1,
    "learner__model__hidden_size": 32,
    "grouping__batch_rollouts": 8,
    "worker__group_size": 4,
}


def steps_of(run: RealRun) -> dict[int, LearnerStep]:
    return {step: record for step, record in read_steps(run.kafka, run.name, "default").items() if record.params_digest}


def finish(run: RealRun, process, timeout_s: float = 300.0) -> None:
    assert process.wait(timeout_s) == 0, run.log_of(process)[-3000:]


@pytest.mark.long
def test_a_learner_with_a_buffer_killed_between_checkpoints_ends_with_the_bits_of_an_uninterrupted_one(
    real_run: RealRun,
) -> None:
    whole = with_batches(real_run, 8)
    killed = with_batches(whole.beside("killed"), 8)
    saved = killed.directory / "runs" / killed.name / "checkpoints" / killed.name / "default" / "4"
    later = [random_batch(number, partition=number % 2) for number in range(8, 12)]
    try:
        uninterrupted, process = whole.start("learn", **SETTINGS), killed.start("learn", **SETTINGS)
        # 80 rollouts, each drawn at most twice, 24 a step: these draws give six steps, and then too few are left.
        eventually(lambda: saved.exists() and max(steps_of(killed)) == 6, 240, "step 6 of 8, and checkpoint 4")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: max(steps_of(whole)) == 6, 240, "step 6 of the one that is not killed")
        for run in (whole, killed):
            send_batches(run.kafka, run.name, later, together=True)
        resumed = killed.start("learn", **SETTINGS)
        finish(killed, resumed)
        finish(whole, uninterrupted)
    finally:
        killed.stop()

    expected, steps = steps_of(whole), steps_of(killed)
    assert sorted(steps) == list(range(9))
    assert '"rollout_buffer_restored"' in killed.log_of(resumed)
    seen: dict[tuple[int, int], int] = {}
    for step in range(1, 9):
        record = expected[step]
        assert steps[step].params_digest == record.params_digest, step
        assert steps[step].uses == record.uses
        assert (steps[step].oldest, steps[step].stream_time_ms) == (record.oldest, record.stream_time_ms)
        drawn = [(at, row) for at, rows in trained_rows(record.uses).items() for row in rows]
        assert len(drawn) == 24
        for row in drawn:
            seen[row] = seen.get(row, 0) + 1
        assert record.trained_total == len(seen)
    assert set(seen.values()) == {1, 2}
    assert expected[1].skipped_total == 8 * 16 - 80  # The buffer holds the newest 80.
    assert (expected[1].stream_time_ms, expected[8].stream_time_ms) == (7, 11)


@pytest.mark.long
def test_rollouts_that_the_buffer_does_not_admit_are_metrics_of_the_step(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    batches = [random_batch(number, partition=number % 2) for number in range(3)]
    tokens = batches[0].tokens.copy()
    tokens[batches[0].splits[3]] = 10**6
    batches[0] = replace(batches[0], tokens=tokens)
    batches[0] = replace(batches[0], digest=batch_digest(batches[0]))
    send_batches(real_run.kafka, real_run.name, batches)
    finish(real_run, real_run.start("learn", **{**SETTINGS, "learner__max_steps": 1}))
    metrics = steps_of(real_run)[1].metrics
    assert {name: value for name, value in metrics.items() if name.startswith("left_out/")} == {
        "left_out/vocabulary": 1.0
    }


@pytest.mark.long
def test_rollouts_that_come_while_it_is_killed_again_and_again_are_drawn_as_the_record_says(real_run: RealRun) -> None:
    """The learner's draws depend on timing, but the record alone gives the same parameters, step by step."""
    settings = {**SETTINGS, "learner__max_steps": 14, "learner__buffer__max_rollout_step_delay": 6}
    run = with_batches(real_run, 4)
    for kill in range(4):
        process = run.start("learn", **settings)
        before = len(steps_of(run))
        for number in range(4):
            at = 4 + 4 * kill + number
            send_batches(run.kafka, run.name, [random_batch(at, partition=at % 2, version=max(0, before - 2))])
        eventually(lambda n=before: len(steps_of(run)) > n + 1, 200, "two steps more")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    process = run.start("learn", **settings)
    done = len(steps_of(run))
    eventually(lambda: process.poll() is not None or len(steps_of(run)) > done, 200, "another step")
    number = 20
    while process.poll() is None:
        send_batches(run.kafka, run.name, [random_batch(number, version=max(steps_of(run)))])
        number += 1
    finish(run, process)
    steps = steps_of(run)
    assert sorted(steps) == list(range(15))
    for step in range(1, 15):
        counted = rows_of(steps[step].uses, "trained"), rows_of(steps[step].uses, "skipped")
        before = steps[step - 1]
        assert (steps[step].trained_total, steps[step].skipped_total) == (
            before.trained_total + counted[0],
            before.skipped_total + counted[1],
        )
    assert any(use.again for record in steps.values() for use in record.uses)
    audit = run.start("retrain", "--from-step", "0", "--json", **settings)
    assert audit.wait(300) == 0, run.log_of(audit)
    (answer,) = [json.loads(line) for line in run.log_of(audit).splitlines() if '"steps":' in line]
    assert [step["step"] for step in answer["steps"]] == list(range(15))
    assert all(step["recorded"] == step["again"] for step in answer["steps"])

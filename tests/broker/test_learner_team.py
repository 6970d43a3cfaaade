"""Processes of one learner on a real broker: the same steps as one within rounding, the same bits after kill -9."""

import json
import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.process.role_process import TERMINATED
from rollstream.topics.records import LearnerStep
from rollstream.topics.wire.params_digest import params_checksum
from tests.broker.test_learner import SETTINGS
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun, with_batches
from tests.support.waiting import eventually

STEPS = 6
TOLERANCE = 2e-4
"""Largest difference of a parameter after these steps on one process and on two, whose sums round differently.

A tenth of the learning rate; seen: 3e-5.
"""
TEAM: dict[str, object] = {
    **SETTINGS,
    "learner__max_steps": STEPS,
    "learner__checkpoint__every_steps": 2,
    # No policy sampled the batches of the tests.
    "learner__loss__stale_mismatch_limit": 10.0,
    "learner__loss__mismatch_limit": 10.0,
}


def start(run: RealRun, processes: int = 2, **settings: object) -> list[subprocess.Popen[bytes]]:
    """The processes of a learner of a few steps."""
    port = free_port("127.0.0.1")
    every = {
        **TEAM,
        "learner__processes": processes,
        "learner__coordinator": f"127.0.0.1:{port}",
        **settings,
    }
    return [run.start("learn", f"--process={number}", **every) for number in range(processes)]


def retrained(run: RealRun, **settings: object) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `retrain` for the steps after the fourth, with the settings of `start`."""
    words = run.command("retrain", "--from-step=4", "--json", **{**TEAM, "learner__processes": 2, **settings})
    done = subprocess.run(words, cwd=run.directory, env=run.environment(), capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def finish(run: RealRun, *processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        assert process.wait(900) == 0, run.log_of(process)[-3000:]


def steps_of(run: RealRun) -> dict[int, LearnerStep]:
    return read_steps(run.kafka, run.name, "default")


def last_params(run: RealRun, version: int) -> dict[str, np.ndarray]:
    with WeightsFollower(run.kafka, run.name) as follower:
        actual, arrays = follower.wait_for(version, 60)
    assert actual == version
    return dict(arrays)


def differences(one: RealRun, other: RealRun, version: int) -> float:
    params, others = last_params(one, version), last_params(other, version)
    assert params.keys() == others.keys()
    return max(float(np.abs(params[name] - others[name]).max()) for name in params)


def kill_one(run: RealRun, team: list[subprocess.Popen[bytes]], number: int) -> None:
    """Kill -9 a process of a team once step 3 is on record, with checkpoints every 2; the others end, too."""
    eventually(lambda: max(steps_of(run), default=-1) >= 3, 110, "step 3 of 6, checkpoints every 2")
    os.kill(team[number].pid, signal.SIGKILL)
    # They end at once if they wait for its share of a sum, otherwise when its heartbeat is missed.
    for process in team:
        assert process.wait(300) != 0, "a process whose team is gone must not go on"


def shards_sent(run: RealRun, process: subprocess.Popen[bytes]) -> dict[int, dict[str, int]]:
    """The shards that a process other than the leader sent, by version, from its log."""
    events = [json.loads(line) for line in run.log_of(process).splitlines() if '"shard_sent"' in line]
    return {event["version"]: event for event in events}


def all_published(run: RealRun, *teams: list[subprocess.Popen[bytes]]) -> None:
    """Every version is whole, each process of a team sent its share of it, and none had the whole on its host."""
    manifests = read_manifests(run.kafka, run.name)
    processes = len(teams[0])
    members = [
        {version: actual for team in teams for version, actual in shards_sent(run, team[number]).items()}
        for number in range(1, processes)
    ]
    for version, manifest in manifests.items():
        whole = manifest.figures["full_bytes"]
        shares = [sent[version]["full_bytes"] for sent in members]
        shares.append(whole - sum(shares))
        assert manifest.figures["processes"] == processes
        assert all(0.8 < share * processes / whole < 1.2 for share in shares), shares
        assert manifest.figures["largest_shard_bytes"] == max(shares)
    assert all(sorted(sent) == sorted(manifests) for sent in members)
    newest = max(manifests)
    chunks = [sent[newest]["chunks"] for sent in members]
    assert min(chunks) >= 1
    assert sum(chunks) < len(manifests[newest].chunks), "all wrote chunks"


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_train_together_and_after_kill_9_make_the_bits_on_record_again(
    real_run: RealRun, processes: int
) -> None:
    run = with_batches(real_run, 2 * STEPS)
    # The parameters are spread over all processes and published in float32, so a follower's have the learner's digest.
    settings: dict[str, object] = {"learner__mesh__fsdp": processes, "learner__weights__dtype": "float32"}
    team = start(run, processes, **settings)
    kill_one(run, team, processes - 1)
    before = steps_of(run)
    again = start(run, processes, **settings)
    finish(run, *again)
    all_published(run, team, again)
    assert params_checksum(last_params(run, STEPS)) == steps_of(run)[STEPS].params_digest
    steps = steps_of(run)
    # A step on record that came out differently would have ended the learner.
    (resumed,) = [line for line in run.log_of(again[0]).splitlines() if '"learner_resumed"' in line]
    assert json.loads(resumed)["steps_again"] >= 1
    assert {step: steps[step].params_digest for step in before} == {s: r.params_digest for s, r in before.items()}
    assert sorted(steps) == sorted(read_manifests(run.kafka, run.name)) == list(range(STEPS + 1))
    assert [steps[step].policy_version for step in sorted(steps)] == list(range(STEPS + 1))
    assert {steps[step].metrics["trained/rollouts"] for step in range(1, STEPS + 1)} == {32.0}
    # On this machine the command starts all processes.
    settings["learner__processes"] = processes
    code, answer = retrained(run, **settings)
    assert (code, answer["same"], answer["checkpoint"], len(answer["steps"])) == (0, True, 4, 3)
    code, answer = retrained(run, learner__optimizer__learning_rate=0.01, **settings)
    assert (code, answer["same"], answer["first_difference"]) == (1, False, 5)


@pytest.mark.long
def test_two_processes_end_with_the_bits_of_two_and_within_rounding_of_one(real_run: RealRun) -> None:
    whole = with_batches(real_run, 2 * STEPS)
    killed = with_batches(whole.beside("k"), 2 * STEPS)
    alone = with_batches(whole.beside("a"), 2 * STEPS)
    try:
        finish(whole, *start(whole))
        kill_one(killed, start(killed), 0)
        finish(killed, *start(killed))
        finish(alone, *start(alone, processes=1))
    finally:
        killed.stop()
        alone.stop()
    expected, steps = steps_of(whole), steps_of(killed)
    assert sorted(steps) == sorted(expected) == list(range(STEPS + 1))
    for step, record in expected.items():
        assert steps[step].params_digest == record.params_digest, step
        assert steps[step].uses == record.uses
        assert steps[step].policy_version == step
    assert differences(whole, alone, STEPS) < TOLERANCE
    assert steps_of(alone)[STEPS].uses == expected[STEPS].uses


@pytest.mark.long
def test_another_number_of_processes_goes_on_from_a_checkpoint(real_run: RealRun) -> None:
    """One process continues the work of two, then two again: within rounding the parameters are those of one alone."""
    mixed = with_batches(real_run, 0)
    alone = with_batches(mixed.beside("a"), 2 * STEPS)
    try:
        for last, processes in ((2, 2), (4, 1), (6, 2)):
            batches = range(2 * last - 4, 2 * last)
            send_batches(mixed.kafka, mixed.name, [random_batch(number, partition=number % 2) for number in batches])
            team = start(mixed, processes=processes)
            eventually(lambda last=last: last in steps_of(mixed), 90, f"step {last}")
            for process in team:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            # All processes end alike, so that a supervisor starts all of them again, or none.
            [code] = {process.wait(900) for process in team}
            assert code in (0, TERMINATED), mixed.log_of(team[0])[-3000:]
            assert ('"environment_changed"' in mixed.log_of(team[0])) == (last > 2)
        finish(alone, *start(alone, processes=1))
    finally:
        alone.stop()
    assert sorted(steps_of(mixed)) == list(range(STEPS + 1))
    assert differences(mixed, alone, STEPS) < TOLERANCE


@pytest.mark.long
def test_a_second_team_fences_the_first(real_run: RealRun) -> None:
    run = with_batches(real_run, STEPS)
    first = start(run)
    eventually(lambda: 3 in steps_of(run), 90, "the first team used up the batches")
    second = start(run)
    eventually(lambda: '"learner_resumed"' in run.log_of(second[0]), 90, "the second team took over")
    send_batches(run.kafka, run.name, [random_batch(number) for number in range(STEPS, 2 * STEPS)])
    assert first[0].wait(300) == 3, run.log_of(first[0])[-2000:]
    assert first[1].wait(300) != 0
    finish(run, *second)
    assert sorted(steps_of(run)) == list(range(STEPS + 1))

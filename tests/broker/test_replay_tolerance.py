"""Devices that give other bits when a step is executed again end no run within the stated tolerance."""

import os
import signal

import pytest

from rollstream.consumers.weights.manifests import read_manifests
from tests.broker.test_learner import SETTINGS, finish, printed, steps_of
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun, with_batches
from tests.support.waiting import eventually

OPTIMIZER = '''"""Adam, whose updates are one unit in the last place larger once the file "again" is beside this one."""
from pathlib import Path

import optax

FACTOR = 1 + 2**-23 if Path(__file__).with_name("again").exists() else 1.0


def nearly(config, schedule):
    return optax.chain(optax.adam(schedule), optax.scale(FACTOR))
'''


@pytest.mark.long
def test_a_step_with_other_bits_is_refused_without_a_tolerance_and_goes_on_record_with_one(real_run: RealRun) -> None:
    run = with_batches(real_run, 10)
    module = run.directory / "user_optimizer.py"
    module.write_text(OPTIMIZER)
    settings = {**SETTINGS, "learner__optimizer__name": f"{module}:nearly"}
    process = run.start("learn", **settings)
    eventually(lambda: 5 in steps_of(run), 90, "step 5 of 8, a checkpoint at 3, and no more batches")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = steps_of(run)
    run.directory.joinpath("again").touch()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(10, 16)])

    refused = run.start("learn", **settings)
    assert refused.wait(300) == 2
    (line,) = printed(run.log_of(refused))
    assert "executed again, gives parameters" in line
    assert "at a tolerance of 0. " in line
    assert steps_of(run) == before

    tolerant = run.start("learn", **settings, learner__replay_tolerance=1e-3)
    finish(run, tolerant)
    steps = steps_of(run)
    assert sorted(steps) == list(range(9))
    again = [
        step for step in steps if steps[step].params_digest != (before[step].params_digest if step in before else "")
    ]
    differing = [step for step in again if step in before]
    assert differing
    assert differing == list(range(differing[0], 6))
    for step in differing:
        assert 0 < steps[step].metrics["replay/difference"] <= 1e-3
        assert steps[step].uses == before[step].uses
        # Both sets of weights are published, each under a version of its own.
        assert steps[step].policy_version > max(record.policy_version for record in before.values())
    assert all("replay/difference" not in steps[step].metrics for step in steps if step not in differing)
    assert '"step_differs"' in run.log_of(tolerant)
    versions = read_manifests(run.kafka, run.name)
    assert {step: versions[steps[step].policy_version].params_digest for step in steps} == {
        step: record.params_digest for step, record in steps.items()
    }

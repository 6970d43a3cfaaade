"""The learner on a real broker: what kill -9 costs is time only, a name belongs to one, stale batches are on record."""

import os
import signal
from pathlib import Path

import pytest

from consumers.learner.step_log import read_steps
from consumers.weights.publisher import read_manifests
from tests.batches import random_batch, send_batches
from tests.runs import RealRun
from tests.waiting import eventually
from topics import provisioning
from topics.config import KafkaConfig
from topics.records import LearnerStep

SETTINGS = {
    "learner__rollouts_per_step": 32,
    "learner__max_steps": 8,
    "learner__max_policy_lag": 1000,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 3,
    "learner__checkpoint__every_steps": 3,
    "learner__threads": 1,
    # The capacity rule's arithmetic, which needs no producer here, must still add up.
    "grouping__batch_rollouts": 8,
    "worker__group_size": 4,
}


@pytest.fixture(autouse=True)
def _one_compile_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """All learners of the session share compiled functions: some are compiled and others loaded, with equal bits."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "jax"))


def prepared(run: RealRun, batches: int = 16) -> RealRun:
    """Topics with batches on them; the first policy version is the learner's to publish."""
    provisioning.apply(run.kafka, run.topics, run.name)
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(batches)])
    return run


def steps_of(run: RealRun) -> dict[int, LearnerStep]:
    return read_steps(run.kafka, run.name, "default")


def finish(run: RealRun, process, timeout_s: float = 90.0) -> None:
    assert process.wait(timeout_s) == 0, run.log_of(process)[-3000:]


def test_a_learner_killed_at_any_step_ends_with_the_bits_of_an_uninterrupted_one(
    real_run: RealRun, broker: str, tmp_path: Path
) -> None:
    whole = prepared(real_run)
    finish(whole, whole.start("learn", **SETTINGS))

    (tmp_path / "killed").mkdir()
    killed = prepared(RealRun(KafkaConfig(bootstrap_servers=broker), f"{whole.name}-k", tmp_path / "killed"))
    try:
        for at_least in (1, 5):
            process = killed.start("learn", **SETTINGS)
            eventually(lambda at=at_least: max(steps_of(killed), default=-1) >= at, 60, f"step {at_least}")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        finish(killed, killed.start("learn", **SETTINGS))
    finally:
        killed.stop()

    expected, found = steps_of(whole), steps_of(killed)
    assert sorted(found) == list(range(9))
    for step, record in expected.items():
        assert found[step].params_digest == record.params_digest, step
        assert found[step].uses == record.uses
        assert found[step].policy_version == record.policy_version == step
        assert found[step].trained_total == record.trained_total == 32 * step
    assert sorted(read_manifests(killed.kafka, killed.name)) == list(range(9))

"""A teacher, rejection, a divergence in the reward and moments in bfloat16: one learner of all, killed and resumed."""

import json
import signal
from pathlib import Path

import pytest

from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.kafka import provisioning
from tests.support.batches import random_batch, send_batches
from tests.support.recipe import write_model
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
SETTINGS = {
    "learner__rollouts_per_step": 32,
    "learner__max_steps": 5,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 0,
    "learner__checkpoint__every_steps": 2,
    "learner__checkpoint__keep": 5,
    "learner__threads": 1,
    "learner__max_policy_lag": 100,
    "learner__pretrained": "model",
    "learner__teacher": "teacher",
    "learner__reference": "initial",
    "learner__loss__name": "rloo",
    "learner__loss__distillation_coefficient": 0.5,
    "learner__loss__kl_coefficient": 0.1,
    "learner__loss__kl_place": "return",
    "learner__loss__reject_token": "[0.2, 5.0]",
    "learner__loss__reject_geometric": "[0.05, 5.0]",
    "learner__optimizer__learning_rate": 1e-3,
    "learner__optimizer__state_dtype": "bfloat16",
}


@pytest.mark.long
def test_a_learner_with_a_teacher_rejection_and_a_divergence_in_the_reward_is_killed_and_executed_again(
    real_run: RealRun, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = real_run
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    write_model(run.directory / "model", **SMALL)
    write_model(run.directory / "teacher", **{**SMALL, "hidden_size": 64, "num_hidden_layers": 2})
    provisioning.apply(run.kafka, run.topics, run.name)
    send_batches(run.kafka, run.name, [random_batch(n, partition=n % 2) for n in range(6)])
    first = run.start("learn", **SETTINGS)
    eventually(lambda: first.poll() is not None or 3 in read_steps(run.kafka, run.name, "default"), 200, "step 3")
    assert first.poll() is None, run.log_of(first)[-3000:]
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    send_batches(run.kafka, run.name, [random_batch(n, partition=n % 2) for n in range(6, 10)])
    second = run.start("learn", **SETTINGS)
    assert second.wait(300) == 0, run.log_of(second)[-3000:]
    assert '"event": "learner_resumed"' in run.log_of(second)

    steps = read_steps(run.kafka, run.name, "default")
    assert sorted(steps) == [0, 1, 2, 3, 4, 5]
    assert len({step.params_digest for step in steps.values()}) == 6
    for number in range(1, 6):
        metrics = steps[number].metrics
        assert metrics["distillation/kl_mean"] != 0
        assert 0 < metrics["rejection/token_mean"] < 1
        assert 0 < metrics["rejection/geometric_mean"] < 1
        assert 0 < metrics["importance/effective_sample_fraction"] < 1
        assert (metrics["kl/mean"] > 0) == (number > 1), "the first step begins at the reference"
    for begin, executed in (("0", 5), ("2", 3)):
        again = run.start("retrain", "--from-step", begin, "--json", **SETTINGS)
        assert again.wait(300) == 0, run.log_of(again)[-3000:]
        report = json.loads(run.log_of(again).splitlines()[-1])
        assert (report["same"], len(report["steps"])) == (True, executed + 1)

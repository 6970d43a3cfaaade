"""A learner trains on a loss, an optimizer and a schedule of the user's; retraining notices other code."""

import json
import subprocess
from pathlib import Path

import pytest

from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.kafka import provisioning
from tests.support.batches import random_batch, send_batches
from tests.support.objectives import write_objectives
from tests.support.runs import RealRun


@pytest.mark.long
def test_steps_of_users_objectives_are_on_record_with_their_code_and_executed_again_by_it(
    real_run: RealRun, tmp_path: Path
) -> None:
    module = write_objectives(tmp_path)
    settings = {
        "learner__rollouts_per_step": 32,
        "learner__max_steps": 3,
        "learner__microbatch_rows": 8,
        "learner__sequence_length": 32,
        "learner__warm_start__steps": 0,
        "learner__threads": 1,
        "learner__model__num_hidden_layers": 1,
        "learner__model__hidden_size": 32,
        "learner__loss__name": f"{module}:tempered",
        "learner__optimizer__name": f"{module}:signed",
        "learner__optimizer__schedule": f"{module}:sawtooth",
    }
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    send_batches(real_run.kafka, real_run.name, [random_batch(n, partition=n % 2) for n in range(6)])
    assert real_run.start("learn", **settings).wait(300) == 0
    steps = read_steps(real_run.kafka, real_run.name, "default")
    assert sorted(steps) == [0, 1, 2, 3]
    assert len({step.params_digest for step in steps.values()}) == 4
    for step in steps.values():
        assert {setting: name.split()[0] for setting, name in step.code.items()} == {
            "learner.loss.name": f"{module}:tempered",
            "learner.optimizer.name": f"{module}:signed",
            "learner.optimizer.schedule": f"{module}:sawtooth",
        }

    def retrained() -> tuple[int, dict[str, object]]:
        done = subprocess.run(
            real_run.command("retrain", "--from-step", "0", "--json", **settings),
            cwd=real_run.directory,
            env=real_run.environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    code, answer = retrained()
    assert (code, answer["same"], answer["environment"]) == (0, True, {})
    module.write_text(module.read_text().replace("return -tokens.advantages", "return tokens.advantages"))
    code, answer = retrained()
    assert (code, answer["same"]) == (1, False)
    assert set(answer["environment"]) == set(steps[1].code)  # type: ignore[call-overload]

"""examples/torch/train.py: a loop of torch is the learner of a real run, killed and resumed from its own checkpoint."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.records import LearnerStep
from tests.support.paths import ROOT
from tests.support.runs import RealRun

STEPS = 4
TRAIN, PRODUCE = ROOT / "examples" / "torch" / "train.py", ROOT / "docs" / "examples" / "produce.py"
PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
"""An environment with torch and without JAX."""


class Trainer:
    """Runs the example to its end, or kills it."""

    def __init__(self, run: RealRun) -> None:
        self.run = run
        self.checkpoint = run.directory / "torch.checkpoint"

    def start(self, steps: int) -> subprocess.Popen[str]:
        servers = self.run.kafka.bootstrap_servers
        return subprocess.Popen(
            [str(PYTHON), "-P", str(TRAIN), servers, self.run.name, str(steps), str(self.checkpoint)],
            cwd=self.run.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, line: str, process: subprocess.Popen[str]) -> None:
        """Read the output of a process up to a line that begins with `line`, and kill it there."""
        assert process.stdout is not None
        for printed in process.stdout:
            if printed.startswith(line):
                process.send_signal(signal.SIGKILL)
                process.communicate(timeout=60)
                return
        raise AssertionError(process.communicate(timeout=60))

    def runs(self, steps: int) -> str:
        process = self.start(steps)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{out}{err}"
        return out


@pytest.mark.long
def test_a_loop_of_torch_is_killed_and_resumed_and_trains_on_each_batch_once(run: RealRun) -> None:
    run.topics, run.grouping = type(run.topics)(partitions=1), type(run.grouping)()
    assert run.start("topics", "apply").wait(120) == 0
    run.start("group", "--ordinal", "0")
    trainer = Trainer(run)
    assert "continues after step 0" in trainer.runs(0), "it publishes version 0, and has no step to make"
    subprocess.run(
        [sys.executable, "-P", str(PRODUCE), run.kafka.bootstrap_servers, run.name],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
        timeout=120,
    )
    # Kill it before any checkpoint, and one step after one: both steps are on record and in no checkpoint.
    for line in ("step 1", "step 3"):
        trainer.until(line, trainer.start(STEPS))
    first = {step.step: step for step in run.read("steps") if isinstance(step, LearnerStep)}
    assert sorted(first) == [1, 2, 3]
    output = trainer.runs(STEPS)
    assert "continues after step 2" in output
    assert "step_differs" not in output

    written = [step for step in run.read("steps") if isinstance(step, LearnerStep)]
    assert sorted(step.step for step in written) == [1, 2, 3, 4], "steps executed again are on record once"
    assert Counter(use.batch_id for step in written for use in step.uses) == {f"0-{n}": 1 for n in range(4)}
    assert [step.policy_version for step in sorted(written, key=lambda step: step.step)] == [1, 2, 3, 4]
    steps = {step.step: step for step in written}
    # A checkpoint is not complete before its step is on record, so prune must keep what the one before it needs.
    before = {number: steps.get((number - 1) // 2 * 2) for number in steps}
    assert {n: steps[n].resumes_at for n in steps} == {n: old.position if old else 0 for n, old in before.items()}
    assert sorted(read_manifests(run.kafka, run.name)) == [0, 1, 2, 3, 4]
    proof = ledger(run.kafka, run.name)
    assert proof.problems == []
    assert (proof.trained, proof.skipped, proof.in_flight, proof.unread) == (256, 0, 0, 0)

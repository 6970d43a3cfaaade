"""The torch trainer is the learner of a real run in two processes, and has the losses of the learner in JAX."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig, OptimizerConfig
from rollstream.consumers.learner.training.packing import pack_for, sequences_of
from rollstream.consumers.learner.training.train_step import TrainStep
from rollstream.consumers.models import huggingface
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.records import BatchIndexEntry, BatchTokenArray, LearnerStep, NamedArray, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.rl_examples import SAMPLING_MASK, SAMPLING_MASK_COUNTS
from tests.support.batches import random_batch
from tests.support.paths import ROOT
from tests.support.recipe import write_model
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
STEPS, BATCHES = 6, 12
TRAIN = ROOT / "examples" / "torch" / "train.py"
PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
"""An environment with torch and without JAX."""
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
LOSSES: dict[str, dict[str, float]] = {
    "ppo_clip": {},
    "grpo": {},
    "dr_grpo": {"length_norm": 8.0},
    "dapo": {},
    "ce": {},
}


class Trainer:
    """Runs the example in two processes, to its end or until one of them is killed."""

    def __init__(self, run: RealRun) -> None:
        self.run = run
        self.starts = 0

    def start(self) -> tuple[subprocess.Popen[bytes], Path]:
        self.starts += 1
        log = self.run.directory / f"trainer-{self.starts}.log"
        launcher = [str(PYTHON), "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [self.run.kafka.bootstrap_servers, self.run.name, "model", "checkpoint", str(STEPS)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*launcher, str(TRAIN), *words],
                cwd=self.run.directory,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return process, log

    def is_killed(self, line: str, member: int | None) -> str:
        """Start, and once a line is there kill one of the two processes, or all of them; return the output."""
        process, log = self.start()

        def printed() -> bool:
            return f"\n{line}" in f"\n{log.read_text()}" or process.poll() is not None

        try:
            eventually(printed, 300, f"the trainer prints {line!r}", every_s=0.002)
            assert process.poll() is None, log.read_text()[-3000:]
            if member is not None:
                psutil.Process(process.pid).children()[member].kill()
                assert process.wait(300) != 0, "the launcher ends the other process, too"
        finally:
            if process.poll() is None:
                kill_all(process)
        return log.read_text()

    def finishes(self) -> str:
        process, log = self.start()
        assert process.wait(600) == 0, log.read_text()[-3000:]
        return log.read_text()


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its processes, which are in sessions of their own."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in family:
        each.suspend()  # None of them sees another one die.
    for each in family:
        each.kill()
    process.wait()


def masked(batch: TrainingBatch) -> TrainingBatch:
    """The batch as if half of its rows had been sampled with top-k 3, but for every other of their tokens."""
    draw, rows = np.random.default_rng(5), np.arange(0, len(batch), 2, dtype="<i4")
    counts, kept = [], []
    for row in rows:
        begin, end = batch.splits[row : row + 2]
        limited = batch.loss_mask[begin:end] & (np.arange(end - begin) % 2 == 0)
        counts.append(np.where(limited, 3, 0))
        for token in batch.tokens[begin:end][limited]:
            others = np.setdiff1d(np.arange(98), token)
            kept.append(draw.permutation([token, *draw.choice(others, 2, replace=False)]))
    joined = {SAMPLING_MASK: np.concatenate(kept), SAMPLING_MASK_COUNTS: np.concatenate(counts)}
    named = {name: NamedArray.of(array.astype("<i4")) for name, array in joined.items()}
    arrays = tuple(BatchTokenArray(name=name, array=array, rows=rows) for name, array in named.items())
    return replace(batch, token_arrays=arrays)


def check_installed() -> None:
    if not PYTHON.exists():
        pytest.fail("torch is not installed: run make .venv/trl/.installed", pytrace=False)


def test_two_processes_of_torch_are_killed_and_resumed_and_train_on_each_batch_once(run: RealRun) -> None:
    check_installed()
    run.topics = type(run.topics)(partitions=1)
    run.grouping = replace(run.grouping, max_policy_lag=-1)
    assert run.start("topics", "apply").wait(120) == 0
    run.start("group", "--ordinal", "0")
    write_model(run.directory / "model", **SMALL)
    size, sent = run.grouping.batch_rollouts, 0

    def send(steps: int) -> None:
        """Send the rollouts of steps up to this one: the trainer waits for more after it."""
        nonlocal sent
        run.send(rollout(f"p{number // 4}", number % 4) for number in range(sent, 2 * size * steps))
        sent = 2 * size * steps

    trainer = Trainer(run)
    send(1)
    trainer.is_killed("process 0, step 1:", None)  # before any checkpoint
    send(3)
    output = trainer.is_killed("process 0, step 3:", 1)  # a step after one
    assert "process 1 continues after step 0" in output
    send(5)
    trainer.is_killed("process 1, step 5:", 0)
    send(STEPS)
    output = trainer.finishes()
    assert "process 0 continues after step 4" in output
    assert "step_differs" not in output

    written = [step for step in run.read("steps") if isinstance(step, LearnerStep)]
    assert sorted(step.step for step in written) == list(range(1, STEPS + 1)), "steps executed again are there once"
    steps = {step.step: step for step in written}
    used = [[use.batch_id for use in steps[number].uses] for number in sorted(steps)]
    index = [entry.batch_id for entry in run.read("batch-index") if isinstance(entry, BatchIndexEntry)]
    assert used == [index[begin : begin + 2] for begin in range(0, BATCHES, 2)], "a batch for each process"
    assert [steps[number].policy_version for number in sorted(steps)] == list(range(1, STEPS + 1))
    before = {number: steps.get((number - 1) // 2 * 2) for number in steps}
    assert {n: steps[n].resumes_at for n in steps} == {n: old.position if old else 0 for n, old in before.items()}
    assert sorted(read_manifests(run.kafka, run.name)) == list(range(STEPS + 1))
    proof = ledger(run.kafka, run.name)
    assert proof.problems == []
    assert (proof.trained, proof.skipped, proof.in_flight, proof.unread) == (size * BATCHES, 0, 0, 0)


def test_losses_gradients_and_a_step_of_torch_are_those_of_the_learner_in_jax(tmp_path: Path) -> None:
    check_installed()
    model = write_model(tmp_path / "model", **SMALL)
    params = {name: np.float32(array) for name, array in huggingface.load(tmp_path / "model", model).items()}
    batch = masked(random_batch(3))
    (tmp_path / "batch").write_bytes(encode(batch))
    (tmp_path / "losses.json").write_text(json.dumps(LOSSES))
    subprocess.run(
        [str(PYTHON), "-P", str(ROOT / "tests" / "engines" / "torch_losses.py"), str(tmp_path)],
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["shared"], "arrays of a state dict are views of its tensors, also in bfloat16"
    sgd = OptimizerConfig(name="sgd", beta1=0.0, learning_rate=0.1, schedule="constant", max_grad_norm=1.0)
    for name, settings in LOSSES.items():
        config = LearnerConfig(
            model=model,
            loss=LossConfig(name=name, **settings),
            optimizer=sgd,
            microbatch_rows=4,
            sequence_length=32,
        )
        step = TrainStep(config)
        state, metrics = step.train(step.fresh_state(params), pack_for(config, sequences_of(batch)))
        after = jax.device_get(state.params)
        theirs = results["losses"][name]
        assert metrics["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6), name
        assert metrics["optim/grad_norm"] == pytest.approx(theirs["norm"], rel=1e-4), name
        scale = min(1.0, 1.0 / theirs["norm"])
        loaded = {}
        for kind in ("gradient", "step"):
            folder = tmp_path / f"{name}-{kind}"
            (folder / huggingface.CONFIG).write_text((tmp_path / "model" / huggingface.CONFIG).read_text())
            loaded[kind] = huggingface.load(folder, model)
        for key, array in after.items():
            np.testing.assert_allclose(array, loaded["step"][key], atol=2e-6, err_msg=f"{name}: {key}")
            change = (params[key] - array) / (0.1 * scale)
            np.testing.assert_allclose(change, loaded["gradient"][key], atol=2e-4, err_msg=f"{name}: {key}")

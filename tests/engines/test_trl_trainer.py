"""examples/trl/train.py: TRL's GRPO trainer is the learner of a run of ours, killed and resumed from checkpoints."""

import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.consumers.models.huggingface import CONFIG
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.records import BatchIndexEntry, LearnerStep, Rollout, TrainingBatch
from tests.broker.test_environment_run import GAME
from tests.engines.test_torch_trainer import kill_all
from tests.support.checkpoints import SPECIAL_TOKENS
from tests.support.paths import ROOT
from tests.support.recipe import write_model
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "trl"
STEPS, ROWS = 8, 16
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


class Trainer:
    """Runs the example to its end, or kills it with all its processes."""

    def __init__(self, run: RealRun, two: bool = False) -> None:
        """Start one process, or `two`."""
        self.run, self.two = run, two
        self.checkpoints = run.directory / "checkpoints"

    def start(self, steps: int) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.run.directory / f"trainer-{len(self.run.processes)}.log"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if self.two else []
        words = [self.run.kafka.bootstrap_servers, self.run.name, "model", str(ROWS), str(steps), str(self.checkpoints)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(PYTHON), "-P", *launcher, str(EXAMPLE / "train.py"), *words],
                cwd=self.run.directory,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.run.processes.append(process)
        return process, log

    def is_killed(self, steps: int, line: str) -> str:
        """Start the trainer, kill it once it has printed a line that begins with `line`, and return its output."""
        process, log = self.start(steps)

        def printed() -> bool:
            return f"\n{line}" in f"\n{log.read_text()}" or process.poll() is not None

        eventually(printed, 300, f"the trainer prints {line!r}", every_s=0.002)
        assert process.poll() is None, log.read_text()[-3000:]
        kill_all(process)
        return log.read_text()

    def finishes(self, steps: int) -> str:
        process, log = self.start(steps)
        assert process.wait(900) == 0, log.read_text()[-3000:]
        return log.read_text()


def write_tiny_model(directory: Path) -> None:
    write_model(directory / "model", **SMALL, bos_token_id=None, eos_token_id=383)
    tokens = {"eos_token": SPECIAL_TOKENS[-1], "pad_token": SPECIAL_TOKENS[0], "tokenizer_class": "Qwen2TokenizerFast"}
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(tokens))


def test_trl_is_killed_and_resumed_and_trains_on_each_batch_of_a_run_of_ours_once(run: RealRun) -> None:
    if not PYTHON.exists():
        pytest.fail("TRL is not installed: run make .venv/trl/.installed", pytrace=False)
    directory = run.directory
    (directory / "game.py").write_text(GAME, encoding="utf-8")
    write_tiny_model(directory)
    settings = ["--config", str(EXAMPLE / "run.toml")]
    assert run.start("topics", "apply", *settings).wait(120) == 0
    server = run.start("infer", *settings, learner__threads=1)
    run.start("group", "--ordinal", "0", *settings)
    trainer = Trainer(run)
    trainer.is_killed(
        STEPS, "process 0 continues after step 0"
    )  # Version 0 is published, and nothing is there to train on.
    url = eventually(lambda: re.search(r'"inference_listening".*?"url": "(.*?)"', run.log_of(server)), 300, "a server")
    assert url
    worker = run.start("env", "--ordinal", "0", *settings, worker__inference_urls=f'["{url[1]}"]')

    # Kill it as the first checkpoint begins, a step after one, and as the next one begins.
    output = trainer.is_killed(STEPS, "process 0, step 2")
    assert "'clip_ratio/region_mean': '0'" in output, "TRL finds the log-probabilities that our servers recorded"
    trainer.is_killed(STEPS, "process 0, step 3")
    trainer.is_killed(STEPS, "process 0, step 4")
    output = trainer.finishes(STEPS)
    assert re.search(r"^process 0 continues after step [24],", output, re.MULTILINE), output
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(300) == 0

    steps = {step.step: step for step in run.read("steps") if isinstance(step, LearnerStep)}
    assert sorted(steps) == list(range(1, STEPS + 1))
    used = [use.batch_id for number in sorted(steps) for use in steps[number].uses]
    assert used == [entry.batch_id for entry in run.read("batch-index") if isinstance(entry, BatchIndexEntry)][:STEPS]
    # A checkpoint is not complete before its step is on record, so prune must keep what the one before it needs.
    before = {number: steps.get((number - 1) // 2 * 2) for number in steps}
    assert {n: steps[n].resumes_at for n in steps} == {n: old.position if old else 0 for n, old in before.items()}
    manifests = read_manifests(run.kafka, run.name)
    assert {steps[n].policy_version for n in steps} <= set(manifests)
    assert (
        json.loads(manifests[0].model)["hidden_size"]
        == json.loads((directory / "model" / CONFIG).read_text())["hidden_size"]
    )

    batches = {batch.batch_id: batch for batch in run.read("batches") if isinstance(batch, TrainingBatch)}
    trained = [batches[batch_id] for batch_id in used]
    assert max(int(batch.highest_versions.max()) for batch in trained) > 0, "servers followed TRL's weights"
    [game] = {r.environment for r in run.read("rollouts") if isinstance(r, Rollout)}
    assert game == "letters"
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    assert (book.trained, book.skipped) == (sum(map(len, trained)), 0)
    assert verify(run.kafka, run.name).mismatches == []


def test_two_processes_of_trl_are_killed_and_resumed_and_train_on_each_batch_once(run: RealRun) -> None:
    if not PYTHON.exists():
        pytest.fail("TRL is not installed: run make .venv/trl/.installed", pytrace=False)
    run.topics = type(run.topics)(partitions=1)
    run.grouping = replace(run.grouping, batch_rollouts=ROWS, max_policy_lag=-1)
    assert run.start("topics", "apply").wait(120) == 0
    run.start("group", "--ordinal", "0")
    write_tiny_model(run.directory)
    trainer, sent = Trainer(run, two=True), 0
    for steps, line in ((1, "process 0, step 1"), (3, "process 1, step 3"), (4, "")):
        # The trainer waits for more rollouts after these steps.
        run.send(rollout(f"p{number // 4}", number % 4) for number in range(sent, ROWS * 2 * steps))
        sent = ROWS * 2 * steps
        output = trainer.is_killed(4, line) if line else trainer.finishes(4)
    assert "process 1 continues after step 2" in output
    steps = {step.step: step for step in run.read("steps") if isinstance(step, LearnerStep)}
    used = [[use.batch_id for use in steps[number].uses] for number in sorted(steps)]
    index = [entry.batch_id for entry in run.read("batch-index") if isinstance(entry, BatchIndexEntry)]
    assert used == [index[begin : begin + 2] for begin in range(0, 8, 2)], "a batch for each process"
    book = ledger(run.kafka, run.name)
    assert book.balanced, book.problems
    assert (book.trained, book.skipped, book.in_flight) == (ROWS * 2 * 4, 0, 0)

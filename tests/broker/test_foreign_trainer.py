"""docs/trainers.md from the top: a trainer in numpy, outside our packages, is the learner of a real run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.pipeline.audit.ledger import ledger
from rollstream.topics.records import LearnerStep
from tests.support.command_line import answer_of
from tests.support.pages import page
from tests.support.paths import ROOT
from tests.support.runs import RealRun

PAGE = page("trainers").partition("\n## From batch metadata to rollout metadata\n")[0]
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BROKER = "rollstream broker start"


class Reader:
    """Somebody who follows the page in another folder, with copies of the examples, on the tests' broker."""

    def __init__(self, run: RealRun) -> None:
        self.run = run
        shutil.copytree(ROOT / "docs" / "examples", run.directory / "docs" / "examples")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ROLLSTREAM", "KAFKA_BOOTSTRAP"))}
        servers = {"KAFKA_BOOTSTRAP_SERVERS": run.kafka.bootstrap_servers}
        self.environment = {**kept, "PYTHONPATH": str(ROOT), **servers}

    def here(self, text: str) -> str:
        """Text of the page, with the tests' broker and run in it."""
        text = text.replace("127.0.0.1:9092", self.run.kafka.bootstrap_servers)
        return re.sub(r"\bmain\b", self.run.name, text)

    def start(self, *command: str) -> subprocess.Popen[str]:
        where: dict[str, Any] = {"cwd": self.run.directory, "env": self.environment}
        return subprocess.Popen(command, **where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def does(self, *command: str) -> str:
        process = self.start(*command)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{command}: {out}{err}"
        return out

    def asks(self, *words: str) -> str:
        """Output of a command of rollstream."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KAFKA_BOOTSTRAP_SERVERS", self.run.kafka.bootstrap_servers)
            done = answer_of(self.run.directory, *words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def follows(self, language: str, body: str) -> str:
        """Run a block and return its output; a grouping process keeps running in the background."""
        if language == "python":
            return self.does(sys.executable, "-c", self.here(body))
        outputs = []
        for line in body.splitlines():
            program, *words = shlex.split(self.here(line))
            if line == BROKER:
                continue
            if words[:2] == ["role", "group"]:
                self.run.start(words[1], *words[4:])
            elif program == "python":
                outputs.append(self.does(sys.executable, "-W", "error", *words))
            else:
                outputs.append(self.asks(*words))
        return "".join(outputs)


@pytest.fixture
def reader(real_run: RealRun) -> Reader:
    real_run.topics = type(real_run.topics)(partitions=1)
    real_run.grouping = type(real_run.grouping)()
    return Reader(real_run)


def test_the_page_followed_from_the_top_trains_on_every_rollout(reader: Reader) -> None:
    outputs = [reader.follows(language, body) for language, body in BLOCKS]
    trained = next(output for output in outputs if "probability" in output)
    probabilities = [float(digits) for digits in re.findall(r"probability ([\d.]+)$", trained, re.MULTILINE)]
    assert len(probabilities) == 4
    assert probabilities[-1] > probabilities[0] == round(1 / 11, 3), "what paid gets likelier"

    run = reader.run
    proof = ledger(run.kafka, run.name)
    assert proof.problems == []
    assert (proof.trained, proof.skipped, proof.steps, proof.in_flight, proof.unread) == (256, 0, 4, 0, 0)
    assert proof.dropped == {}
    printed = next(output for output in outputs if "ledger of rollouts" in output)
    assert "every record is in exactly one place" in printed
    assert "step trainer/4" in printed
    assert re.search(r"cut from rollouts\[0\]: offsets \d+-\d+", printed), "from a step back to offsets"
    assert "published after step trainer/4" in printed


@pytest.mark.long
def test_the_trainer_is_killed_again_and_again_and_trains_on_each_batch_once(reader: Reader) -> None:
    for language, body in BLOCKS[:3]:
        reader.follows(language, body)
    run = reader.run
    reader.does(sys.executable, "docs/examples/produce.py", run.kafka.bootstrap_servers, run.name)
    train = [sys.executable, "-u", "docs/examples/train.py", run.kafka.bootstrap_servers, run.name, "4"]
    for _kill in range(3):
        process = reader.start(*train)
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
    reader.does(*train)
    steps = {step.step: step for step in run.read("steps") if isinstance(step, LearnerStep)}
    assert sorted(steps) == [1, 2, 3, 4]
    assert Counter(use.batch_id for step in steps.values() for use in step.uses) == {f"0-{n}": 1 for n in range(4)}
    assert [steps[n].policy_version for n in sorted(steps)] == [1, 2, 3, 4]
    report = json.loads(reader.asks("ledger", "--run", run.name, "--json"))
    assert report["trained"] == 256, report


@pytest.mark.long
def test_the_ledger_closes_after_a_rollback_and_after_what_is_trained_from_it(reader: Reader) -> None:
    for language, body in BLOCKS[:3]:
        reader.follows(language, body)
    run = reader.run
    where = run.kafka.bootstrap_servers, run.name
    for last, good in (("4", "3"), ("8", "8")):
        reader.does(sys.executable, "docs/examples/produce.py", *where)
        reader.does(sys.executable, "docs/examples/train.py", *where, last)
        rollback = ["weights", "rollback", good, "--reason", "reward hacking", "--take-over", "--run", run.name]
        reader.asks(*rollback)
        report = json.loads(reader.asks("ledger", "--run", run.name, "--json"))
        assert report["balanced"], report
        proof = ledger(run.kafka, run.name)
        assert (proof.problems, proof.unread, proof.steps) == ([], 0, int(last))
        # Answers grow alike, and a group whose rewards are equal is dropped, on record.
        assert proof.trained + sum(proof.dropped.values()) == 64 * int(last)
    steps = {step.step: step.policy_version for step in run.read("steps") if isinstance(step, LearnerStep)}
    assert steps == {step: step + (step > 4) for step in range(1, 9)}, "5 is version 3 again, and 10 is version 8"
    manifests = read_manifests(run.kafka, run.name)
    assert manifests[5].digest == manifests[3].digest
    assert manifests[10].digest == manifests[8].digest


def test_the_page_needs_no_more_than_a_broker_of_its_own() -> None:
    assert BROKER in BLOCKS[0][1].splitlines()


def test_the_trainer_is_an_example_short_enough_to_read() -> None:
    source = (ROOT / "docs" / "examples" / "train.py").read_text()
    assert len(source.splitlines()) <= 40
    assert "jax" not in source.replace("without JAX", "")

"""A recorded run can be audited and continued elsewhere: its steps executed again from the log, or a learner forked."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.settings import file_layers
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import FORKED, read_named
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import ForkedLearner, LearnerStep
from rollstream.topics.wire.catalogue import CATALOGUE
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun

SETTINGS = {
    "learner__rollouts_per_step": 32,
    "learner__max_steps": 8,
    "learner__max_policy_lag": 5,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 2,
    "learner__checkpoint__every_steps": 3,
    "learner__checkpoint__keep": 2,
    "learner__threads": 1,
    # With a reference, the commands must find that again as well.
    "learner__reference": "initial",
    "learner__loss__kl_coefficient": 0.1,
    "learner__model__num_hidden_layers": 1,
    "learner__model__hidden_size": 32,
    "grouping__batch_rollouts": 8,
    "worker__group_size": 4,
}
OTHER = "--set=learner.optimizer.learning_rate=0.01"


@pytest.fixture(scope="module")
def source(broker: str, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A run whose learner made 8 steps of 2 batches each and skipped one batch that was too old; checkpoints of its
    steps 6 and 8.
    """
    directory = tmp_path_factory.mktemp("source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
        run = RealRun(KafkaConfig(bootstrap_servers=broker), f"source-{directory.name}", directory)
        provisioning.apply(run.kafka, run.topics, run.name)
        # Step 7 may be planned while step 5 is trained and version 4 is on its way.
        versions = [0] * 12 + [3] + [0] + [3] * 3
        send_batches(run.kafka, run.name, [random_batch(n, partition=n % 2, version=v) for n, v in enumerate(versions)])
        try:
            assert run.start("learn", **SETTINGS).wait(300) == 0
            yield run
        finally:
            run.stop()


RUN_COMMANDS = """
import contextlib, io, json, sys
from rollstream.pipeline.command_line.cli import main
found = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(words)
    found.append((code, out.getvalue(), error.getvalue()))
json.dump(found, sys.stdout)
"""
"""Runs command lines in one process: most of what each alone would take is importing JAX."""


class Answer(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    error: str


@pytest.fixture(scope="module")
def answers(source: RealRun) -> Iterator[dict[str, Answer]]:
    """Answers of this module's commands, one after the other; afterwards the run must be as it was."""
    before, into = everything(source), f"{source.name}-fork"
    commands = {
        "audit": ("retrain", "--from-step", "6", "--json"),
        "beginning": ("retrain", "--from-step", "0", "--to-step", "2"),
        "too early": ("retrain", "--from-step", "4"),
        "too late": ("retrain", "--from-step", "8"),
        "other": ("retrain", "--from-step", "6", OTHER),
        "fork too early": ("fork", "--from-step", "4", "--into", into),
        "fork": ("fork", "--from-step", "6", "--into", into, "--json", OTHER),
        "learn": ("role", "learn", "--config", str(source.directory / "runs" / into / "run.toml")),
        "fork again": ("fork", "--from-step", "8", "--into", into),
        "fork into itself": ("fork", "--from-step", "8", "--into", source.name),
    }
    lines = [
        list(words) if words[0] == "role" else source.command(*words, **SETTINGS)[4:] for words in commands.values()
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_COMMANDS],
        input=json.dumps(lines),
        cwd=source.directory,
        env=source.environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    actual = (Answer(*answer) for answer in json.loads(done.stdout))
    yield dict(zip(commands, actual, strict=True))
    assert everything(source) == before


def steps_of(run: RealRun, name: str = "") -> dict[int, LearnerStep]:
    return read_steps(run.kafka, name or run.name, "default")


def everything(run: RealRun) -> dict[str, list[tuple[Any, ...]]]:
    """All records of the run's topics, place and bytes."""
    return {
        spec.name: sorted(
            (m.partition, m.offset, m.key, m.value)
            for m in read_to_end(run.kafka, run.topic(spec.name), isolation="read_uncommitted")
        )
        for spec in CATALOGUE
    }


def refused(answer: Answer) -> str:
    """The one line of an error that says what to do."""
    assert (answer.code, answer.out) == (2, ""), answer
    [line] = [line for line in answer.error.splitlines() if not line.startswith("{")]
    return line


@pytest.mark.long
def test_executed_again_from_a_checkpoint_every_step_has_its_parameters(
    source: RealRun, answers: dict[str, Answer]
) -> None:
    recorded, answer = steps_of(source), answers["audit"]
    assert answer.code == 0, answer
    report = json.loads(answer.out)
    assert (report["checkpoint"], report["same"], report["first_difference"], report["environment"]) == (
        6,
        True,
        None,
        {},
    )
    assert [(s["step"], s["again"], s["batches"], s["skipped"]) for s in report["steps"]] == [
        (6, recorded[6].params_digest, 2, 0),
        (7, recorded[7].params_digest, 2, 16),
        (8, recorded[8].params_digest, 2, 0),
    ]


@pytest.mark.long
def test_without_a_checkpoint_it_begins_with_the_initial_parameters_and_only_there(
    source: RealRun, answers: dict[str, Answer]
) -> None:
    answer = answers["beginning"]
    assert answer.code == 0, answer
    assert "started from the initial parameters, made again" in answer.out
    assert "2 steps executed again from the log, all with the parameters on record" in answer.out

    line = refused(answers["too early"])
    assert "no checkpoint at or before step 4" in line
    assert "there are checkpoints of steps [6, 8]" in line
    assert f"learner 'default' of run {source.name} has steps 0 to 8 on record" in refused(answers["too late"])


@pytest.mark.long
def test_other_settings_make_another_step_which_is_named_with_what_changed(
    source: RealRun, answers: dict[str, Answer]
) -> None:
    recorded, answer = steps_of(source), answers["other"]
    assert answer.code == 1, answer
    assert "STEP 7 DIFFERS: on record" in answer.out
    assert recorded[7].params_digest in answer.out
    assert recorded[8].params_digest[:16] not in answer.out
    [line] = [line for line in answer.out.splitlines() if line.startswith("learner.optimizer")]
    assert line.split() == ["learner.optimizer.learning_rate", "0.002", "0.01"]


@pytest.mark.long
def test_a_fork_goes_on_from_a_step_with_other_settings_on_the_same_batches(
    source: RealRun, answers: dict[str, Answer]
) -> None:
    recorded, into = steps_of(source), f"{source.name}-fork"
    line = refused(answers["fork too early"])
    assert "no checkpoint of step 4" in line
    assert "steps [6, 8]" in line

    report = json.loads(answers["fork"].out)
    assert (report["position"], report["input_run"]) == (recorded[6].position, source.name)
    assert report["command"] == f"rollstream role learn --config {report['configuration']}"
    [layer] = file_layers(source.directory / report["configuration"])
    assert layer.value["learner"]["optimizer"]["learning_rate"] == 0.01

    [fork] = read_named(source.kafka, into, FORKED, ForkedLearner).values()
    assert (fork.source_run, fork.source_learner, fork.step) == (source.name, "default", 6)
    assert (fork.learner, fork.input_run, fork.position) == ("default", source.name, recorded[6].position)

    assert answers["learn"].code == 0, answers["learn"].error[-2000:]
    made = steps_of(source, into)
    assert sorted(made) == [6, 7, 8]
    assert made[6].params_digest == recorded[6].params_digest
    assert [made[step].uses for step in (7, 8)] == [recorded[step].uses for step in (7, 8)]
    assert all(made[step].params_digest != recorded[step].params_digest for step in (7, 8))
    assert [made[step].policy_version for step in (6, 7, 8)] == [6, 7, 8]
    assert {made[step].input_run for step in made} == {source.name}
    assert sorted(read_manifests(source.kafka, into)) == [6, 7, 8]

    assert f"run {into} has steps already" in refused(answers["fork again"])
    assert "is the run itself" in refused(answers["fork into itself"])


@pytest.mark.long
def test_a_fork_that_is_started_becomes_the_learner(source: RealRun) -> None:
    recorded, into = steps_of(source), f"{source.name}-started"
    process = source.start("fork", "--from-step", "6", "--into", into, "--start", **SETTINGS)
    assert process.wait(300) == 0, source.log_of(process)[-3000:]
    made = steps_of(source, into)
    assert sorted(made) == [6, 7, 8]
    # Under the same settings they are the same steps.
    assert all(made[step].params_digest == recorded[step].params_digest for step in made)
    log = source.log_of(process)
    assert log.index("starting:") < log.index('"event": "learner_resumed"') < log.index('"event": "learner_finished"')

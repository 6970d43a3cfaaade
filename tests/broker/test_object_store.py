"""Checkpoints at gs://: a learner process saves and resumes there, and the tools that read checkpoints find them."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.consumers.weights.step_log import read_steps
from tests.support.object_store import object_store
from tests.support.paths import ROOT
from tests.support.runs import SMALL_LEARNER, RealRun, with_batches
from tests.support.waiting import eventually

BUCKET = "gs://bucket/checkpoints"
SETTINGS = {
    **SMALL_LEARNER,
    "learner__checkpoint__directory": BUCKET,
    "learner__checkpoint__every_steps": 2,
    "learner__reference": "initial",
    "learner__max_steps": 6,
}


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    """The command line of a process that has gs://."""
    folder = tmp_path / "store"
    with object_store(folder) as port:
        use = f"from tests.support.object_store import use; use(Path({str(folder)!r}), {port})"
        main = "from rollstream.pipeline.command_line.cli import main"
        yield f"import sys; from pathlib import Path; {use}; {main}; sys.exit(main())"


def answer(run: RealRun, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = run.command(*words, **SETTINGS)
    command[2:4] = ["-c", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=run.directory, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_a_learner_saves_at_a_url_is_killed_resumes_from_there_and_is_forked(
    real_run: RealRun, script: str, tmp_path: Path
) -> None:
    run = with_batches(real_run, 12)
    first = run.start("learn", script=script, **SETTINGS)
    checkpoints = tmp_path / "store" / "bucket" / "checkpoints" / run.name
    eventually(lambda: (checkpoints / "default" / "2" / "commit_success.txt").exists(), 150, "a checkpoint of step 2")
    eventually(lambda: max(read_steps(run.kafka, run.name, "default"), default=0) >= 3, 60, "step 3")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = read_steps(run.kafka, run.name, "default")

    again = run.start("learn", script=script, **SETTINGS)
    assert again.wait(300) == 0, run.log_of(again)[-3000:]
    steps = read_steps(run.kafka, run.name, "default")
    assert sorted(steps) == list(range(7))
    assert all(steps[step].params_digest == record.params_digest for step, record in before.items())
    assert (checkpoints / "default.reference").exists()
    assert not list(run.directory.glob("gs*")), "nothing of it is a local folder"

    forked = answer(run, script, "fork", "--from-step", "6", "--into", f"{run.name}-fork", "--json")
    assert forked.returncode == 0, forked.stderr
    copied = checkpoints.with_name(f"{run.name}-fork") / "default"
    assert (copied / "6" / "commit_success.txt").exists()
    assert json.loads((copied / "6" / "meta" / "metadata").read_text())["recent_steps"] == []
    assert (copied.with_name("default.reference")).exists()

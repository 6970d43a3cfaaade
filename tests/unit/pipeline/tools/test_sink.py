"""`rollstream sink` over an archive: each step once in trackers of others and in one of the user's own."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.archived_run import archive_run
from tests.support.command_line import answer_of
from tests.support.paths import ROOT
from tests.unit.consumers.trackers.test_trackers import scalars

OWN = '''
"""A tracker of a user: one JSON line for each step. It dies in the step that the options name, once."""
import json, os, pathlib


class Lines:
    def __init__(self, tracked):
        self.path = tracked.directory / "lines.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.last = json.loads(lines[-1])["step"] if lines else -1
        self.dies_at = int(tracked.config.options.get("dies_at", -1))

    def write(self, step):
        if step.step == self.dies_at:
            os._exit(9)
        with self.path.open("a") as file:
            uids = [trace.metadata["uid"] for trace in step.traces]
            file.write(json.dumps({"step": step.step, "loss": step.metrics["loss"], "uids": uids}) + chr(10))

    def close(self):
        self.path.with_name("closed").touch()
'''


def sink(directory: Path, archive: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, because trackers keep state in their process."""
    command = [sys.executable, "-P", "-m", "rollstream", "sink", "--archive", str(archive), "--run", "main"]
    # A tracker that an earlier test opened in this process has set a directory of its own.
    environment = {name: value for name, value in os.environ.items() if name != "TRACKIO_DIR"}
    return subprocess.run(
        [*command, *words], cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_of_ones_own_holds_each_step_once_although_the_command_was_killed(tmp_path: Path) -> None:
    archive_run(tmp_path / "archive", 4)
    (tmp_path / "own_tracker.py").write_text(OWN)
    words = ("--to", "own_tracker.py:Lines", "--into", "own")
    killed = sink(tmp_path, tmp_path / "archive", *words, "--set", "tracker.options.dies_at=2")
    assert killed.returncode == 9, killed.stderr
    assert not (tmp_path / "own" / "closed").exists()
    finished = sink(tmp_path, tmp_path / "archive", *words, "--json")
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {
        "tracker": "own_tracker.py:Lines", "run": "main", "learner": "default",
        "steps": 2, "traces": 8, "missing_rollouts": 0, "newest_step": 3,
    }  # fmt: skip
    written = lines(tmp_path / "own" / "lines.jsonl")
    assert [(line["step"], line["loss"]) for line in written] == [(0, 1.0), (1, 0.5), (2, 1 / 3), (3, 0.25)]
    assert (tmp_path / "own" / "closed").exists()
    again = answer_of(tmp_path, "sink", "--archive", "archive", "--run", "main", *words[:3], "again")
    assert again.returncode == 0, again.stderr
    assert lines(tmp_path / "again" / "lines.jsonl") == written, "filled a second time, it is the same"


def test_trackio_has_figures_and_traces_and_is_continued(tmp_path: Path) -> None:
    for steps in (2, 4, 4):
        archive_run(tmp_path / "archive", steps)
        done = sink(tmp_path, tmp_path / "archive", "--to", "trackio", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["newest_step"] == steps - 1
    [database] = tmp_path.glob(".rollstream/trackers/trackio/**/rollstream.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
        traces = connection.execute("select step, messages, metadata from traces order by step").fetchall()
    connection.close()
    assert [(name, step, json.loads(metrics)["loss"]) for name, step, metrics in rows] == [
        ("main/default", n, 1 / (n + 1)) for n in range(4)
    ]
    assert [step for step, _messages, _metadata in traces] == [n for n in range(4) for _ in range(4)]
    assert [message["role"] for message in json.loads(traces[0][1])] == ["user", "assistant"]
    assert {"reward", "advantage", "environment", "policy_version", "fate", "place"} <= json.loads(traces[0][2]).keys()


def filled_twice(directory: Path, to: str) -> None:
    for steps in (2, 3):
        archive_run(directory / "archive", steps)
        done = sink(directory, directory / "archive", "--to", to, "--into", to)
        assert done.returncode == 0, done.stderr
        assert f"{to}, which has main/default up to step {steps - 1}" in done.stdout


def test_tensorboard_is_filled_from_the_log(tmp_path: Path) -> None:
    filled_twice(tmp_path, "tensorboard")
    losses = [item for item in scalars(tmp_path / "tensorboard" / "main" / "default") if item[0] == "loss"]
    assert losses == [("loss", 0, 1.0), ("loss", 1, 0.5), ("loss", 2, pytest.approx(1 / 3))]


@pytest.mark.long
def test_weights_and_biases_is_filled_from_the_log_and_its_run_continued(tmp_path: Path) -> None:
    filled_twice(tmp_path, "wandb")
    state = json.loads((tmp_path / "wandb" / "main.default.json").read_text())
    assert state["last"] == 2
    assert len(list(tmp_path.glob("wandb/wandb/offline-run-*"))) == 2


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path) -> None:
    archive_run(tmp_path / "archive", 1)
    words = ("sink", "--archive", "archive", "--run", "main")
    unnamed = answer_of(tmp_path, *words)
    assert (unnamed.returncode, unnamed.stderr.count("\n")) == (2, 1)
    assert "set tracker.to or give --to" in unnamed.stderr
    nobody = answer_of(tmp_path, *words, "--learner", "nobody")
    assert (nobody.returncode, nobody.stderr.count("\n")) == (2, 1)
    assert "learners with steps: default" in nobody.stderr
    unknown = answer_of(tmp_path, *words, "--to", "tracky")
    assert unknown.returncode == 2
    assert "a tracker is one of trackio, wandb, tensorboard" in unknown.stderr


def test_the_command_imports_no_tracker_before_it_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, rollstream.pipeline.tools.sink; print(*sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert not {"trackio", "wandb", "tensorboardX", "jax", "pandas"} & set(done.stdout.split())

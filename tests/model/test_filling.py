"""Buffers filled with trajectories: pruned is what they have read, and kill -9 at any moment repeats nothing."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import TrajectoryFiller
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from tests.model.test_trajectories import of_two
from tests.support.paths import ROOT
from tests.support.runs import RealRun
from tests.support.trajectories import numbered
from tests.support.trajectory_runs import for_trajectories, labeled_of, position, send
from tests.support.waiting import eventually


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    return for_trajectories(real_run)


def prune(run: RealRun, *words: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The plan of `rollstream prune` for the two topics of trajectories."""
    rows = asked(run, "prune", *words)["plan"]
    return {(row["topic"], row["partition"]): row for row in rows}


def asked(run: RealRun, *words: str) -> dict[str, Any]:
    """Answer of a command of rollstream."""
    done = run.said(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.kafka
@pytest.mark.long
def test_prune_deletes_what_fillers_and_labeling_have_read_and_nothing_else(run: RealRun, tmp_path: Path) -> None:
    send(run, of_two(range(1, 10)), "unlabelled")
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 9, 60, "they are labeled")
    labeler.terminate()
    assert labeler.wait(300) == 0
    labeled = position(run, "labeller", "unlabelled")
    send(run, of_two(range(11, 15)), "unlabelled")
    held = prune(run, "--dry-run")
    assert {row["to"] for (topic, _), row in held.items() if topic == "trajectories"} == {0}
    assert held["trajectories", 0]["kept_for"] == "no filler on record"
    assert {p: held["unlabelled", p]["to"] for p in labeled} == labeled

    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "windows")
    late = EpisodeSliceBuffer(tmp_path / "slices", capacity=1000, slice_len=2)
    with buffer, late:
        TrajectoryFiller(run.kafka, run.name, [late], name="late").close()
        filler = TrajectoryFiller(run.kafka, run.name, [buffer])
        filler.fill(300)
        read = dict(buffer.position)
        assert position(run, "filler-default", "trajectories") == read
        assert set(position(run, "filler-late", "trajectories").values()) == {0}, "it has nothing, and is waited for"
        assert prune(run, "--dry-run")["trajectories", 0]["to"] == 0
        with TrajectoryFiller(run.kafka, run.name, [late], name="late") as going:
            eventually(lambda: dict(late.position) == read, 60, "the other has it, too")
            going.check()

        send(run, of_two(range(20, 26)))
        done = prune(run, "--yes")
        assert {p: done["trajectories", p]["to"] for p in read} == read
        for topic, read_to in (("trajectories", read), ("unlabelled", labeled)):
            assert {p: low for p, (low, _end) in topic_admin.bounds(run.kafka, run.topic(topic)).items()} == read_to
        filler.fill(300)
        filler.close()
        assert filler.counts == (9 + 6, 0)
    run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 6 + 4, 60, "labeling goes on where it was")


FILL = """
import sys
from pathlib import Path

from tests.model.test_filling import filled

filled(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
"""


def filled(bootstrap_servers: str, run: str, directory: Path) -> dict[str, Any]:
    """Fill both buffers of a directory with all there is, and draw from them."""
    kafka = KafkaConfig(bootstrap_servers=bootstrap_servers)
    windows = TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory / "windows")
    with windows, EpisodeSliceBuffer(directory / "slices", capacity=100_000, slice_len=3) as slices:
        filler = TrajectoryFiller(kafka, run, [windows, slices], identity_file=directory / "topic.json")
        filler.fill(300)
        filler.close()
        return {
            "positions": (dict(windows.position), dict(slices.position)),
            "sizes": (len(windows), windows.total_samples, slices.stats()["num_episodes"], slices.size()),
            "drawn": [windows.sample(64)["actions"].tolist(), slices.sample(16)["actions"].tolist()],
        }


@pytest.mark.kafka
@pytest.mark.long
def test_buffers_killed_while_they_are_filled_are_in_the_end_as_if_they_had_not_been(
    run: RealRun, tmp_path: Path
) -> None:
    # All are of one worker, so in one partition: several would be read in an order that differs each time.
    send(run, [numbered(number, arrays=full(number)) for number in range(1500)])
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    def written() -> int:
        return sum(path.stat().st_size for path in killed.rglob("*") if path.is_file() and path.suffix != ".lock")

    kills = 0
    for _ in range(4):
        before = written() if killed.exists() else 0
        arguments = [sys.executable, "-c", FILL, run.kafka.bootstrap_servers, run.name, str(killed)]
        child = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)})
        at_work = partial(lambda child, least: child.poll() is not None or written() > least, child, before + 30_000)
        eventually(at_work, 60, "it writes")
        kills += child.poll() is None
        child.kill()
        child.wait()
    assert kills >= 2, "it was killed at work"
    after = filled(run.kafka.bootstrap_servers, run.name, killed)
    assert after == filled(run.kafka.bootstrap_servers, run.name, whole)
    assert after["sizes"][0] == after["sizes"][2] == 1500


def full(number: int) -> dict[str, np.ndarray]:
    values = np.full((4, 1), number, np.int64)
    return {"actions": values, "rewards": values.astype(np.float32), "obs": np.full((4, 1, 200), number, np.int32)}

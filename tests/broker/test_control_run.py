"""`rollstream run` of a control task that lies outside the packages: it collects, labels, fills, and ends."""

import json
import subprocess

import numpy as np
import psutil
import pytest

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.pipeline.config import load
from rollstream.pipeline.deployment.description import counts
from rollstream.pipeline.process.role_process import TERMINATED
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.trajectory_arrays import from_record
from tests.support.described import undescribed
from tests.support.runs import RealRun
from tests.support.waiting import eventually

COUNTING = '''
from dataclasses import replace

import numpy as np

from rollstream.producers.trajectories.collector import ChunkStepResult


def play(seat):
    """Two environments that count from what the options say; an episode has ten steps. Process 0 knows its rewards."""
    number = int(seat.options["first"])
    yield None  # as one that waits for weights
    while True:
        seen = np.full((2, 1), number, np.int64)
        number += 1
        yield ChunkStepResult(
            actions=np.full(2, seat.seed),
            rewards=np.full(2, float(number - 1), np.float32) if seat.ordinal == 0 else None,
            dones=np.full(2, number % 10 == 0),
            curr_obs={"count": seen},
            next_obs={"count": seen + 1},
        )


def play_for_a_while(seat):
    for step, _ in zip(play(seat), range(26)):
        yield step


def play_nothing(seat):
    return []


def judge(trajectory):
    counts = trajectory.arrays["curr_obs"]["count"][..., 0]
    return replace(trajectory, arrays={**trajectory.arrays, "rewards": counts.astype(np.float32)})
'''


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    """A run whose task is a module in a folder of its own."""
    folder = real_run.directory / "task"
    folder.mkdir()
    (folder / "counting.py").write_text(COUNTING)
    real_run.python_path = (folder,)
    return real_run


def start(run: RealRun, **settings: object) -> "subprocess.Popen[bytes]":
    """`rollstream run` with a file as its user would write it."""
    file = run.directory / "control.toml"
    file.write_text(
        f"""
        seed = 7
        [collect]
        processes = 2
        player = "counting:play"
        environment = "counting"
        steps = 8
        trajectories = 5
        options = {{ first = "100" }}
        [labeling]
        processes = 1
        labeler = "counting:judge"
        [fill]
        directory = "{run.directory / "windows"}"
        """
    )
    return run.start("run", str(file), **settings)


def book_of(run: RealRun) -> dict[str, object]:
    result = run.said("ledger", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_a_run_of_a_control_task_collects_labels_fills_and_ends(run: RealRun) -> None:
    running = start(run)
    assert running.wait(300) == 0, run.log_of(running)
    logs = run.directory / "runs" / run.name / "logs"
    assert sorted(log.name for log in logs.iterdir()) == ["collect-0.log", "collect-1.log", "fill.log", "label-0.log"]

    book = book_of(run)
    assert book["balanced"]
    fates = {"left_out": 0, "dead_lettered": 0, "pending": 0, "undecided": 0, "pruned": 0}
    assert book["unlabelled"] == {"produced": 5, "labeled": 5, **fates}
    trajectories = book["trajectories"]
    assert isinstance(trajectories, dict)
    assert (trajectories["records"], trajectories["fillers"]["fill"]["waiting"]) == (10, 0)

    by_worker: dict[str, list[float]] = {}
    for message in read_to_end(run.kafka, run.topic("trajectories")):
        trajectory = from_record(decode(message.value))
        assert (trajectory.arrays["actions"] == 7).all(), "the player is given the seed of the run"
        rewards = trajectory.arrays["rewards"][:, 0].tolist()
        by_worker.setdefault(trajectory.metadata.worker_id, []).extend(rewards)
    assert by_worker == {name: [*map(float, range(100, 140))] for name in ("collect-0", "collect-1")}
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=run.directory / "windows") as buffer:
        assert len(buffer) == 10
        np.testing.assert_array_equal(np.unique(buffer.sample(500)["rewards"]), np.arange(100.0, 140.0))

    named = [f"run={run.name}", f"kafka.bootstrap_servers={run.kafka.bootstrap_servers}"]
    config = load(run.directory / "control.toml", flags=named)
    assert counts(config) == {"fill": 1, "label": 1, "collect": 2}
    assert undescribed(config, counts(config)) == set()


@pytest.mark.long
def test_a_run_ends_when_its_players_have_returned_and_sends_their_last_steps(run: RealRun) -> None:
    running = start(run, collect__player="counting:play_for_a_while", collect__trajectories=0)
    assert running.wait(300) == 0, run.log_of(running)
    book = book_of(run)
    assert book["balanced"]
    trajectories = book["trajectories"]
    assert isinstance(trajectories, dict)
    # A player's first item is no step, so both players have 25 steps: three trajectories of 8, and one of 1.
    assert (trajectories["records"], trajectories["fillers"]["fill"]["waiting"]) == (8, 0)


@pytest.mark.long
def test_a_run_that_is_told_to_stop_stops_and_the_next_goes_on_from_there(run: RealRun) -> None:
    running = start(run, collect__trajectories=0)
    eventually(lambda: list((run.directory / "windows").glob("**/*.npz")), 60, "something is filled in")
    running.terminate()
    assert running.wait(300) == 0, run.log_of(running)
    rest = start(run, collect__trajectories=1)
    assert rest.wait(300) == 0, run.log_of(rest)
    book = book_of(run)
    unlabelled, trajectories = book["unlabelled"], book["trajectories"]
    assert isinstance(unlabelled, dict)
    assert isinstance(trajectories, dict)
    assert book["balanced"]
    assert (unlabelled["pending"], trajectories["fillers"]["fill"]["waiting"]) == (0, 0)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=run.directory / "windows") as buffer:
        assert len(buffer) == trajectories["records"] > 2


@pytest.mark.long
def test_a_collector_that_somebody_else_stops_is_started_again_and_the_run_goes_on(run: RealRun) -> None:
    running = start(run, collect__trajectories=0)
    log = run.directory / "runs" / run.name / "logs" / "collect-0.log"
    eventually(lambda: '"ready"' in log.read_text(), 60, "the collector")
    [collector] = [
        child
        for child in psutil.Process(running.pid).children()
        if {"collect", "--ordinal", "0"} <= set(child.cmdline())
    ]
    collector.terminate()
    eventually(lambda: f'"exit_code": {TERMINATED}' in run.log_of(running), 60, "its end")
    eventually(lambda: log.read_text().count('"ready"') == 2, 60, "its second start")
    running.terminate()
    assert running.wait(300) == 0, run.log_of(running)


@pytest.mark.long
def test_a_player_that_is_no_generator_ends_the_run_and_is_named(run: RealRun) -> None:
    running = start(run, collect__player="counting:play_nothing")
    assert running.wait(300) == 1
    assert "collect.player 'counting:play_nothing' returned list; a player is a generator" in run.log_of(running)

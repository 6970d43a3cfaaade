"""Built-in trackers hold each step once, also if they were killed between a step and their note of it."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.trackers.config import TrackerConfig
from rollstream.consumers.trackers.tracker import TrackedRun, TrackedStep, Tracker, open_tracker
from rollstream.topics.errors import ConfigurationError
from tests.support.paths import ROOT

FIGURES = {"reward": 0.25, "optim/lr": 1e-3, "clip_ratio/high_mean": float("nan")}


def step_of(number: int) -> TrackedStep:
    return TrackedStep(
        run="r",
        learner="a",
        step=number,
        policy_version=number,
        timestamp=1.8e9 + number,
        metrics={**FIGURES, "trained/reward": float(number)},
        traces=(),
    )


_killed: list[Tracker] = []
"""Closed when a test is over: until then they are as a command that was killed left them."""


@pytest.fixture(autouse=True)
def _closed_at_last() -> Iterator[None]:
    yield
    while _killed:
        _killed.pop().close()


def write(to: str, directory: Path, newest_step: int, *steps: int) -> Tracker:
    """The tracker of a run with `newest_step` on record, filled with those of the steps that it lacks, and killed."""
    config = TrackerConfig(to=to)
    tracked = TrackedRun(run="r", learner="a", newest_step=newest_step, directory=directory, config=config)
    tracker = open_tracker(tracked)
    _killed.append(tracker)
    for step in steps:
        if step > tracker.last:
            tracker.write(step_of(step))
    return tracker


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "r" / "a.jsonl").read_text().splitlines()]


def test_json_lines_hold_each_step_once_under_its_names(tmp_path: Path) -> None:
    write("jsonl", tmp_path, -1, 0, 1, 2, 3)
    write("jsonl", tmp_path, 3, 2, 3, 4)

    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[2] == {
        "run": "r",
        "learner": "a",
        "step": 2,
        "policy_version": 2,
        "timestamp": 1.8e9 + 2,
        "reward": 0.25,
        "optim/lr": 1e-3,
        "clip_ratio/high_mean": None,
        "trained/reward": 2.0,
    }


@pytest.mark.parametrize("left", [b'{"run": "r", "step": 2, "rew', b'{"run": "r", "st\xc3', b"{"])
def test_half_a_line_is_cut_off_and_written_again(tmp_path: Path, left: bytes) -> None:
    write("jsonl", tmp_path, -1, 0, 1)
    with (tmp_path / "r" / "a.jsonl").open("ab") as file:
        file.write(left)
    write("jsonl", tmp_path, 2, 1, 2, 3)
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]


def test_what_an_earlier_run_of_the_name_left_is_put_aside(tmp_path: Path) -> None:
    for to, directory in (("jsonl", tmp_path), ("tensorboard", tmp_path / "tb")):
        write(to, directory, 2, 0, 1, 2)
        write(to, directory, 1, 1)
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    assert len((tmp_path / "r" / "a.jsonl.1").read_text().splitlines()) == 3
    assert [step for name, step, _ in scalars(tmp_path / "tb" / "r" / "a") if name == "reward"] == [1]


def scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Scalars that TensorBoard shows for a directory, in order, without those that a later start purged."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            string = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if string.session_log.status == SessionLog.START:
                shown = [item for item in shown if item[1] < string.step]
            shown += [(value.tag, string.step, value.simple_value) for value in string.summary.value]
    return shown


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    directory = tmp_path / "r" / "a"
    write("tensorboard", tmp_path, 2, 0, 1, 2)
    # As a kill between an event and its note leaves it: step 2 is written, but not noted.
    (directory / "rollstream.json").write_text('{"last": 1}')
    write("tensorboard", tmp_path, 3, 1, 2, 3)

    series = scalars(directory)
    assert [(step, value) for name, step, value in series if name == "trained/reward"] == [(n, n) for n in range(4)]
    assert {name for name, _, _ in series} == {"reward", "optim/lr", "trained/reward"}, "what is not finite is left out"


def history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Steps and figures in a file of Weights & Biases, whose framing is LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        whole = part if kind in (1, 2) else whole + part
        record = Record.FromString(whole) if kind in (1, 4) else Record()
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            yield record.history.step.num, items


RESUMED = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.consumers.trackers.test_trackers import write
write("wandb", Path({directory!r}), {newest}, *{steps}).close()
"""


@pytest.mark.long
def test_weights_and_biases_keeps_one_run_with_each_step_once_offline(tmp_path: Path) -> None:
    root = str(ROOT)
    for newest, steps in ((2, (0, 1, 2)), (3, (1, 2, 3))):
        code = RESUMED.format(root=root, directory=str(tmp_path), newest=newest, steps=steps)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2
    assert len({path.name for path in files}) == 1, "one id, so that the service joins them"
    items = [item for path in files for item in history(path)]
    assert [step for step, _ in items] == [0, 1, 2, 3]
    assert items[3][1]["trained/reward"] == "3"
    assert items[3][1]["optim/lr"] == "0.001"


@pytest.mark.parametrize(
    ("to", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"{package}.*pip install 'rollstream\[sinks\]'"):
        write(to, tmp_path / "files", -1)
    assert not list(tmp_path.rglob("*.json*"))

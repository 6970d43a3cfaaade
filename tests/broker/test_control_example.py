"""The example of a control task on a real broker: what is played is labeled, learned from and played better."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import TrajectoryFiller
from rollstream.consumers.labeling.positions import SOURCE
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.trajectory_arrays import aligned, from_record
from tests.support.paths import ROOT

pytestmark = pytest.mark.long
EXAMPLE = ROOT / "examples" / "control"
Played = Callable[..., tuple[KafkaConfig, dict[str, Any], Path]]


@pytest.fixture(scope="module")
def play(broker: str, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Runs the example once for each set of flags; returns its Kafka settings, its report and its data directory."""

    @cache
    def run(*flags: str) -> tuple[KafkaConfig, dict[str, Any], Path]:
        data = tmp_path_factory.mktemp("control")
        result = subprocess.run(
            [sys.executable, EXAMPLE / "run.py", "--json", "--data", data, *flags],
            env={**os.environ, "KAFKA_BOOTSTRAP_SERVERS": broker, "JAX_COMPILATION_CACHE_DIR": str(compiled)},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        report = json.loads(result.stdout)
        return KafkaConfig(bootstrap_servers=broker), report, data / report["run"]

    return run


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import reach  # type: ignore[import-not-found]

    return reach  # type: ignore[no-any-return]


def test_the_return_rises(play: Played) -> None:
    _kafka, report, _data = play("--seed", "0")
    # Random walks lose more than 0.5 on average, and the best moves win more than 1.
    assert report["first_return"] < 0 < 0.5 < report["last_return"]
    assert report["first_greedy_return"] < 0 < 0.5 < report["last_greedy_return"]
    assert report["refused"] == 0
    assert report["versions"] == 13


def test_the_return_rises_on_images(play: Played) -> None:
    _kafka, report, _data = play("--seed", "0", "--image")
    assert report["first_return"] < 0 < 0.5 < report["last_return"]
    assert report["windows"]["stored_bytes"] > 10_000_000, "it saw the images"


def test_rewards_are_the_environments_or_the_labelers_and_are_the_same(play: Played, reach: ModuleType) -> None:
    kafka, report, _data = play("--seed", "0")
    labeled: dict[str, set[bool]] = {}
    versions: set[int] = set()
    modes = set()
    for message in read_to_end(kafka, topic_name(report["run"], "trajectories")):
        trajectory = from_record(decode(message.value))
        arrays = trajectory.arrays
        headers = {name for name, _value in message.headers}
        labeled.setdefault(trajectory.metadata.worker_id, set()).add(SOURCE in headers)
        np.testing.assert_array_equal(arrays["rewards"], reach.judge(trajectory).arrays["rewards"])
        terminated = aligned(arrays["terminations"], len(arrays["rewards"]))
        np.testing.assert_array_equal(terminated, arrays["rewards"] > 0.9)
        versions |= {int(version) for version in np.unique(arrays["versions"])}
        for span in trajectory.episodes:
            human = arrays["intervene_flags"][span.start : span.stop, span.column]
            assert (human == (span.control_mode == 1)).all()
            modes.add(span.control_mode)
    assert labeled == {"collect-0": {False}, "collect-1": {True}}
    assert modes == {0, 1}
    assert versions == {-1, *read_manifests(kafka, report["run"])}, "every version that was published was played"


def test_its_buffers_open_again_where_they_were_and_take_in_the_rest(play: Played) -> None:
    kafka, report, data = play("--seed", "0")
    ends = {p: end for p, (_begin, end) in topic_admin.bounds(kafka, topic_name(report["run"], "trajectories")).items()}
    windows = TrajectoryReplayBuffer(auto_save=True, auto_save_path=data / "windows")
    options = {"capacity": 100_000, "slice_len": 4, "strict_length": False, "pad_output": True}
    with windows, HilEpisodeBuffer(data / "slices", **options) as slices:
        assert len(windows) == report["windows"]["num_trajectories"]
        assert slices.size() == report["slices"]["size"]
        before = dict(windows.position)
        assert slices.position == before, "one filler filled both"
        filler = TrajectoryFiller(kafka, report["run"], [windows, slices], identity_file=data / "topic.json")
        filler.fill(300)
        filler.close()
        added = sum(1 for m in read_to_end(kafka, topic_name(report["run"], "trajectories"), start=before))
        assert filler.counts == (added, 0)
        assert len(windows) == report["windows"]["num_trajectories"] + added
        assert slices.position == windows.position
        assert all(offset <= ends[partition] for partition, offset in windows.position.items())

"""A rollout buffer saved to disk and restored, its counts of added, refused and retired rollouts, and its use by
several threads at once."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.rollouts.buffer import (
    RolloutReplayBuffer,
    RolloutWithCount,
)
from rollstream.consumers.buffers.rollouts.snapshot_file import FILE
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import (
    same,
)
from tests.support.batches import random_batch
from tests.support.paths import ROOT
from tests.support.rollout_buffers import NOW, buffer, group, uids
from tests.support.waiting import eventually


def filled(seed: int = 3) -> RolloutReplayBuffer:
    replay = buffer(seed=seed, max_samples=3)
    replay.set_current_step(5)
    for number, environment in enumerate("xyx"):
        replay.add(group(f"g{number}-", [float(i) for i in range(6)], environment=environment, step=5))
    replay.add_training_batch(random_batch(0))  # advantages by position
    return replay


def test_a_restored_buffer_gives_the_samples_the_saved_one_gives(tmp_path: Path) -> None:
    replay = filled()
    replay.sample()
    replay.save(tmp_path / "deep" / "er")
    restored = buffer(seed=99, max_samples=3)
    restored.load(tmp_path / "deep" / "er")
    assert restored.stats() == replay.stats()
    for _ in range(6):
        one, other = replay.sample(), restored.sample()
        assert uids(one) == uids(other)
        for a, b in zip(one or (), other or (), strict=True):
            assert (a.usage_count, a.weight_step) == (b.usage_count, b.weight_step)
            assert np.array_equal(a.advantage, b.advantage)
            assert same(a.rollout, b.rollout)


def test_a_missing_or_damaged_file_leaves_the_buffer_unchanged(tmp_path: Path) -> None:
    replay = filled()
    with pytest.raises(StoreError, match="nothing was saved there"):
        replay.load(tmp_path)
    replay.save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for spoilt in (whole[: len(whole) // 2], b"", b"not arrow" * 100):
        (tmp_path / FILE).write_bytes(spoilt)
        with pytest.raises(StoreError, match="is not a valid rollout buffer"):
            replay.load(tmp_path)
    assert replay.size() == filled().size()


def test_a_flipped_bit_is_a_store_error_that_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    replay = buffer(seed=4)
    replay.add(group("a", [1.0, 0.0, 0.5]))
    replay.save(tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    drawn = np.random.default_rng(5).integers(0, 8 * len(whole), 600).tolist()
    for bit in {*drawn, *range(8 * len(whole) - 8 * 56, 8 * len(whole), 3)}:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(StoreError, match=rf"{FILE} is not a valid rollout buffer .*restore it .*or fill"):
            replay.load(tmp_path)


def test_a_rollout_used_more_often_than_it_may_be_is_retired(tmp_path: Path) -> None:
    replay = buffer(local_batch_size=2, max_samples=-1)
    replay.add(group("a", [1.0, 0.0]))
    for _ in range(5):
        replay.sample()
    replay.add(group("b", [1.0, 0.0]))
    replay.save(tmp_path)
    stricter = buffer(local_batch_size=1, max_samples=2)
    stricter.load(tmp_path)
    assert stricter.stats()["left_out"] == {"used_up": 2}
    drawn = [uid for _ in range(4) for uid in uids(stricter.sample())]
    assert sorted(drawn) == ["b0", "b0", "b1", "b1"]
    assert stricter.sample() is None


def test_a_batch_counts_as_added_if_one_of_its_rollouts_is_fresh() -> None:
    replay = buffer(capacity=2, drop_zero_variance=True, max_rollout_step_delay=1)
    replay.set_current_step(5)
    replay.add_batches([[group("without variance", [1.0, 1.0], step=5)]])
    replay.add_batches([[group("a", [1.0, 0.0], step=5)], [group("stale", [1.0, 0.0], step=3)]])
    replay.add_batches([[group("half", [1.0], step=3) + group("of it", [0.0], step=4)], []])
    assert replay.stats()["total_batches_added"] == 3


def test_rollouts_that_are_refused_or_leave_are_counted_by_reason_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    replay = buffer(capacity=2, drop_zero_variance=True, max_rollout_timestamp_delay=100.0)
    replay.set_current_step(5)
    replay.add(group("kept", [1.0, 0.0], step=5))
    replay.add_batches([[group("old step", [1.0, 0.0], step=3), group("too old", [1.0, 0.0], step=5, at=NOW - 100)]])
    replay.add(group("no variance", [1.0, 1.0], step=5))
    replay.add(group("fills", [1.0, 0.0], step=5))
    with pytest.raises(RecordError):
        replay.add(group("unsound", [float("nan")]))
    with pytest.raises(RecordError):
        replay.add_batches([[group("equal", [1.0, 1.0]), group("unsound", [float("inf"), 0.0, 1.0])]])
    replay.set_current_step(7)
    left_out = replay.stats()["left_out"]
    assert left_out == {"old_step": 4, "too_old": 2, "zero_variance": 2, "capacity": 2, "unsound": 6}
    logged = [record for record in caplog.records if record.message == "rollouts_left_out"]
    assert len(logged) == 6
    assert replay.size() == 0


def test_a_failed_save_names_its_cause_and_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = filled()
    replay.save(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    replay.sample()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left on device"):
        replay.save(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert os.listdir(tmp_path) == [FILE]


SAVER = """
import sys
from pathlib import Path
from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.consumers.grouping.testing import example_rollout
of = RolloutReplayBuffer(local_batch_size=4, max_samples=-1, max_rollout_timestamp_delay=-1.0)
for number in range(10**9):
    of.add([example_rollout(f"{number}-{i}", float(i)) for i in range(4)])
    of.sample()
    of.save(Path(sys.argv[1]))
"""


def test_a_buffer_killed_during_a_save_opens_again_whole(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-P", "-c", SAVER, str(tmp_path)], env=environment)
    for _ in range(4):
        seen = (tmp_path / FILE).stat().st_mtime_ns if (tmp_path / FILE).exists() else 0
        eventually(lambda s=seen: (tmp_path / FILE).exists() and (tmp_path / FILE).stat().st_mtime_ns > s, 60, "a save")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    replay_buffer = RolloutReplayBuffer(local_batch_size=4, max_samples=-1, max_rollout_timestamp_delay=-1.0)
    replay_buffer.load(tmp_path)
    saves = replay_buffer.stats()["total_batches_sampled"]
    assert saves >= 4
    assert replay_buffer.size() == 4 * saves
    again = RolloutReplayBuffer(local_batch_size=4, max_samples=-1, max_rollout_timestamp_delay=-1.0)
    for number in range(saves):
        again.add([example_rollout(f"{number}-{i}", float(i)) for i in range(4)])
        again.sample()
    assert uids(again.sample()) == uids(replay_buffer.sample())


def test_adding_drawing_and_saving_at_once_tears_nothing(tmp_path: Path) -> None:
    """Every group is added whole, no rollout is drawn too often, and every saved file is a whole buffer."""
    replay = buffer(local_batch_size=8, max_samples=2, capacity=100_000)
    adders, groups, failed = 3, 60, []
    drawn: list[list[RolloutWithCount]] = []
    adding = threading.Barrier(adders + 3)
    done = threading.Event()

    def add(worker: int) -> None:
        adding.wait()
        for number in range(groups):
            name = f"{worker}-{number}-"
            replay.add_batches([[group(name, [float(i) for i in range(5)], environment=f"e{number % 3}")]])

    def draw() -> None:
        adding.wait()
        while not done.is_set():
            if sample := replay.sample():
                drawn.append(sample)

    def save() -> None:
        adding.wait()
        while not done.is_set():
            replay.save(tmp_path)
            other = buffer(capacity=100_000, max_samples=2)
            other.load(tmp_path)
            assert other.stats()["total_size"] == other.size()

    def watched(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)
            done.set()

    threads = [threading.Thread(target=watched, args=(add, i)) for i in range(adders)]
    others = [threading.Thread(target=watched, args=(work,)) for work in (draw, draw, save)]
    for thread in (*threads, *others):
        thread.start()
    for thread in threads:
        thread.join(300)
    done.set()
    for thread in others:
        thread.join(300)
    assert not failed
    while sample := replay.sample():
        drawn.append(sample)
    while sample := replay.sample(1):
        drawn.append(sample)
    for sample in drawn:
        assert len({item.rollout.uid for item in sample}) == len(sample)
    counts: dict[str, list[int]] = {}
    for item in (item for sample in drawn for item in sample):
        counts.setdefault(item.rollout.uid, []).append(item.usage_count)
        assert float(item.advantage) == pytest.approx(item.rollout.reward - (10 - item.rollout.reward) / 4)
    assert len(counts) == adders * groups * 5
    assert {tuple(sorted(actual)) for actual in counts.values()} == {(1, 2)}
    assert replay.stats()["total_batches_added"] == adders * groups

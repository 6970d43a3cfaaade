"""A trajectory buffer when disk or memory runs out, and when many threads use it at once."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.buffers.trajectories.buffer import NotYetOnDisk, TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.dataset import MixedDataset
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.atomic_files import StoreError
from tests.support.paths import ROOT
from tests.support.trajectory_batches import trajectory, untorn
from tests.support.trajectory_buffers import both, buffer, files
from tests.support.waiting import eventually


def test_a_read_does_not_refresh_and_each_trajectory_is_fetched_once(tmp_path: Path) -> None:
    from rollstream.consumers.buffers.storage.seeded_draws import generator_at
    from rollstream.consumers.buffers.trajectories.index import TrajectoryEntry
    from rollstream.consumers.buffers.trajectories.rows import FetchedArrays, check_trajectory
    from rollstream.consumers.buffers.trajectories.shelf import TrajectoryShelf

    request: list[int] = []

    def fetch(entry: TrajectoryEntry) -> FetchedArrays:
        request.append(entry.trajectory_id)
        part = check_trajectory(trajectory(entry.trajectory_id))
        assert part is not None
        return FetchedArrays(part.arrays, mapped=False)

    shelf = TrajectoryShelf(2, fetch)
    for number in range(5):
        part = check_trajectory(trajectory(number))
        assert part is not None
        shelf.put(part, "npz")
    for draw in range(3):
        shelf.draw(0, 40, generator_at(0, draw))
    assert sorted(request) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@both
def test_bytes_are_bounded_too(tmp_path: Path, auto_save: bool) -> None:
    size = sum(a.nbytes for a in [*list(trajectory(0).arrays.values())[:3], trajectory(0).arrays["curr_obs"]["state"]])
    with buffer(tmp_path, auto_save, max_bytes=3 * size) as replay:
        replay.add_trajectories([trajectory(n) for n in range(5)])
        assert replay.trajectory_ids == [2, 3, 4]
        assert replay.stats()["stored_bytes"] == 3 * size
        with pytest.raises(RecordError, match="raise max_bytes"):
            replay.add(trajectory(9, steps=20))
        assert replay.trajectory_ids == [2, 3, 4]


def test_a_failed_write_raises_at_the_next_call_and_is_tried_again(tmp_path: Path) -> None:
    replay = buffer(tmp_path, True, max_pending_bytes=1)  # so that an addition waits for earlier writes
    replay.add(trajectory(0))
    replay.flush()
    obstacle = tmp_path / "buffer" / "trajectory_1_w.npz"
    obstacle.mkdir()
    replay.add(trajectory(1), at=(0, 0))
    with pytest.raises(StoreError, match="cannot be written"):
        replay.flush()
    # The new trajectory can be drawn, because it is in memory.
    assert 1 in {row // 1000 for row in untorn(replay.sample(16), 16)}
    with pytest.raises(StoreError, match="cannot be written"):
        replay.add(trajectory(2), at=(0, 1))
    assert (replay.trajectory_ids, replay.position) == ([0, 1], {0: 1})
    obstacle.rmdir()
    eventually(lambda: replay.flush() is None, 60, "an attempt succeeded")
    assert "trajectory_1_w.npz" in files(tmp_path)
    replay.add(trajectory(2), at=(0, 1))
    replay.close()
    with buffer(tmp_path, True) as again:
        assert (again.trajectory_ids, again.position) == ([0, 1, 2], {0: 2})


def test_an_index_on_a_full_disk_has_no_duplicate_and_no_wrong_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that did not reach the disk are written again with the entries that need them."""
    replay = buffer(tmp_path, True)
    replay.add(trajectory(0), at=(0, 0))
    replay.flush()
    written = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        written(descriptor, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    replay.add(trajectory(1, steps=5, weights="new"), at=(0, 1))
    with pytest.raises(StoreError, match="No space left"):
        replay.flush()
    monkeypatch.undo()
    eventually(lambda: replay.flush() is None, 60, "an attempt succeeded")
    replay.add(trajectory(2, steps=5, weights="new"), at=(0, 2))
    replay.close()
    with buffer(tmp_path, True, enable_cache=False) as again:
        assert (again.trajectory_ids, again.position, again.total_samples) == ([0, 1, 2], {0: 3}, 28)
        assert {row // 1000 for row in untorn(again.sample(28), 28)} == {0, 1, 2}


@both
def test_adding_drawing_and_saving_at_once_tears_nothing(tmp_path: Path, auto_save: bool) -> None:
    """Four threads add, two draw, one saves; all arrays of a row name the same step."""
    replay = buffer(tmp_path, auto_save, cache_size=2, sample_window_size=6, max_trajectories=8)
    replay.add(trajectory(0))
    failures: list[BaseException] = []
    adding = threading.Event()

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def draw() -> None:
        while not adding.is_set():
            untorn(replay.sample(8), 8)

    def save() -> None:
        number = 0
        while not adding.is_set():
            replay.save_checkpoint(tmp_path / f"checkpoint-{number % 2}")
            number += 1

    def add(first: int) -> None:
        for number in range(first, first + 40):
            replay.add(trajectory(number, steps=1 + number % 5))

    others = [guarded(draw), guarded(draw), guarded(save)]
    adders = [guarded(lambda first=first: add(first)) for first in (100, 200, 300, 400)]
    for thread in adders:
        thread.join()
    adding.set()
    for thread in others:
        thread.join()
    assert not failures
    replay.close()
    assert replay.trajectory_counter == 161
    loaded = TrajectoryReplayBuffer()
    loaded.load_checkpoint(tmp_path / "checkpoint-0")
    untorn(loaded.sample(4), min(4, loaded.total_samples))


def test_adding_waits_while_too_much_is_pending(tmp_path: Path) -> None:
    with buffer(tmp_path, True, max_pending_bytes=1) as replay:
        for number in range(20):
            replay.add(trajectory(number))
            assert len(files(tmp_path)) >= number, "those before it are on disk"
        assert len(replay) == 20


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Make the system refuse to extend any file of this process beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def copied(tmp_path: Path) -> bool:
    """Copy the buffer's directory; raises an error if a file is removed meanwhile."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    shutil.copytree(tmp_path / "buffer", tmp_path / "copy")
    return True


def test_a_synchronous_add_that_cannot_write_holds_everything_and_says_how_much_is_on_disk(tmp_path: Path) -> None:
    replay = buffer(tmp_path, True, synchronous=True, max_pending_bytes=1)
    some = [trajectory(number, steps=4000 if number == 29 else 4) for number in range(31)]
    with files_of_at_most(100_000):
        with pytest.raises(NotYetOnDisk, match=r"\d+ of the 31 .*trajectory_29_w.npz.*do not add them again") as raised:
            replay.add_trajectories(some)
        assert len(replay) == 31
        with pytest.raises(StoreError, match=r"earlier write failed.*this call added nothing"):
            replay.add(trajectory(31))
        assert replay.trajectory_ids == list(range(31))
        eventually(lambda: copied(tmp_path), 60, "a copy while no attempt is being made")
    replay.flush()
    assert len(files(tmp_path)) == 31
    replay.add(trajectory(31))
    replay.close()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "copy") as killed:
        assert f"{len(killed)} of the 31" in str(raised.value)
    with buffer(tmp_path, True) as again:
        assert again.trajectory_ids == list(range(32))


MEMORY = """
import resource
import numpy as np
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer

def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more if more else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def arrays(number):
    return {"rewards": np.full((80, 8), number, "<f4"), "front": np.full((80, 8, 64, 64, 3), number % 256, "u1")}

buffer = TrajectoryReplayBuffer(sample_window_size=20_000)
limit(2**28)
try:
    while True:
        buffer.add(arrays(len(buffer)))
except MemoryError:
    held = len(buffer)
assert held >= 4, held
batch = buffer.sample(64)
assert (batch["front"][:, 0, 0, 0] == batch["rewards"]).all()
assert set(batch["rewards"]) == set(range(held))
limit(0)
buffer.add(arrays(held))
assert len(buffer) == held + 1 and held in buffer.sample(500)["rewards"]
"""


def test_a_wide_window_allocates_memory_as_it_fills_and_survives_a_trajectory_that_does_not_fit() -> None:
    """A window of 20,000 such trajectories would take 146 GiB; the process may allocate 256 MiB more."""
    subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, check=True)


def test_the_newest_can_be_drawn_after_one_long_trajectory() -> None:
    replay_buffer = TrajectoryReplayBuffer(sample_window_size=50)
    replay_buffer.add_trajectories([trajectory(number) for number in range(50)])
    replay_buffer.add(trajectory(50, steps=4000))
    replay_buffer.add_trajectories([trajectory(number) for number in range(51, 101)])
    assert {row // 1000 for _ in range(20) for row in untorn(replay_buffer.sample(400), 400)} == set(range(51, 101))


@both
def test_is_ready_refuses_more_than_the_buffer_may_hold(tmp_path: Path, auto_save: bool) -> None:
    bound = {"max_trajectories": 5} if auto_save else {"sample_window_size": 5}
    with buffer(tmp_path, auto_save, **bound) as replay:
        assert not replay.is_ready(5)
        with pytest.raises(ConfigurationError, match=r"is_ready\(10\) is never true: .* at most 5 trajectories"):
            replay.is_ready(10)
        with (
            pytest.raises(ConfigurationError, match=r"is_ready\(10\) is never true"),
            MixedDataset(replay, None, batch_size=4, min_replay_buffer_size=10) as dataset,
        ):
            next(iter(dataset))

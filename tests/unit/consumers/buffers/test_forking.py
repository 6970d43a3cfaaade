"""Buffers in a process that forks, as for data loaders: the child reads, and is not a second writer."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.buffers.groups.view import GroupStore
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer, open_episode_buffer
from rollstream.consumers.buffers.storage.journal import Journal
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.index import TrajectoryEntry, TrajectoryIndex
from rollstream.topics.closing import Closing
from rollstream.topics.files.atomic_files import StoreError
from tests.support.trajectory_batches import trajectory


def trajectories(directory: Path) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory, enable_cache=False)


OPENERS: list[Callable[[Path], Closing]] = [
    trajectories,
    lambda directory: EpisodeSliceBuffer(directory, 100, 4),
    lambda directory: HilEpisodeBuffer(directory, 100, 4),
    lambda directory: GroupReplayBuffer(directory, "env"),
    GroupStore,
]


@contextlib.contextmanager
def forked(work: Callable[[], bool]) -> Iterator[Callable[[], None]]:
    """Run a child within the block; the yielded function makes it do its work, which must return True."""
    begin, go_on = os.pipe()
    done, reported = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(300)
        os.close(go_on)
        code = 1
        try:
            while os.read(begin, 1):
                os.write(reported, b"y" if work() else b"n")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def worked() -> None:
        os.write(go_on, b"!")
        assert os.read(done, 1) == b"y"

    os.close(reported)
    try:
        yield worked
    finally:
        os.close(go_on)
        _, status = os.waitpid(child, 0)
        os.close(begin)
        os.close(done)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("opened", OPENERS, ids=["trajectories", "slices", "hil", "groups", "group store"])
def test_a_directory_can_be_opened_again_while_a_forked_child_lives(
    tmp_path: Path, opened: Callable[[Path], Closing]
) -> None:
    buffer = opened(tmp_path / "b")
    with forked(lambda: True) as alive:
        alive()
        with pytest.raises(StoreError, match="is being written by another buffer"):
            opened(tmp_path / "b")
        buffer.close()
        with opened(tmp_path / "b"):
            alive()


def test_a_forked_child_draws_and_never_writes_where_its_parent_did(tmp_path: Path) -> None:
    """A child that wrote would continue from the index at the time of the fork."""
    buffer = trajectories(tmp_path / "b")
    buffer.add(trajectory(0))
    buffer.flush()

    def draws_and_is_refused() -> bool:
        for write in (lambda: buffer.add(trajectory(9)), buffer.flush, buffer.clear, lambda: buffer.skip((0, 5))):
            with pytest.raises(StoreError, match="by the process that opened it; open another buffer"):
                write()
        return len(buffer.sample(8)["rewards"]) == 8

    with forked(draws_and_is_refused) as child_works:
        child_works()
        buffer.add_trajectories([trajectory(1), trajectory(2)])
        buffer.close()
        child_works()
        with trajectories(tmp_path / "b") as again:
            child_works()
            again.add(trajectory(3))
    with trajectories(tmp_path / "b") as again:
        assert again.trajectory_ids == [0, 1, 2, 3]
        assert len(list((tmp_path / "b").glob("*.npz"))) == 4


def test_a_forked_child_says_that_its_parent_has_removed_what_it_draws(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path / "b", enable_cache=False, max_trajectories=1, synchronous=True
    )
    buffer.add(trajectory(0))

    def is_refused() -> bool:
        with pytest.raises(StoreError, match=r"is gone; the process from which this one was forked.*fork again"):
            buffer.sample(8)
        return True

    with forked(is_refused) as child_works:
        buffer.add(trajectory(1))
        child_works()
    [path] = (tmp_path / "b").glob("*.npz")
    path.unlink()
    with pytest.raises(StoreError, match="is gone; restore it"):
        buffer.sample(8)
    buffer.close()


@pytest.mark.parametrize("hil", [False, True], ids=["slices", "hil"])
def test_a_child_forked_from_the_writer_of_slices_follows_it_and_does_not_write(tmp_path: Path, hil: bool) -> None:
    """Steps that the parent has overwritten since, or replaced, are never drawn."""
    directory = tmp_path / "b"
    buffer = open_episode_buffer(directory, use_hil_buffer=hil, capacity=40, slice_len=4)

    def add(number: int) -> None:
        for mode in (0, 1):
            steps = np.full(8, number)
            buffer.add({"number": steps, "control_mode": np.full(8, mode), "done": np.arange(8) == 7})

    add(0)
    numbers, drawn = os.pipe()

    def draws() -> bool:
        os.write(drawn, bytes(sorted(set(buffer.sample(200)["number"].ravel().tolist()))) + b"\xff")
        return True

    def is_refused() -> bool:
        for write in (lambda: add(9), buffer.flush, lambda: buffer.skip((0, 5))):
            with pytest.raises(StoreError, match="by the process from which this one was forked; add there"):
                write()
        buffer.save(tmp_path / "copy")
        return True

    steps = iter([is_refused, draws, draws, draws, lambda: buffer.close() is None])
    with forked(lambda: next(steps)()) as child_works:
        child_works()
        child_works()
        assert os.read(numbers, 99) == b"\0\xff"
        for number in range(1, 20):
            add(number)
        child_works()
        assert os.read(numbers, 99) == bytes(range(15 if hil else 17, 20)) + b"\xff"
        with open_episode_buffer(tmp_path / "other", use_hil_buffer=hil, capacity=40, slice_len=4) as other:
            buffer, writer = other, buffer
            add(42)
            buffer = writer
        buffer.load(tmp_path / "other")
        child_works()
        assert os.read(numbers, 99) == b"\x2a\xff"
        child_works()
        add(43)
    buffer.close()


@pytest.mark.parametrize("hil", [False, True], ids=["slices", "hil"])
def test_a_child_forked_while_another_thread_adds_slices_can_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hil: bool
) -> None:
    buffer = open_episode_buffer(tmp_path / "b", use_hil_buffer=hil, capacity=40, slice_len=4)
    tree = {"control_mode": np.repeat([0, 1], 4), "done": np.arange(8) % 4 == 3}
    buffer.add(tree)
    adding, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)
    append = Journal.append

    def slow_append(journal: Journal, record: Any, **options: Any) -> None:
        adding.set()
        assert forking.wait(60)
        append(journal, record, **options)

    monkeypatch.setattr(Journal, "append", slow_append)
    thread = threading.Thread(target=buffer.add, args=(tree,))
    thread.start()
    assert adding.wait(60)
    with forked(lambda: buffer.size() == 16 and len(buffer.sample(8)["done"]) == 8) as child_works:
        child_works()
        thread.join()
    buffer.close()


@pytest.mark.parametrize("auto_save", [False, True], ids=["in memory", "on disk"])
def test_a_child_forked_while_another_thread_adds_can_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auto_save: bool
) -> None:
    """The adding thread stops in the middle, and goes on once the fork has begun."""
    buffer = TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=tmp_path / "b" if auto_save else "")
    buffer.add(trajectory(0))
    adding, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)
    append = TrajectoryIndex.append

    def slow_append(index: TrajectoryIndex, *fields: Any) -> TrajectoryEntry:
        adding.set()
        assert forking.wait(60)
        return append(index, *fields)

    monkeypatch.setattr(TrajectoryIndex, "append", slow_append)
    thread = threading.Thread(target=buffer.add, args=(trajectory(1),))
    thread.start()
    assert adding.wait(60)
    with forked(lambda: buffer.trajectory_ids == [0, 1] and len(buffer.sample(8)["rewards"]) == 8) as child_works:
        child_works()
        thread.join()
        child_works()
    assert buffer.trajectory_ids == [0, 1]
    buffer.close()

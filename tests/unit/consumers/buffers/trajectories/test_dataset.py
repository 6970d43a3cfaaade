"""Batches of replayed steps and demonstrations."""

import threading
from itertools import islice
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.dataset import MixedDataset, join_batches
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, RecordError
from tests.support.trajectory_batches import trajectory, untorn
from tests.support.waiting import eventually

either = pytest.mark.parametrize("prefetch_size", [0, 3])


def buffer(*numbers: int) -> TrajectoryReplayBuffer:
    replay_buffer = TrajectoryReplayBuffer()
    replay_buffer.add_trajectories([trajectory(n) for n in numbers])
    return replay_buffer


@either
def test_half_of_a_batch_is_replayed_and_half_are_demonstrations(prefetch_size: int) -> None:
    with MixedDataset(buffer(1), buffer(2), batch_size=7, prefetch_size=prefetch_size) as dataset:
        for batch in islice(dataset, 5):
            assert [row // 1000 for row in untorn(batch, 6)] == [1, 1, 1, 2, 2, 2]


@either
def test_without_demonstrations_all_of_it_is_replayed(prefetch_size: int) -> None:
    with MixedDataset(buffer(1), batch_size=5, prefetch_size=prefetch_size) as dataset:
        assert {row // 1000 for row in untorn(next(iter(dataset)), 5)} == {1}


@either
def test_the_same_buffers_give_the_same_batches_drawn_ahead_or_not(prefetch_size: int) -> None:
    with MixedDataset(buffer(1), buffer(2), batch_size=6, prefetch_size=prefetch_size) as dataset:
        actual = [untorn(batch, 6) for batch in islice(dataset, 4)]
    plain = buffer(1), buffer(2)
    assert actual == [[*untorn(plain[0].sample(3), 3), *untorn(plain[1].sample(3), 3)] for _ in range(4)]


@either
def test_it_waits_until_both_hold_enough(prefetch_size: int) -> None:
    replay, demo = buffer(1), buffer()
    dataset = MixedDataset(
        replay, demo, batch_size=4, min_replay_buffer_size=2, min_demo_buffer_size=1, prefetch_size=prefetch_size
    )
    collected: list[Any] = []
    thread = threading.Thread(target=lambda: collected.append(next(iter(dataset))))
    thread.start()
    demo.add(trajectory(2))
    assert not collected
    replay.add(trajectory(3))
    thread.join(300)
    assert len(untorn(collected[0], 4)) == 4
    dataset.close()


@either
def test_waiting_ends_at_the_deadline(prefetch_size: int) -> None:
    with (
        MixedDataset(buffer(), batch_size=4, prefetch_size=prefetch_size, ready_timeout_s=0.05) as dataset,
        pytest.raises(DeadlineExceeded, match="1 replayed trajectories"),
    ):
        next(iter(dataset))


@either
def test_a_failure_is_raised_when_the_next_batch_is_requested(prefetch_size: int) -> None:
    other = TrajectoryReplayBuffer()
    bare = trajectory(2)
    del bare.arrays["dones"]
    bare.arrays["curr_obs"]["image"] = np.zeros((4, 2, 5), "u1")
    other.add(bare)
    with (
        MixedDataset(buffer(1), other, batch_size=4, prefetch_size=prefetch_size) as dataset,
        pytest.raises(RecordError, match="only one of the two buffers has dones"),
    ):
        next(iter(dataset))


def test_no_more_than_prefetch_size_is_drawn_ahead_and_the_thread_ends() -> None:
    replay = buffer(1)
    dataset = MixedDataset(replay, batch_size=4, prefetch_size=2)
    next(iter(dataset))
    # One was taken, two wait, and the thread holds one that it waits to enqueue.
    eventually(lambda: replay.stats()["draws"] == 4, 60, "as many were drawn as there is room for")
    dataset.close()
    assert replay.stats()["draws"] == 4
    assert "trajectory-prefetch" not in {thread.name for thread in threading.enumerate()}
    assert list(dataset) == []


def test_arrays_that_differ_are_named() -> None:
    for theirs, text in (
        ({"a": {"b": np.zeros((2, 3))}}, "a/b is float32"),
        ({"a": {"c": np.zeros((2, 3), "<f4")}}, "has a/b, a/c"),
        ({"a": np.zeros((2, 3), "<f4")}, "a is an array in one"),
        ({"a": {"b": np.zeros((2, 4), "<f4")}}, "a/b is float32"),
    ):
        with pytest.raises(RecordError, match=text):
            join_batches({"a": {"b": np.zeros((1, 3), "<f4")}}, theirs)


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"batch_size": 2, "prefetch_size": -1}])
def test_invalid_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        MixedDataset(buffer(1), buffer(2), **settings)

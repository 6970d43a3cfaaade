"""A writer of trajectories is killed while it writes: acknowledged trajectories survive, others are added again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.formats import format_named
from tests.support.paths import ROOT
from tests.support.trajectory_batches import same, trajectory, untorn

WRITER = """
import sys
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from tests.support.trajectory_batches import trajectory
from rollstream.consumers.buffers.storage import journal
journal.LEAST_BYTES = 1000
of = TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[1], max_trajectories=12, cache_size=2)
position = of.position.get(0, 0)
for offset in range(position, position + 10_000):
    of.add(trajectory(offset, steps=1 + offset % 4), at=(0, offset))
    if offset % 5 == 0:
        of.flush()
        print(offset, flush=True)
"""


def killed_after(directory: Path, acknowledgements: int) -> int:
    """Run a writer, kill it after a number of acknowledgements, and return the last acknowledged offset."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            for _ in range(acknowledgements):
                line = child.stdout.readline()
            child.kill()
            for more in child.stdout:
                line = more
        finally:
            child.kill()
    assert line, "the writer said nothing"
    return int(line)


def whole(directory: Path, acknowledged: int) -> int:
    """Check the directory of a killed writer, and return its position."""
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=directory, max_trajectories=12, sample_window_size=0, enable_cache=False
    ) as buffer:
        position = buffer.position[0]
        assert position > acknowledged
        assert buffer.trajectory_counter == position
        assert buffer.trajectory_ids == list(range(max(0, position - 12), position))
        assert len(list(directory.glob("trajectory_*_*.npz"))) == len(buffer)
        assert not list(directory.glob("*.unfinished"))
        count = min(10, buffer.total_samples)
        assert {row // 1000 for _ in range(60) for row in untorn(buffer.sample(count), count)} == set(
            buffer.trajectory_ids
        )
        for number in buffer.trajectory_ids:
            [path] = directory.glob(f"trajectory_{number}_*.npz")
            same(format_named("npz").read(path), trajectory(number, steps=1 + number % 4))
        return position


@pytest.mark.parametrize("moments", [(1, 3), pytest.param(tuple(range(2, 14)), marks=pytest.mark.long)], ids=len)
def test_a_killed_writer_loses_nothing_it_acknowledged_and_continues_as_if_never_killed(
    tmp_path: Path, moments: tuple[int, ...]
) -> None:
    directory = tmp_path / "killed"
    for acknowledgements in moments:
        position = whole(directory, killed_after(directory, acknowledgements))
    # After more additions from that position on, the buffer equals one that was never killed.
    plain = TrajectoryReplayBuffer(sample_window_size=12)
    for offset in range(position + 3):
        plain.add(trajectory(offset, steps=1 + offset % 4), at=(0, offset))
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=directory, max_trajectories=12, sample_window_size=12
    ) as buffer:
        for offset in range(max(0, position - 4), position + 3):
            buffer.add(trajectory(offset, steps=1 + offset % 4), at=(0, offset))
        assert (buffer.trajectory_ids, buffer.position) == (plain.trajectory_ids, plain.position)
        for _ in range(buffer.stats()["draws"]):
            plain.sample(1)
        np.testing.assert_array_equal(untorn(buffer.sample(20), 20), untorn(plain.sample(20), 20))

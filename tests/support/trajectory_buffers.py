"""Trajectory buffers for tests, in memory and on disk, and the files of those on disk."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer


def buffer(tmp_path: Path, auto_save: bool, **settings: Any) -> TrajectoryReplayBuffer:
    path = tmp_path / "buffer" if auto_save else ""
    return TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=path, **settings)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "buffer").glob("trajectory_*_*.*"))


both = pytest.mark.parametrize("auto_save", [False, True], ids=["in memory", "on disk"])

"""Slice buffers in directories, for tests: the record at each offset is known, and so is all that a buffer holds."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.state import SliceState
from rollstream.consumers.buffers.slices.store import SliceStore
from tests.support.paths import ROOT

CAPACITY = 3000


def child_of(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ring(directory: str | Path, **options: Any) -> EpisodeSliceBuffer:
    return EpisodeSliceBuffer(directory, CAPACITY, 10, seed=3, **options)


def tree_of(offset: int) -> dict[str, Any]:
    steps = 5 + offset % 13
    return {
        "offset": np.full(steps, offset),
        "image": np.full((steps, 8, 8, 3), offset % 251, np.uint8),
        "step": np.arange(steps),
    }


def feed(buffer: EpisodeSliceBuffer, offset: int) -> bool:
    """The record at an offset: the next part of four writers' episodes, with parts of different lengths."""
    writer, part = offset % 4, offset // 4
    return buffer.add(tree_of(offset), at=(0, offset), episode=f"{writer}-{part // 3}", last=part % 3 == 2)


def stored(directory: Path) -> SliceState:
    """State of the ring in a directory, as a reader finds it while the writer is at work."""
    with closing(SliceStore(directory, None, read_only=True)) as store:
        return store.state


def journal_of(directory: Path) -> Path:
    """The one journal in a directory."""
    [journal] = directory.glob("*.journal")
    return journal


def content(buffer: EpisodeSliceBuffer, directory: Path) -> dict[str, Any]:
    """The whole observable state of a buffer and its directory; draws a sample."""
    drawn = buffer.sample(30)
    assert (drawn["image"] == (drawn["offset"] % 251)[..., None, None, None]).all()
    episodes = 1000 * (drawn["offset"] % 4) + drawn["offset"] // 12
    assert (episodes == episodes[:, :1]).all()
    assert ((np.diff(drawn["step"]) == 1) | (np.diff(drawn["offset"]) == 4)).all()
    [side] = stored(directory).sides
    return {
        "columns": {name: column.tolist() for name, column in side.index.columns().items()},
        "open": dict(side.open),
        "position": buffer.position,
        "head": side.head,
        "drawn": drawn["offset"].tolist(),
    }


def left_by_kill(directory: Path) -> Path:
    """Copy a directory that its writer has open: a kill of the writer at this moment leaves the same files."""
    return Path(shutil.copytree(directory, directory.with_name(f"{directory.name}-left")))


def never_killed(directory: Path, position: int) -> dict[str, Any]:
    """Content of a buffer that was filled to a position in one go."""
    with ring(directory) as buffer:
        for offset in range(position):
            feed(buffer, offset)
        return content(buffer, directory)

"""A trajectory buffer saved over a checkpoint that has the same ids and uids."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories.checkpoint import read_checkpoint
from rollstream.consumers.buffers.trajectories.formats import format_named
from rollstream.topics.wire.trajectory_arrays import Trajectory
from tests.support.trajectory_batches import trajectory
from tests.support.trajectory_buffers import both, buffer


def stored(directory: Path) -> list[Trajectory]:
    """Every trajectory of a checkpoint, read from its file."""
    actual = read_checkpoint(directory, format_named)
    return [format_named("npz").read(actual.path(actual.content[place])) for place in range(len(actual.content))]


def refuse_link(source: Path, target: Path) -> None:
    """As on a file system without links."""
    raise OSError("no links here")


@both
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_trajectories_that_were_labelled_again_replace_those_of_the_same_uids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auto_save: bool, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    saved = tmp_path / "saved"
    for label in (0.5, 1.5):
        demonstrations = [trajectory(n) for n in range(2)]
        relabelled = {**demonstrations[1].arrays, "rewards": np.full((4, 2), label, "<f4")}
        with buffer(tmp_path / str(label), auto_save) as replay:
            replay.add_trajectories([demonstrations[0], replace(demonstrations[1], arrays=relabelled)])
            replay.save(saved)
            assert stored(saved)[1].arrays["rewards"].tolist() == [[label] * 2] * 4
            files = {path: path.stat().st_ino for path in saved.glob("**/*.npz")}
            replay.add(trajectory(2))
            replay.save(saved)
        if label == 0.5:
            now = {path: path.stat().st_ino for path in saved.glob("**/*.npz")}
            assert now.items() > files.items(), "the files that were there stay"
    with buffer(tmp_path, False) as other:
        other.add_trajectories([replace(trajectory(n), extra={"note": "other"}) for n in range(2)])
        other.save(saved)
    assert [dict(actual.extra) for actual in stored(saved)] == [{"note": "other"}] * 2
    assert len(list(saved.glob("**/*.npz"))) == 2

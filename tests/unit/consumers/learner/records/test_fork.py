"""A checkpoint is copied whole or not at all, without the steps of the other learner."""

import json
import shutil
from pathlib import Path

import pytest

from rollstream.consumers.learner.checkpoint_paths import checkpoint_steps
from rollstream.consumers.learner.config import CheckpointConfig
from rollstream.consumers.learner.records.fork import copy_checkpoint
from rollstream.topics.errors import ConfigurationError, StateRefused


def checkpoint(directory: Path, step: int) -> None:
    """Write the part of a checkpoint that matters here, as orbax lays it out."""
    for name, content in (
        ("meta/metadata", {"position": 10 * step, "oldest": -1, "recent_steps": ["x"]}),
        ("state/a", step),
    ):
        path = directory / str(step) / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "a" / "main"
    for step in (3, 12):
        checkpoint(directory, step)
    (directory.parent / "main.reference").mkdir()
    (directory.parent / "main.reference" / "a").write_text("0")
    # A save in progress, and a save without its end.
    (directory / "15.orbax-checkpoint-tmp-7").mkdir()
    (directory / "9").mkdir()
    return directory


def test_a_checkpoint_is_copied_without_its_steps(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "runs" / "b" / "main"
    assert checkpoint_steps(source) == [3, 12]
    copy_checkpoint(source, 12, target)
    assert checkpoint_steps(target) == [12]
    assert json.loads((target / "12" / "meta" / "metadata").read_text()) == {
        "position": 120,
        "oldest": -1,
        "recent_steps": [],
    }
    assert (target / "12" / "state" / "a").read_text() == "12"
    assert json.loads((source / "12" / "meta" / "metadata").read_text())["recent_steps"] == ["x"]
    assert sorted(path.name for path in target.parent.iterdir()) == ["main", "main.reference"]
    assert (target.parent / "main.reference" / "a").read_text() == "0"

    copy_checkpoint(source, 12, target)
    assert checkpoint_steps(target) == [12]
    with pytest.raises(ConfigurationError, match="already holds a copy of step 12 from another source, or for another"):
        copy_checkpoint(source, 12, target, {"position": 0})


def test_a_copy_that_fails_leaves_no_checkpoint(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "runs" / "b" / "main"
    (source / "12" / "state" / "b").symlink_to("nowhere")
    with pytest.raises(shutil.Error):
        copy_checkpoint(source, 12, target)
    assert checkpoint_steps(target) == []
    assert sorted(path.name for path in target.parent.iterdir()) == ["main", "main.reference"]


def test_a_step_without_checkpoint_names_those_there_are(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StateRefused, match=r"no checkpoint of step 9 in .*; there are checkpoints of steps \[3, 12\]"):
        copy_checkpoint(source, 9, tmp_path / "b")
    with pytest.raises(StateRefused, match=r"there is none; check learner\.checkpoint\.directory"):
        copy_checkpoint(tmp_path / "nowhere", 9, tmp_path / "b")


def test_a_directory_that_holds_other_checkpoints_is_refused(source: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "b", 4)
    with pytest.raises(ConfigurationError, match=r"already holds checkpoints of steps \[4\]"):
        copy_checkpoint(source, 12, tmp_path / "b")
    assert checkpoint_steps(tmp_path / "b") == [4]


@pytest.mark.parametrize("directory", ["s3://bucket/folder", "file:///folder", "gcs://bucket"])
def test_a_url_that_checkpoints_cannot_be_written_to_is_refused_as_a_setting(directory: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"learner.checkpoint.directory is {directory}.* gs://BUCKET/FOLDER"):
        CheckpointConfig(directory=directory)
    assert CheckpointConfig(directory="gs://bucket/folder").directory == "gs://bucket/folder"

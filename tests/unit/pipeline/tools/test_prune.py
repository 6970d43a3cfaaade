"""Directories in which prune looks for the checkpoints of a learner, and learners that it may not read."""

from pathlib import Path

import pytest

from rollstream.pipeline.config import load
from rollstream.pipeline.tools import prune
from rollstream.pipeline.tools.prune import checkpoint_folders, read_positions
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied
from rollstream.topics.kafka import clients, topic_admin


def test_a_learner_is_judged_by_the_default_directory_of_its_own_run(tmp_path: Path) -> None:
    folders = checkpoint_folders(load(flags=["run=main", f"data_dir={tmp_path}"]))
    runs = tmp_path / "runs"
    assert folders("main", "a") == [runs / "main" / "checkpoints" / "main" / "a"]
    assert runs / "fork" / "checkpoints" / "fork" / "b" in folders("fork", "b")


def test_a_learner_of_another_run_may_also_share_a_configured_directory(tmp_path: Path) -> None:
    where = tmp_path / "shared"
    flags = ["run=main", f"data_dir={tmp_path}", f"learner.checkpoint.directory={where}"]
    folders = checkpoint_folders(load(flags=flags))
    assert folders("main", "a") == [where / "main" / "a"]
    assert folders("fork", "b") == [where / "fork" / "b", tmp_path / "runs" / "fork" / "checkpoints" / "fork" / "b"]


def test_named_directories_stand_in_place_of_the_defaults_for_learners_of_every_run(tmp_path: Path) -> None:
    config = load(flags=["run=main", f"data_dir={tmp_path}"])
    named = [str(tmp_path / name) for name in ("first", "second")]
    for owner in ("main", "fork"):
        assert checkpoint_folders(config, named)(owner, "a") == [Path(name) / owner / "a" for name in named]


@pytest.mark.parametrize(
    ("owner", "remedy"),
    [("fork", r"grant it READ on both by hand, because no rule of run main does"), ("main", r"^acls apply$")],
)
def test_learners_that_may_not_be_read_are_named_with_a_remedy_that_helps(
    owner: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_kafka: KafkaConfig, _run: str) -> None:
        raise AccessDenied("acls apply")

    monkeypatch.setattr(clients, "check_broker", lambda _kafka: None)
    monkeypatch.setattr(topic_admin, "bounds", lambda _kafka, _topic: {0: (0, 0)})
    monkeypatch.setattr(prune, "group_names", lambda _kafka: [])
    monkeypatch.setattr(prune, "topic_names", lambda _kafka: [f"{owner}.steps"])
    monkeypatch.setattr(prune, "forked_learners", denied)
    with pytest.raises(AccessDenied, match=remedy):
        read_positions(KafkaConfig(), "main", "main.grouper", None)

"""Folders of demos: a demo removes those of demos that have ended, and of no demo that runs."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollstream.infra.config import BrokerConfig
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.launch import demo
from rollstream.pipeline.run import workspace
from rollstream.pipeline.run.process_registry import ProcessRegistry
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError


def settings(base: Path, run: str) -> RunConfig:
    return RunConfig(run=run, data_dir=base, broker=BrokerConfig(data_dir=base / "broker"))


def with_broker_data_elsewhere(base: Path, run: str) -> RunConfig:
    return RunConfig(run=run, data_dir=base, broker=BrokerConfig(data_dir=base / "kafka"))


def on_brokers_of_others(base: Path, run: str) -> RunConfig:
    return RunConfig(run=run, data_dir=base, kafka=KafkaConfig(bootstrap_servers="kafka:9092"))


@pytest.mark.parametrize("configured", [settings, with_broker_data_elsewhere, on_brokers_of_others])
def test_a_demo_does_not_touch_the_folder_of_a_demo_that_runs(
    configured: Callable[[Path, str], RunConfig], tmp_path: Path
) -> None:
    with workspace.prepared(configured(tmp_path, "demo-1")) as first:
        checkpoint = first.run_dir / "checkpoints"
        checkpoint.mkdir()
        with workspace.prepared(configured(tmp_path, "demo-2")) as second:
            assert checkpoint.is_dir()
            assert second.run_dir.is_dir()
        with workspace.prepared(configured(tmp_path, "demo-3")):
            assert checkpoint.is_dir()
            assert not second.run_dir.exists(), "it has ended"


def test_a_demo_removes_folders_of_demos_that_have_ended_unless_they_are_kept(tmp_path: Path) -> None:
    ended, kept = settings(tmp_path, "demo-ended"), settings(tmp_path, "demo-kept")
    other = settings(tmp_path, "main")
    for config in (ended, kept, other):
        with workspace.prepared(config) as placed:
            assert placed.broker.data_dir == placed.run_dir / "broker"
            placed.broker.data_dir.mkdir()
            workspace.leave(placed, keep=config is kept)
    assert not ended.run_dir.exists(), "the next demo removed it"
    with workspace.prepared(settings(tmp_path, workspace.DEFAULT_RUN)) as placed:
        assert (kept.run_dir / "broker").is_dir()
        assert other.run_dir.is_dir()
        assert placed.run_dir.name.startswith("demo-2")
        assert placed.run_dir.is_dir()


def test_a_demo_does_not_touch_the_folder_of_a_run_that_is_named_like_a_demo(tmp_path: Path) -> None:
    run = settings(tmp_path, "demo-qwen")
    checkpoint = run.run_dir / "checkpoints"
    checkpoint.mkdir(parents=True)
    with workspace.prepared(settings(tmp_path, "demo-1")):
        assert checkpoint.is_dir()


def test_a_demo_does_not_touch_the_folder_of_a_demo_in_which_a_run_goes_on(tmp_path: Path) -> None:
    with workspace.prepared(settings(tmp_path, "demo-1")) as first:
        pass
    with ProcessRegistry(first.run_dir / "processes", "settings"), workspace.prepared(settings(tmp_path, "demo-2")):
        assert first.run_dir.is_dir()
    with workspace.prepared(settings(tmp_path, "demo-3")):
        assert not first.run_dir.exists()


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    config = settings(tmp_path, "demo-1")
    with (
        workspace.prepared(config),
        pytest.raises(ConfigurationError, match=r"another demo runs in .*demo-1; stop it first"),
        workspace.prepared(config),
    ):
        pass
    with workspace.prepared(config) as again:
        assert again.run_dir.is_dir()


def test_a_demo_neither_adds_to_the_topics_of_one_that_was_kept_nor_removes_them(tmp_path: Path) -> None:
    with workspace.prepared(settings(tmp_path, "mine")) as first:
        segment = first.broker.data_dir / "segment"
        segment.parent.mkdir()
        segment.touch()
        workspace.leave(first, keep=True)
    with (
        pytest.raises(ConfigurationError, match=r"mine/broker has the topics of an earlier demo .*--run"),
        workspace.prepared(settings(tmp_path, "mine")),
    ):
        pytest.fail("it would delete them at its end")
    assert segment.exists()


def test_a_demo_whose_environment_names_a_broker_at_the_default_address_asks_whether_its_run_is_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after the `export` that `rollstream broker start` prints."""
    address = KafkaConfig().bootstrap_servers
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", address)
    monkeypatch.setattr(demo.provisioning, "describe", lambda kafka, run: [(kafka.bootstrap_servers, run)])
    with ExitStack() as stack, pytest.raises(ConfigurationError, match=f"run main at {address} has 1 topics already"):
        demo.start_kafka(settings(tmp_path, "main"), False, stack, lambda _text: None)

"""The fleet of engines: it writes the first version once there is room, and begins no update once it is stopped."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.serving import fleet
from rollstream.consumers.serving.checkpoints import CheckpointDirectory, ServedCheckpoint
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.fleet import EngineFleet
from rollstream.consumers.weights.follower import WholeVersion
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import PolicyManifest
from tests.support.serving_engines import ARRAYS, EngineStandIn, manifest


class Log:
    """Versions that a fleet receives in place of those of a run."""

    def __init__(self) -> None:
        self.versions: list[WholeVersion] = []

    def publish(self, version: int) -> None:
        self.versions.append(WholeVersion(manifest(version), ARRAYS))

    def poll(self, _: float) -> WholeVersion | None:
        return self.versions.pop(0) if self.versions else None

    def close(self) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(fleet, "check_topics", lambda *_: None)
    monkeypatch.setattr(fleet, "VersionSource", lambda *_, **__: log)
    return log


def engines(monkeypatch: pytest.MonkeyPatch, directory: Path, engine: EngineStandIn, **settings: Any) -> EngineFleet:
    """A fleet of one engine."""
    monkeypatch.setattr(fleet, "engine_named", lambda _: lambda _: engine)
    config = ServingConfig(urls=("http://engine",), **settings)
    return EngineFleet(KafkaConfig(bootstrap_servers="127.0.0.1:1"), "main", config, directory=directory)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_no_update_begins_once_a_stop_is_requested_even_if_a_version_is_being_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    engine, add = EngineStandIn(), CheckpointDirectory.add

    async def main() -> None:
        writing, go_on = asyncio.Event(), asyncio.Event()

        async def slow(self: Any, manifest: PolicyManifest, arrays: Any) -> ServedCheckpoint:
            if manifest.version:
                writing.set()
                await go_on.wait()
            checkpoint = await add(self, manifest, arrays)
            for _ in range(20):  # Updaters that wait for the version have their turns.
                await asyncio.sleep(0)
            return checkpoint

        monkeypatch.setattr(CheckpointDirectory, "add", slow)
        stop = asyncio.Event()
        serving = asyncio.create_task(
            engines(monkeypatch, tmp_path, engine, retry_s=60.0).serve_until(stop, on_ready=lambda: None)
        )
        async with asyncio.timeout(60):
            log.publish(0)
            await until(lambda: engine.calls == ["pause", "load 0", "resume"])
            log.publish(1)
            await writing.wait()
            stop.set()
            for _ in range(20):
                await asyncio.sleep(0)
            go_on.set()
            await serving

    asyncio.run(main())
    assert engine.calls == ["pause", "load 0", "resume"]
    assert (tmp_path / "version-1").exists(), "the write was finished"


def test_an_update_in_progress_is_finished_after_a_stop_is_requested(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    engine = EngineStandIn()
    call = engine.call

    async def main() -> None:
        stop, go_on = asyncio.Event(), asyncio.Event()

        async def slow(name: str) -> None:
            await call(name)
            if name == "load 0":
                await go_on.wait()

        engine.call = slow  # type: ignore[method-assign]
        log.publish(0)
        serving = asyncio.create_task(
            engines(monkeypatch, tmp_path, engine, retry_s=60.0).serve_until(stop, on_ready=lambda: None)
        )
        async with asyncio.timeout(60):
            await until(lambda: "load 0" in engine.calls)
            stop.set()
            for _ in range(20):
                await asyncio.sleep(0)
            go_on.set()
            await serving

    asyncio.run(main())
    assert engine.calls == ["pause", "load 0", "resume"]


def test_the_first_version_is_written_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    engine, add, refused = EngineStandIn(), CheckpointDirectory.add, list[int]()

    async def short_of_room(self: Any, manifest: PolicyManifest, arrays: Any) -> ServedCheckpoint:
        if len(refused) < 3:
            refused.append(manifest.version)
            raise StoreError("no space left on device")
        return await add(self, manifest, arrays)

    async def main() -> None:
        stop = asyncio.Event()
        serving = asyncio.create_task(
            engines(monkeypatch, tmp_path, engine, retry_s=0.01).serve_until(stop, on_ready=lambda: None)
        )
        async with asyncio.timeout(60):
            log.publish(0)
            await until(lambda: serving.done() or engine.calls == ["pause", "load 0", "resume"])
        stop.set()
        await serving

    monkeypatch.setattr(CheckpointDirectory, "add", short_of_room)
    asyncio.run(main())
    assert (engine.reported, refused) == ("0", [0, 0, 0])


def test_a_first_version_that_no_checkpoint_can_be_made_of_ends_the_fleet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: Log
) -> None:
    log.versions.append(WholeVersion(manifest(0, model="{}"), ARRAYS))
    serving = engines(monkeypatch, tmp_path, EngineStandIn()).serve_until(asyncio.Event(), on_ready=lambda: None)
    with pytest.raises(ConfigurationError, match=r"set serving\.template"):
        asyncio.run(serving)

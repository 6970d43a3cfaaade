"""Versions that engines load: none is removed that an engine has begun to load."""

import asyncio
from contextlib import suppress
from pathlib import Path

from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.replica_updater import ReplicaUpdater
from rollstream.consumers.serving.served_versions import ServedCheckpoint, ServedVersions
from tests.support.serving_engines import EngineStandIn

ENGINE = "http://engine-0"


class RecordedVersions(ServedVersions):
    """Records which versions were removed; a removal takes time, as that of files does."""

    def __init__(self, keep_versions: int) -> None:
        super().__init__(keep_versions=keep_versions)
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.removed: list[int] = []

    async def remove(self, checkpoint: ServedCheckpoint) -> None:
        self.removed.append(checkpoint.version)
        self.begun.set()
        await self.go_on.wait()


def checkpoint(version: int) -> ServedCheckpoint:
    return ServedCheckpoint(version, Path(f"version-{version}"))


def test_an_engine_falls_back_to_no_version_that_is_about_to_be_removed() -> None:
    async def test() -> None:
        versions = RecordedVersions(keep_versions=1)
        with versions.using(checkpoint(0)), versions.using(checkpoint(1)):
            for version in (0, 1, 2):
                await versions.announce(checkpoint(version))
                versions.note_good(version, ENGINE)
        announcing = asyncio.create_task(versions.announce(checkpoint(3)))
        await versions.begun.wait()
        fallback = versions.fallback(2, ENGINE)
        versions.go_on.set()
        await announcing
        assert sorted(versions.removed) == [0, 1]
        assert fallback is None, "its files are being removed"

    asyncio.run(test())


def test_a_version_that_an_updater_has_chosen_is_not_removed_before_its_engine_loads_it() -> None:
    async def test() -> None:
        versions = RecordedVersions(keep_versions=1)
        versions.go_on.set()
        engine = EngineStandIn()
        engine.hangs.add("pause")
        await versions.announce(checkpoint(0))
        updating = asyncio.create_task(ReplicaUpdater(ENGINE, engine, versions, ServingConfig()).run())
        await asyncio.sleep(0)  # The updater has chosen version 0, and its update has not begun.
        assert engine.calls == []
        await versions.announce(checkpoint(1))
        removed = [*versions.removed]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await updating
        assert removed == []

    asyncio.run(test())

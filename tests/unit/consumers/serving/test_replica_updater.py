"""Updates of an engine: it samples only with the whole weights of a known version; else it is paused and logged."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.serving.checkpoints import CheckpointDirectory, ServedCheckpoint, ServedVersions
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import VersionLate, VersionUnfit
from rollstream.consumers.serving.replica_updater import ReplicaState, ReplicaUpdater
from tests.support.log_lines import log_lines
from tests.support.serving_engines import ARRAYS, EngineStandIn, manifest

CONFIG = ServingConfig(retry_s=0.01, attempts=2)


class Fleet:
    """Engines whose updaters run, and the checkpoints they share."""

    def __init__(self, checkpoints: CheckpointDirectory, engines: int) -> None:
        self.checkpoints = checkpoints
        self.engines = [EngineStandIn() for _ in range(engines)]
        self.updaters = [
            ReplicaUpdater(f"http://engine-{number}", engine, checkpoints, CONFIG)
            for number, engine in enumerate(self.engines)
        ]

    async def publish(self, version: int) -> None:
        await self.checkpoints.add(manifest(version), ARRAYS)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.002)

    async def serves(self, version: int, number: int = 0) -> None:
        updater = self.updaters[number]
        await self.until(lambda: (updater.state, updater.version) == (ReplicaState.SERVING, version))

    async def is_in(self, state: ReplicaState, number: int = 0) -> None:
        await self.until(lambda: self.updaters[number].state is state)


def run(directory: Path, test: Callable[[Fleet], Coroutine[Any, Any, None]], engines: int = 1) -> Fleet:
    async def main() -> Fleet:
        with CheckpointDirectory(directory, keep_versions=2) as checkpoints:
            fleet = Fleet(checkpoints, engines)
            tasks = [asyncio.create_task(updater.run()) for updater in fleet.updaters]
            try:
                await test(fleet)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return fleet

    fleet = asyncio.run(main())
    assert not any(engine.sampled_torn for engine in fleet.engines)
    return fleet


def test_each_version_is_loaded_while_the_engine_is_paused_and_old_ones_are_passed_over(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.publish(0)
        await fleet.serves(0)
        assert not fleet.engines[0].paused
        await fleet.publish(1)
        await fleet.serves(1)

    [engine] = run(tmp_path, test).engines
    assert engine.calls == ["pause", "load 0", "resume", "pause", "load 1", "resume"]


def test_a_load_that_fails_is_followed_by_the_last_good_version_before_the_engine_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(fleet: Fleet) -> None:
        [engine] = fleet.engines
        await fleet.publish(0)
        await fleet.serves(0)
        engine.refuses["load 1"] = 1
        await fleet.publish(1)
        await fleet.serves(1)

    with caplog.at_level(logging.INFO, "rollstream"):
        fleet = run(tmp_path, test)
    [engine] = fleet.engines
    assert engine.calls[3:] == ["pause", "load 1", "load 0", "resume", "pause", "load 1", "resume"]
    assert fleet.updaters[0].failures == 1
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "replica_update_failed",
        "replica_restored",
    ]
    assert "Traceback" in log_lines(caplog)


def test_a_version_that_keeps_failing_is_left_and_the_next_one_is_taken(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        [engine] = fleet.engines
        await fleet.publish(0)
        await fleet.serves(0)
        engine.refuses["load 1"] = 99
        await fleet.publish(1)
        await fleet.until(lambda: engine.calls.count("load 1") == CONFIG.attempts)
        await fleet.serves(0)
        # The updater has looked at the engine again and left it alone.
        await asyncio.sleep(20 * CONFIG.retry_s)
        assert engine.calls.count("load 1") == CONFIG.attempts
        await fleet.publish(2)
        await fleet.serves(2)

    run(tmp_path, test)


def test_an_engine_goes_back_to_the_version_that_it_had_and_not_to_that_of_another(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        _, behind = fleet.engines
        await fleet.publish(0)
        await fleet.serves(0, 0)
        await fleet.serves(0, 1)
        behind.refuses["load 1"] = CONFIG.attempts
        await fleet.publish(1)
        await fleet.serves(1, 0)
        await fleet.until(lambda: not behind.refuses["load 1"])
        await fleet.serves(0, 1)
        behind.refuses["load 2"] = 1
        await fleet.publish(2)
        await fleet.serves(2, 0)
        await fleet.serves(2, 1)

    _, behind = run(tmp_path, test, engines=2).engines
    loads = [call for call in behind.calls if call.startswith("load")]
    assert loads[-3:] == ["load 2", "load 0", "load 2"]


def test_an_engine_that_loads_nothing_stays_paused_is_named_and_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(fleet: Fleet) -> None:
        healthy, broken = fleet.engines
        await fleet.publish(0)
        await fleet.serves(0, 0)
        await fleet.serves(0, 1)
        broken.refuses["load 0"] = broken.refuses["load 1"] = 99
        await fleet.publish(1)
        await fleet.serves(1, 0)
        await fleet.is_in(ReplicaState.DRAINED, 1)
        assert (healthy.paused, broken.paused) == (False, True)
        assert "resume" not in broken.calls[3:]
        assert fleet.updaters[1].version == -1
        # Once the engine loads versions again, it serves again.
        broken.refuses.clear()
        await fleet.serves(1, 1)
        assert not broken.paused

    run(tmp_path, test, engines=2)
    [drained] = {record.rollstream_fields["url"] for record in caplog.records if record.message == "replica_drained"}
    assert drained == "http://engine-1"


def test_an_engine_that_was_started_again_gets_the_version_again(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        [engine] = fleet.engines
        await fleet.publish(4)
        await fleet.serves(4)
        engine.restart()
        await fleet.until(lambda: engine.reported == "4" and not engine.paused)

    run(tmp_path, test)


def test_an_engine_that_does_not_pause_keeps_its_weights_and_is_asked_again(tmp_path: Path) -> None:
    async def test(fleet: Fleet) -> None:
        [engine] = fleet.engines
        await fleet.publish(0)
        await fleet.serves(0)
        engine.refuses["pause"] = 2
        await fleet.publish(1)
        await fleet.serves(1)
        # The engine may have paused although its answer did not arrive.
        assert engine.calls[3:5] == ["pause", "resume"]
        assert engine.loads == 2

    run(tmp_path, test)


def test_an_engine_that_an_update_leaves_paused_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As when Ctrl-C ends the process although an update is in progress: whoever waits for it is cancelled, too."""

    async def main() -> None:
        with CheckpointDirectory(tmp_path, keep_versions=2) as checkpoints:
            engine, loading = EngineStandIn(), asyncio.Event()
            call = engine.call

            async def endless(name: str) -> None:
                await call(name)
                if name == "load 0":
                    loading.set()
                    await asyncio.Event().wait()

            engine.call = endless  # type: ignore[method-assign]
            await checkpoints.add(manifest(0), ARRAYS)
            task = asyncio.create_task(ReplicaUpdater("http://engine", engine, checkpoints, CONFIG).run())
            await loading.wait()
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.paused

    asyncio.run(main())
    (left,) = (record for record in caplog.records if record.message == "replica_left_paused")
    assert "start it again" in str(left.__dict__)


def test_an_updater_that_ends_during_a_fetch_does_not_pause_the_engine() -> None:
    async def main() -> None:
        versions, engine = ServedVersions(keep_versions=8), FetchingStandIn()
        engine.fetched.clear()
        await versions.announce(ServedCheckpoint(0, Path()))
        task = asyncio.create_task(ReplicaUpdater("http://engine", engine, versions, CONFIG).run())
        async with asyncio.timeout(60):
            while not engine.calls:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.sleep(0)
            engine.fetched.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert engine.calls == ["prepare 0"]

    asyncio.run(main())


class FetchingStandIn(EngineStandIn):
    """An engine that fetches versions itself, as one with our plug-in does."""

    def __init__(self) -> None:
        super().__init__()
        self.unfit: set[str] = set()
        self.late = 0
        """How many fetches still end too late."""
        self.fetched = asyncio.Event()
        """Set when fetches may end."""
        self.fetched.set()
        self.held: set[str] = set()
        """Labels of the versions in its memory: of the last that it fetched, and of the last that it loaded."""

    async def prepare(self, label: str) -> None:
        self.calls.append(f"prepare {label}")
        await self.fetched.wait()
        if label in self.unfit:
            raise VersionUnfit("damaged, as told")
        if self.late:
            self.late -= 1
            raise VersionLate("the store does not answer, as told")
        self.held = {label, self.reported}

    async def load(self, directory: Path, label: str) -> None:
        assert label in self.held, "a version is loaded that is not held"
        await self.call(f"load {label}")
        self.reported = label


def fetching(
    test: Callable[[ReplicaUpdater, ServedVersions], Coroutine[Any, Any, None]],
    engine: FetchingStandIn,
    *announced: int,
    config: ServingConfig = CONFIG,
) -> None:
    """Run an updater of an engine that fetches versions itself, with these versions announced."""

    async def main() -> None:
        versions = ServedVersions(keep_versions=8)
        await versions.announce(*(ServedCheckpoint(version, Path()) for version in announced))
        updater = ReplicaUpdater("http://engine", engine, versions, config)
        task = asyncio.create_task(updater.run())
        try:
            async with asyncio.timeout(60):
                await test(updater, versions)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


async def serves(updater: ReplicaUpdater, version: int) -> None:
    while (updater.state, updater.version) != (ReplicaState.SERVING, version):
        await asyncio.sleep(0.002)


def test_an_engine_without_a_version_loads_the_newest_that_it_can_fetch_and_one_that_has_one_keeps_it() -> None:
    engine = FetchingStandIn()
    engine.unfit = {"2", "3"}

    async def test(updater: ReplicaUpdater, versions: ServedVersions) -> None:
        await serves(updater, 1)
        assert engine.calls[:6] == ["prepare 3", "prepare 2", "prepare 1", "pause", "load 1", "resume"]
        await versions.announce(ServedCheckpoint(4, Path()))
        await serves(updater, 4)
        engine.unfit.add("5")
        await versions.announce(ServedCheckpoint(5, Path()))
        while engine.calls.count("prepare 5") < CONFIG.attempts:
            await asyncio.sleep(0.002)
        assert (updater.state, updater.version) == (ReplicaState.SERVING, 4)

    fetching(test, engine, 0, 1, 2, 3)
    assert engine.calls[-1] == "prepare 5"


def test_a_version_that_comes_late_is_tried_until_it_is_there() -> None:
    engine = FetchingStandIn()

    async def test(updater: ReplicaUpdater, versions: ServedVersions) -> None:
        await serves(updater, 0)
        engine.late = 5 * CONFIG.attempts
        await versions.announce(ServedCheckpoint(1, Path()))
        await serves(updater, 1)

    fetching(test, engine, 0)
    assert "prepare 0" not in engine.calls[4:], "an earlier version would come late, too"


def test_an_engine_fetches_the_version_that_another_has_loaded_if_it_cannot_load_the_newest() -> None:
    engine = FetchingStandIn()
    engine.refuses["load 6"] = 99

    async def test(updater: ReplicaUpdater, versions: ServedVersions) -> None:
        versions.note_good(5, "http://other")
        await serves(updater, 5)
        assert not engine.paused

    fetching(test, engine, 5, 6)
    assert engine.calls[:6] == ["prepare 6", "pause", "load 6", "prepare 5", "load 5", "resume"]


def test_an_engine_that_can_fetch_no_version_that_it_can_load_stays_paused_until_there_is_one() -> None:
    engine = FetchingStandIn()
    engine.refuses["load 6"], engine.unfit = 99, {"5"}

    async def test(updater: ReplicaUpdater, versions: ServedVersions) -> None:
        versions.note_good(5, "http://other")
        while updater.state is not ReplicaState.DRAINED:
            await asyncio.sleep(0.002)
        assert engine.paused
        await versions.announce(ServedCheckpoint(7, Path()))
        await serves(updater, 7)

    fetching(test, engine, 5, 6)


class ImpatientVersions(ServedVersions):
    """Versions for which nobody waits; `waits` are the times for which updaters would have waited, in seconds."""

    def __init__(self) -> None:
        super().__init__(keep_versions=8)
        self.waits: list[float] = []

    async def wait_newer(self, version: int, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        await asyncio.sleep(0)


def waits_of(engine: FetchingStandIn, number: int) -> list[float]:
    """The first waits between the attempts to bring an engine to version 0, as multiples of serving.retry_s."""

    async def main() -> list[float]:
        versions = ImpatientVersions()
        await versions.announce(ServedCheckpoint(0, Path()))
        task = asyncio.create_task(ReplicaUpdater("http://engine", engine, versions, CONFIG).run())
        async with asyncio.timeout(60):
            while len(versions.waits) < number:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [wait_s / CONFIG.retry_s for wait_s in versions.waits[:number]]

    return asyncio.run(main())


def test_an_engine_that_can_fetch_no_version_fetches_less_and_less_often() -> None:
    engine = FetchingStandIn()
    engine.unfit.add("0")
    assert waits_of(engine, 6) == [2, 4, 8, 16, 16, 16]


def test_an_engine_that_never_reports_its_label_is_named_and_updated_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Renaming(FetchingStandIn):
        async def label(self) -> str:
            return f"v{self.reported}"

    # An update and a check take turns; an engine that was restarted is updated again after the usual time.
    assert waits_of(Renaming(), 14) == [1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 16, 16, 16]
    mislabelled = [record.__dict__ for record in caplog.records if record.message == "replica_mislabelled"]
    assert "'label': 'v0'" in str(mislabelled[0])
    checks = 7
    assert len(mislabelled) == checks - CONFIG.attempts


def test_a_version_announced_during_an_update_is_loaded_at_once() -> None:
    engine = FetchingStandIn()

    async def test(updater: ReplicaUpdater, versions: ServedVersions) -> None:
        loading, go_on = asyncio.Event(), asyncio.Event()
        call = engine.call

        async def slow(name: str) -> None:
            await call(name)
            if name == "load 1":
                loading.set()
                await go_on.wait()

        engine.call = slow  # type: ignore[method-assign]
        await versions.announce(ServedCheckpoint(1, Path()))
        await loading.wait()
        await versions.announce(ServedCheckpoint(2, Path()))
        go_on.set()
        await serves(updater, 2)

    fetching(test, engine, config=ServingConfig(retry_s=3600.0))

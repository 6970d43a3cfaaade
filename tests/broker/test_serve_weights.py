"""The role serve-weights on a real broker: engines get each version whole, and one that fails holds up no other."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.serving.checkpoints import CheckpointDirectory, ServedCheckpoint, ServedVersions
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.fleet import EngineFleet, VersionAnnouncer
from rollstream.consumers.trainers.step_writer import StepWriter, publish_version
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import Metrics, PolicyManifest
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.one_by_one import poll_one_by_one
from tests.support.producing import serving_http
from tests.support.runs import RealRun
from tests.support.serving_engines import (
    ARRAYS,
    MODEL_JSON,
    EngineStandIn,
    SglangStandIn,
    VllmStandIn,
    published_exactly,
    values_digest,
)
from tests.support.waiting import eventually

QUICK = {"serving__retry_s": 0.2, "serving__metrics_interval_s": 0.2}


@pytest.fixture
def trainer(run: RealRun) -> Iterator[StepWriter]:
    with StepWriter(run.kafka, run.name, model=MODEL_JSON) as writer:
        yield writer


def parameters(version: int) -> dict[str, NDArray[np.float32]]:
    return published_exactly({name: array + np.float32(version) for name, array in ARRAYS.items()})


def serves(engine: EngineStandIn, version: int) -> bool:
    return not engine.paused and (engine.reported, engine.digest) == (str(version), values_digest(parameters(version)))


def events(log: str, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def newest_metrics(run: RealRun) -> dict[str, float]:
    records = [record for record in run.read("metrics") if isinstance(record, Metrics)]
    assert {record.component for record in records} == {"serve-weights"}
    return dict(records[-1].values)


def test_engines_follow_a_run_and_one_that_fails_is_drained_and_named(run: RealRun, trainer: StepWriter) -> None:
    healthy, broken = VllmStandIn(), VllmStandIn()
    trainer.publish_version(parameters(0))
    with serving_http(healthy.answer) as url, serving_http(broken.answer) as other:
        process = run.start("serve-weights", "--url", url, "--url", other, **QUICK)
        eventually(lambda: serves(healthy, 0) and serves(broken, 0), 300, "both engines have version 0")

        # The first load of version 1 fails: version 0 is loaded before the engine resumes.
        broken.refuses["load 1"] = 1
        trainer.publish_version(parameters(1))
        eventually(lambda: serves(healthy, 1) and serves(broken, 1), 300, "both engines have version 1")
        assert broken.calls[3:] == ["pause", "load 1", "load 0", "resume", "pause", "load 1", "resume"]
        assert healthy.calls[3:] == ["pause", "load 1", "resume"]

        # Nothing loads any more: the engine stays paused, and the other goes on.
        broken.refuses.update({f"load {version}": 99 for version in range(4)})
        for version in (2, 3):
            trainer.publish_version(parameters(version))
            eventually(lambda v=version: serves(healthy, v), 300, f"the healthy engine has version {version}")
        state = {"replicas": 2, "serving_replicas": 1, "drained_replicas": 1, "policy_version": 3}
        eventually(lambda: newest_metrics(run).items() >= state.items(), 300, "the metrics say so")
        assert newest_metrics(run)["failed_updates_total"] >= 3
        assert broken.paused
        [drained, *_] = events(run.log_of(process), "replica_drained")
        assert drained["url"] == other.removesuffix("/v1")

        # The broken engine is started again, and gets the newest version.
        broken.refuses.clear()
        broken.restart()
        eventually(lambda: serves(broken, 3), 300, "the engine is back")
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)
    assert not healthy.sampled_torn
    assert not broken.sampled_torn
    # The newest two are kept, and the one that the broken engine had, until another version comes.
    kept = (run.directory / "runs" / run.name / "serving").glob("version-*")
    assert sorted(path.name for path in kept) == ["version-1", "version-2", "version-3"]


def test_a_version_that_is_not_whole_on_the_log_reaches_no_engine(run: RealRun, trainer: StepWriter) -> None:
    engine = SglangStandIn()
    trainer.publish_version(parameters(0))
    with serving_http(engine.answer) as url:
        process = run.start("serve-weights", "--engine", "sglang", "--url", url, **QUICK)
        eventually(lambda: serves(engine, 0), 300, "the engine has version 0")
        other_bytes = replace(read_manifests(run.kafka, run.name)[0], version=1, digest="0" * 64)
        run.send_bytes("policies", encode(other_bytes), encode_key(1))
        assert publish_version(run.kafka, run.name, parameters(2), model=MODEL_JSON) == 2
        eventually(lambda: serves(engine, 2), 300, "the engine has version 2")
        assert engine.calls == ["pause", "load 0", "resume", "pause", "load 2", "resume"]
        passed_over = events(run.log_of(process), "policy_refused") + events(run.log_of(process), "policy_skipped")
        assert [line["version"] for line in passed_over] == [1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def test_a_version_that_could_not_be_written_is_written_once_there_is_room(
    run: RealRun, trainer: StepWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, add, refused = VllmStandIn(), CheckpointDirectory.add, list[int]()

    async def short_of_room(self: Any, manifest: PolicyManifest, arrays: Any) -> ServedCheckpoint:
        if manifest.version == 1 and len(refused) < 3:
            refused.append(1)
            raise StoreError("no space left on device")
        return await add(self, manifest, arrays)

    async def follow(url: str) -> None:
        config = ServingConfig(urls=(url.removesuffix("/v1"),), retry_s=0.1)
        fleet, stop = EngineFleet(run.kafka, run.name, config, directory=run.directory / "serving"), asyncio.Event()
        serving = asyncio.create_task(fleet.serve_until(stop, on_ready=lambda: None))
        async with asyncio.timeout(120):
            for version in range(2):
                while not serves(engine, version):
                    assert not serving.done()
                    await asyncio.sleep(0.01)
                if not version:
                    await asyncio.to_thread(trainer.publish_version, parameters(1))
        stop.set()
        await serving

    monkeypatch.setattr(CheckpointDirectory, "add", short_of_room)
    trainer.publish_version(parameters(0))
    with serving_http(engine.answer) as url:
        asyncio.run(follow(url))
    assert refused == [1, 1, 1]


def test_the_first_version_announced_to_engines_that_fetch_it_themselves_is_the_newest(
    run: RealRun, trainer: StepWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def announced(number: int) -> list[int]:
        versions, numbers = ServedVersions(keep_versions=2), list[int]()
        async with asyncio.timeout(300):
            while len(numbers) < number:
                version = await announcer.poll(versions, 0.1)
                if version is not None:
                    assert versions.newest is not None
                    assert versions.newest.version == version
                    numbers.append(version)
                    trainer.publish_version(parameters(version + 1))
        return numbers

    for version in range(3):
        trainer.publish_version(parameters(version))
    poll_one_by_one(monkeypatch)
    with contextlib.closing(VersionAnnouncer(run.kafka, run.name)) as announcer:
        assert asyncio.run(announced(3)) == [2, 3, 4]


OWN_ENGINE = '''
from pathlib import Path


class FileEngine:
    """An engine that is told by files."""

    def __init__(self, http):
        self.folder = Path(http.url.partition("://")[2])

    async def pause(self):
        (self.folder / "paused").touch()

    async def load(self, directory, label):
        assert (directory / "config.json").exists()
        (self.folder / "label").write_text(label)

    async def resume(self):
        (self.folder / "paused").unlink()

    async def label(self):
        return (self.folder / "label").read_text()
'''


def test_an_engine_of_ones_own_is_updated_from_a_file_outside_the_packages(
    run: RealRun, trainer: StepWriter, tmp_path: Path
) -> None:
    (tmp_path / "own_engine.py").write_text(OWN_ENGINE)
    folder = tmp_path / "engine"
    folder.mkdir()
    trainer.publish_version(parameters(0))
    url = f"http://{folder}"
    process = run.start("serve-weights", "--engine", f"{tmp_path}/own_engine.py:FileEngine", "--url", url, **QUICK)

    def label() -> str:
        with contextlib.suppress(FileNotFoundError):
            return "" if (folder / "paused").exists() else (folder / "label").read_text()
        return ""

    eventually(lambda: label() == "0", 300, "the engine has version 0")
    trainer.publish_version(parameters(1))
    eventually(lambda: label() == "1", 300, "the engine has version 1")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0


def test_parameters_of_no_model_are_refused_with_the_remedy(run: RealRun) -> None:
    publish_version(run.kafka, run.name, {"w": np.zeros(3, np.float32)})
    process = run.start("serve-weights", "--url", "http://127.0.0.1:9")
    assert process.wait(300) == 2
    assert "set serving.template" in run.log_of(process)

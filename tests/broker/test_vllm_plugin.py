"""The plug-in for vLLM on a real broker: versions go from the log into the engine, never a damaged one."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.serving.vllm_plugin import requested_versions
from rollstream.consumers.serving.vllm_plugin.requested_versions import RequestedVersions, VersionNotHeld
from rollstream.consumers.step_writer import StepWriter, publish_version
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.loading import load_version
from rollstream.topics.params_digest import params_digest
from tests.support.damaged_weights import damaged_delta
from tests.support.producing import serving_http
from tests.support.runs import RealRun
from tests.support.serving_engines import (
    ARRAYS,
    MODEL_JSON,
    EngineStandIn,
    VllmPluginStandIn,
    VllmStandIn,
    published_exactly,
    values_digest,
)
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually

QUICK = {"serving__retry_s": 0.2, "serving__metrics_interval_s": 0.2, "serving__attempts": 2}
CHANGING = max(ARRAYS, key=lambda name: ARRAYS[name].size)
Parameters = dict[str, NDArray[np.float32]]


@pytest.fixture
def trainer(run: RealRun) -> Iterator[StepWriter]:
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=WeightsConfig(anchor_every=100)) as writer:
        yield writer


def parameters(version: int) -> Parameters:
    """Each version changes a few elements of the one before."""
    arrays = published_exactly(ARRAYS)
    arrays[CHANGING].reshape(-1)[: 2 * version] += np.float32(1.0)
    return arrays


def await_held(versions: RequestedVersions, version: int) -> Parameters:
    versions.request(version)
    eventually(lambda: versions.status().held == version, 300, f"version {version}, or {versions.status()}")
    return dict(versions.take(version).arrays)


def test_an_engine_fetches_deltas_onto_what_it_holds_and_names_why_a_version_cannot_be_had(
    run: RealRun, trainer: StepWriter
) -> None:
    for version in range(3):
        trainer.publish_version(parameters(version))
    assert [m.kind for _, m in sorted(visible_manifests(run, 2).items())] == ["full", "delta", "delta"]
    with closing(RequestedVersions(run.kafka, run.name, fetch_timeout_s=300.0)) as versions:
        assert params_digest(await_held(versions, 0)) == params_digest(parameters(0))
        with pytest.raises(VersionNotHeld, match="request it first"):
            versions.take(2)
        arrays = await_held(versions, 2)
        assert params_digest(arrays) == params_digest(parameters(2))

        damaged_delta(run, 3)
        versions.request(3)
        error = eventually(lambda: versions.status().error, 300, "an error")
        message = (
            f"tensor {CHANGING} of policy version 3 differs from its manifest; its changes since version 2 are in "
        )
        assert error.startswith(f"{message}chunk 0 (offset ")
        assert versions.status().held == 2
        with pytest.raises(VersionNotHeld, match="of policy version 3 differs"):
            versions.take(3)
        anchor = publish_version(run.kafka, run.name, parameters(4), model=MODEL_JSON)
        assert params_digest(await_held(versions, anchor)) == params_digest(parameters(4))


def test_a_version_that_is_held_stays_if_it_is_asked_for_again_while_another_arrives(
    run: RealRun, trainer: StepWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(2):
        trainer.publish_version(parameters(version))
    fetched, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        arrays = load_version(*args, **options)
        fetched.set()
        assert go_on.wait(300)
        return arrays

    with closing(RequestedVersions(run.kafka, run.name, fetch_timeout_s=300.0)) as versions:
        await_held(versions, 0)
        monkeypatch.setattr(requested_versions, "load_version", slow)
        versions.request(1)
        assert fetched.wait(300)
        versions.request(0)
        go_on.set()
        versions.close()  # Its thread has put away what it fetched.
        assert params_digest(versions.take(0).arrays) == params_digest(parameters(0))


def test_versions_in_files_are_fetched_like_those_on_the_log(run: RealRun, tmp_path: Path) -> None:
    config = WeightsConfig(url=str(tmp_path / "weights"), transport="files")
    with StepWriter(run.kafka, run.name, model=MODEL_JSON, config=config) as trainer:
        for version in range(2):
            trainer.publish_version(parameters(version))
    assert all(chunk.url for chunk in visible_manifests(run, 1)[1].chunks)
    with closing(RequestedVersions(run.kafka, run.name, fetch_timeout_s=300.0)) as versions:
        for version in range(2):
            assert params_digest(await_held(versions, version)) == params_digest(parameters(version))


def test_a_version_that_never_appears_is_given_up(run: RealRun, trainer: StepWriter) -> None:
    with closing(RequestedVersions(run.kafka, run.name, fetch_timeout_s=0.2)) as versions:
        versions.request(7)
        error = eventually(lambda: versions.status().error, 300, "an error")
        assert error == f"policy version 7 did not appear on {run.topic('policies')}"


def serves(engine: EngineStandIn, version: int, digest_of: int | None = None) -> bool:
    digest = values_digest(parameters(version if digest_of is None else digest_of))
    return not engine.paused and (engine.reported, engine.digest) == (str(version), digest)


def events(log: str, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def test_engines_that_fetch_themselves_follow_a_run_and_are_paused_for_no_damaged_version(
    run: RealRun, trainer: StepWriter
) -> None:
    with closing(VllmPluginStandIn()) as engine, serving_http(engine.answer) as url:
        trainer.publish_version(parameters(0))
        process = run.start("serve-weights", "--engine", "vllm-plugin", "--url", url, **QUICK)
        eventually(lambda: serves(engine, 0), 300, "the engine has version 0")
        # A serve-weights process that was killed has left this update open.
        engine.updating = True
        trainer.publish_version(parameters(1))
        eventually(lambda: serves(engine, 1), 300, "the engine has version 1")

        damaged_delta(run, 2)
        failed = eventually(lambda: events(run.log_of(process), "replica_update_failed")[1:], 300, "two attempts")
        message = (
            f"tensor {CHANGING} of policy version 2 differs from its manifest; its changes since version 1 are in "
        )
        assert failed[0]["error"].startswith(f"{message}chunk 0 (offset ")
        assert serves(engine, 1)
        once = ["pause", "load 0", "resume", "pause", "load 1", "resume"]
        assert engine.calls == once, "it was not even paused"
        # A full version heals it. Its load fails once: the version before is loaded again, whole, before it resumes.
        engine.refuses["load 3"] = 1
        assert publish_version(run.kafka, run.name, parameters(4), model=MODEL_JSON) == 3
        eventually(lambda: serves(engine, 3, digest_of=4), 300, "the engine has version 3")
        assert engine.calls[6:] == ["pause", "load 3", "load 1", "resume", "pause", "load 3", "resume"]

        engine.restart()
        eventually(lambda: serves(engine, 3, digest_of=4), 300, "the engine, started again, has version 3")
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)
    assert not engine.sampled_torn
    assert not list((run.directory / "runs" / run.name).glob("serving/*")), "no file is written"


def test_a_vllm_without_the_plug_in_is_named_as_such(run: RealRun, trainer: StepWriter) -> None:
    trainer.publish_version(parameters(0))
    with serving_http(VllmStandIn().answer) as url:
        process = run.start("serve-weights", "--engine", "vllm-plugin", "--url", url, **QUICK)
        unreachable = eventually(lambda: events(run.log_of(process), "replica_unreachable"), 300, "the reason")
        assert "/init_weight_transfer_engine answered 404" in unreachable[0]["error"]

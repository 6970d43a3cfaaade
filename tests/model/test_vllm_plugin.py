"""The plug-in for vLLM on a real broker: versions go from the log into the engine, never a damaged one."""

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
from rollstream.consumers.trainers.step_writer import StepWriter, publish_version
from rollstream.consumers.weights.chains import load_version
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.wire.params_digest import params_digest
from tests.support.damaged_weights import damaged_delta
from tests.support.runs import RealRun
from tests.support.serving_engines import (
    ARRAYS,
    MODEL_JSON,
    published_exactly,
)
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually

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

"""Versions of a learner of two processes: whoever follows, or exports, has the bits of the learner's parameters."""

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.adapters import merged
from rollstream.consumers.models.config import decoder_config
from rollstream.consumers.models.parameters import is_adapter
from rollstream.consumers.weights.chains import load_version
from rollstream.consumers.weights.content import Arrays, converted
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.topics.wire.params_digest import params_checksum, params_digest
from tests.broker.test_learner_team import STEPS, finish, kill_one, last_params, retrained, start, steps_of
from tests.support.producing import serving_http
from tests.support.runs import RealRun, with_batches
from tests.support.serving_engines import VllmStandIn, values_digest
from tests.support.waiting import eventually

SMALL_STEPS = {
    "learner__mesh__fsdp": 2,
    "learner__weights__keep_versions": 2 * STEPS,
    # These rates are so small that few values change in bfloat16.
    "learner__optimizer__learning_rate": 1e-6,
    "learner__optimizer__final_learning_rate": 1e-6,
}


def versions_of(run: RealRun) -> dict[int, Arrays]:
    """Every version of a run, each fetched alone with the versions it builds on."""
    manifests = read_manifests(run.kafka, run.name)
    with closing(ChunkFetcher(run.kafka, run.name)) as fetcher:
        return {version: load_version(fetcher, manifests, version) for version in sorted(manifests)}


@pytest.mark.long
def test_deltas_of_two_processes_have_the_bits_of_the_parameters_after_kill_9_and_in_an_engine_too(
    real_run: RealRun,
) -> None:
    """The versions are compared with those of a learner of the same steps that meets no fault, in float32."""
    run = with_batches(real_run, 2 * STEPS)
    undisturbed = with_batches(run.beside("u"), 2 * STEPS)
    engine = VllmStandIn()
    with serving_http(engine.answer) as url, WeightsFollower(run.kafka, run.name) as stays:
        run.start("serve-weights", "--url", url, serving__retry_s=0.2)
        try:
            kill_one(run, start(run, **SMALL_STEPS), 1)
            finish(run, *start(run, **SMALL_STEPS))
            finish(undisturbed, *start(undisturbed, learner__weights__dtype="float32", **SMALL_STEPS))
            exact = versions_of(undisturbed)
        finally:
            undisturbed.stop()
        expected = {version: converted(arrays, "bfloat16") for version, arrays in exact.items()}
        eventually(_serves(engine, expected[STEPS]), 300, "the engine has the newest version")
        followed = stays.wait_for(STEPS, 300)
    assert {step: params_checksum(arrays) for step, arrays in exact.items()} == {
        step: record.params_digest for step, record in steps_of(run).items()
    }, "the parameters of both runs are the same"
    digests = {version: params_digest(arrays) for version, arrays in expected.items()}
    assert {version: params_digest(arrays) for version, arrays in versions_of(run).items()} == digests
    assert (followed[0], params_digest(followed[1])) == (STEPS, digests[STEPS]), "who followed all the time"
    assert params_digest(last_params(run, STEPS)) == digests[STEPS], "who joins at the end"
    manifests = read_manifests(run.kafka, run.name)
    assert {version: manifest.digest for version, manifest in manifests.items()} == digests
    kinds = [manifests[version].kind for version in sorted(manifests)]
    assert kinds.count("full") == 2, "each team begins in full"
    assert kinds[0] == "full"
    for manifest in manifests.values():
        assert manifest.figures["processes"] == 2
        assert manifest.kind == "full" or len(manifest.chunks) == 2, "both processes sent their changes"


def _serves(engine: VllmStandIn, arrays: Arrays) -> Callable[[], bool]:
    wanted = str(STEPS), values_digest(arrays)
    return lambda: not engine.paused and (engine.reported, engine.digest) == wanted


@pytest.mark.long
def test_two_processes_train_adapters_beside_shares_of_the_model_and_an_export_has_them_merged(
    real_run: RealRun,
) -> None:
    run = with_batches(real_run, 2 * STEPS)
    settings: dict[str, object] = {"learner__mesh__fsdp": 2, "learner__model__lora__rank": 2}
    kill_one(run, start(run, **settings), 0)
    before = steps_of(run)
    finish(run, *start(run, **settings))
    steps = steps_of(run)
    assert sorted(steps) == list(range(STEPS + 1))
    assert {step: steps[step].params_digest for step in before} == {s: r.params_digest for s, r in before.items()}
    code, answer = retrained(run, **settings)
    assert (code, answer["same"], len(answer["steps"])) == (0, True, 3)
    manifests = read_manifests(run.kafka, run.name)
    deltas = [manifest for manifest in manifests.values() if manifest.kind == "delta"]
    assert deltas
    for manifest in deltas:
        assert manifest.figures["processes"] == 2
        changed = {tensor.name for tensor in manifest.tensors if tensor.changed}
        assert changed
        assert all(is_adapter(name) for name in changed), "the shares of the model stay as they are"
    process = run.start("weights", "export", "-o", str(run.directory / "out"))
    finish(run, process)
    expected = merged(decoder_config(manifests[STEPS].model), last_params(run, STEPS))
    for name, array in huggingface.load(run.directory / "out").items():
        np.testing.assert_array_equal(array, expected[name], strict=True)

"""A learner of adapters: killed and resumed, executed again, its versions small, served merged and exported."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.adapters import PEFT_CONFIG, PEFT_MODEL, merged
from rollstream.consumers.models.config import decoder_config
from rollstream.consumers.models.parameters import is_adapter
from rollstream.consumers.weights.chains import load_version
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.kafka import provisioning
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun
from tests.support.waiting import eventually

SETTINGS = {
    "learner__rollouts_per_step": 32,
    "learner__max_steps": 5,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 2,
    "learner__checkpoint__every_steps": 2,
    "learner__checkpoint__keep": 5,
    "learner__threads": 1,
    "learner__model__num_hidden_layers": 1,
    "learner__model__lora__rank": 2,
    "learner__max_policy_lag": 100,
}


@pytest.mark.long
def test_adapters_are_trained_resumed_executed_again_and_exported(
    real_run: RealRun, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, directory = real_run, real_run.directory
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    provisioning.apply(run.kafka, run.topics, run.name)
    send_batches(run.kafka, run.name, [random_batch(n, partition=n % 2) for n in range(6)])
    first = run.start("learn", **SETTINGS)
    eventually(lambda: 3 in read_steps(run.kafka, run.name, "default"), 200, "step 3 is on record")
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    send_batches(run.kafka, run.name, [random_batch(n, partition=n % 2) for n in range(6, 10)])
    second = run.start("learn", **SETTINGS)
    assert second.wait(300) == 0, run.log_of(second)[-3000:]
    assert '"event": "learner_resumed"' in run.log_of(second)
    steps = read_steps(run.kafka, run.name, "default")
    assert sorted(steps) == [0, 1, 2, 3, 4, 5]
    assert len({step.params_digest for step in steps.values()}) == 6

    again = run.start("retrain", "--from-step", "0", "--json", **SETTINGS)
    assert again.wait(300) == 0, run.log_of(again)[-3000:]
    report = json.loads(run.log_of(again).splitlines()[-1])
    assert (report["same"], len(report["steps"])) == (True, 6)

    manifests = read_manifests(run.kafka, run.name)
    model = decoder_config(manifests[5].model)
    assert model.lora.rank == 2
    deltas = [manifest for manifest in manifests.values() if manifest.kind == "delta"]
    assert deltas
    for manifest in deltas:
        assert all(not tensor.size_bytes for tensor in manifest.tensors if not is_adapter(tensor.name))
        assert manifest.figures["stored_bytes"] < 0.2 * manifest.figures["full_bytes"]
    with ChunkFetcher(run.kafka, run.name) as fetcher:
        published = load_version(fetcher, manifests, 5)

    whole, alone = directory / "whole", directory / "alone"
    for words in (("weights", "export", "-o", str(whole)), ("weights", "export", "-o", str(alone), "--adapters")):
        process = run.start(*words, **SETTINGS)
        assert process.wait(300) == 0, run.log_of(process)[-3000:]
    for name, array in huggingface.load(whole).items():
        np.testing.assert_array_equal(array, merged(model, published)[name])
    stored = safetensors_files.read(alone / PEFT_MODEL)
    assert len(stored) == 14
    for name, array in stored.items():
        np.testing.assert_array_equal(array, published[name.removeprefix("base_model.model.")])
    assert json.loads((alone / PEFT_CONFIG).read_text())["r"] == 2

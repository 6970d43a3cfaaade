"""A real vLLM is given adapters alone: it samples as each version's adapters say, on top of a base that stays."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.models.config import DecoderConfig, LoraConfig
from rollstream.consumers.models.huggingface import load, load_config
from rollstream.consumers.models.parameters import ADAPTER_A, adapter_shapes
from rollstream.consumers.trainers.step_writer import StepWriter
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.requests import SampleRequest
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import Rollout
from tests.engines.conftest import Vllm
from tests.engines.vllm_answers import LongRequest, Parameters, logprobs
from tests.support.batches import patient
from tests.support.runs import RealRun
from tests.support.serving_engines import published_exactly
from tests.support.vllm_server import vllm_server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

RANK = 4
LONG_PROMPT = np.random.default_rng(5).integers(10, 300, 400).tolist()
"""Several of vLLM's blocks of keys and values: a cache of prefixes that outlived a swap would be seen."""


@pytest.fixture(scope="module")
def vllm_with_adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    flags = ("--enable-scale-out", "--enable-lora", "--max-lora-rank", "8", "--served-model-name", "base")
    with vllm_server(checkpoint, log, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as url:
        yield Vllm(f"{url}/v1", "policy", checkpoint)


EVENS = """
from rollstream import Prompt, Score, SingleTurn

class Evens(SingleTurn):
    name = "evens"
    max_tokens = 8
    stop = ()

    def prompts(self, split):
        return [Prompt(example_id=str(n), text=f"{n}+{n}=") for n in range(10)]

    def score(self, prompt, text, truncated):
        return Score(reward=sum(ord(letter) % 2 == 0 for letter in text) / 8)
"""
"""An environment as a user writes one: even letters are paid."""


def with_adapters(config: DecoderConfig, base: Parameters, version: int) -> Parameters:
    """The base and the adapters of a version, which are large enough to change what is sampled."""
    random = np.random.default_rng(version)
    adapters = {
        name: (random.standard_normal(shape) * (1.0 if name.endswith(ADAPTER_A) else 0.2)).astype(np.float32)
        for name, shape in adapter_shapes(config).items()
    }
    return {**base, **published_exactly(adapters)}


def label(vllm: Vllm) -> str:
    with urllib.request.urlopen(f"{vllm.root}/weight_info", timeout=60) as answer:
        return str(json.loads(answer.read())["weight_version"])


def sample(vllm: Vllm) -> Completion:
    async def ask() -> Completion:
        async with CompletionsClient([vllm.url], model=vllm.model, timeout_s=300.0) as client:
            [completion] = await client.complete(
                SampleRequest(prompt=LONG_PROMPT, n=1, max_tokens=16, temperature=0.0, seed=0)
            )
            return completion

    return asyncio.run(ask())


def logprobs_of(completion: Completion, config: DecoderConfig, parameters: Parameters) -> NDArray[np.float32]:
    """Logprobs of an answer to the long prompt, by our decoder, which does not merge adapters into the projections."""
    return logprobs([*LONG_PROMPT, *completion.tokens.tolist()], config, parameters)[len(LONG_PROMPT) - 1 :]


def test_vllm_samples_with_the_adapters_of_each_version(run: RealRun, vllm_with_adapters: Vllm) -> None:
    vllm, lora = vllm_with_adapters, LoraConfig(rank=RANK, alpha=8.0)
    config = replace(load_config(vllm.directory), lora=lora)
    base = load(vllm.directory)
    provisioning.apply(run.kafka, TopicsConfig(partitions=1, weights_partitions=2), run.name)
    with StepWriter(patient(run.kafka), run.name, model=json.dumps(asdict(config))) as trainer:
        trainer.publish_version(with_adapters(config, base, 0))
        process = run.start("serve-weights", "--engine", "vllm-lora", "--url", vllm.url, serving__dtype="float32")
        answers = []
        for version in range(3):
            if version:
                trainer.publish_version(with_adapters(config, base, version))
            eventually(lambda v=version: label(vllm) == str(v), 600, f"vLLM to have the adapters of version {version}")
            completion = sample(vllm)
            assert set(completion.versions.tolist()) == {version}
            actual = logprobs_of(completion, config, with_adapters(config, base, version))
            np.testing.assert_allclose(actual, completion.logprobs, atol=5e-3)
            other = logprobs_of(completion, config, with_adapters(config, base, version + 1))
            assert np.abs(other - completion.logprobs).max() > 0.1, "adapters change what is computed"
            answers.append(tuple(completion.tokens.tolist()))
        assert len(set(answers)) == 3, "every version answers otherwise"

        request = LongRequest(vllm)
        request.start()
        eventually(request.in_flight, 300, "a request in flight")
        trainer.publish_version(with_adapters(config, base, 3))
        request.assert_changed(config, with_adapters(config, base, 2), with_adapters(config, base, 3))
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)


def test_a_run_trains_adapters_on_what_vllm_sampled_with_those_before(run: RealRun, vllm_with_adapters: Vllm) -> None:
    vllm, steps = vllm_with_adapters, 8
    (run.directory / "evens.py").write_text(EVENS)
    process = run.start(
        "run",
        task=f"{run.directory / 'evens.py'}:Evens",
        supervisor__workers=1,
        supervisor__ready_timeout_s=600,
        serving__engine="vllm-lora",
        serving__urls=[vllm.root],
        worker__inference_urls=[vllm.url],
        worker__model=vllm.model,
        worker__concurrency=2,
        grouping__batch_rollouts=16,
        learner__pretrained=vllm.directory,
        learner__model__lora__rank=RANK,
        learner__sequence_length=64,
        learner__rollouts_per_step=64,
        learner__max_steps=steps,
        learner__microbatch_rows=4,
        learner__compute_dtype="float32",
        learner__optimizer__learning_rate=1e-2,
        learner__weights__keep_versions=steps + 1,
    )
    assert process.wait(1200) == 0, run.log_of(process)[-3000:]

    rollouts = [record for record in run.read("rollouts") if isinstance(record, Rollout)]
    by_version = {r.lowest_version: r for r in rollouts if r.lowest_version == r.highest_version}
    assert len(by_version) >= 3, "workers sample with adapters while they are trained"
    assert sorted(read_steps(run.kafka, run.name, "default")) == list(range(steps + 1))
    assert ledger(run.kafka, run.name).problems == []
    assert verify(run.kafka, run.name).mismatches == []
    config = replace(load_config(vllm.directory), lora=LoraConfig(rank=RANK))
    base = load(vllm.directory)
    for version, record in by_version.items():
        pulled = run.start("weights", "export", str(version), "-o", str(run.directory), "--format", "npz")
        assert pulled.wait(300) == 0, run.log_of(pulled)
        with np.load(run.directory / f"version-{version}.npz") as stored:
            parameters = {**base, **{name: stored[name] for name in adapter_shapes(config)}}
        actual = logprobs(record.tokens.tolist(), config, parameters)[record.loss_mask[1:]]
        np.testing.assert_allclose(actual, record.logprobs[record.loss_mask], atol=5e-3, err_msg=f"version {version}")

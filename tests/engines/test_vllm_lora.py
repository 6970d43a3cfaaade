"""A real vLLM is given adapters alone: it samples as each version's adapters say, beside a base that stays."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.models.config import DecoderConfig, LoraConfig
from rollstream.consumers.models.decoder import logits
from rollstream.consumers.models.huggingface import load, load_config
from rollstream.consumers.models.parameters import ADAPTER_A, adapter_shapes
from rollstream.consumers.step_writer import StepWriter
from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.requests import SampleRequest
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka import provisioning
from tests.engines.conftest import Vllm
from tests.engines.vllm_answers import LongRequest, Parameters
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


def with_adapters(config: DecoderConfig, base: Parameters, version: int) -> Parameters:
    """The base, beside which each version has other adapters, large enough to change what is sampled."""
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


def logprobs(tokens: Sequence[int], config: DecoderConfig, parameters: Parameters) -> np.ndarray:  # type: ignore[type-arg]
    """Logprobs of all tokens but the first by our decoder, which computes adapters beside the projections."""
    row = jnp.asarray([tokens])
    given = {name: jnp.asarray(array) for name, array in parameters.items()}
    scores = jax.nn.log_softmax(logits(given, config, row, jnp.arange(row.shape[1])[None], jnp.ones_like(row)))
    return np.asarray(scores)[0, np.arange(row.shape[1] - 1), row[0, 1:]]


def logprobs_of(completion: Completion, config: DecoderConfig, parameters: Parameters) -> np.ndarray:  # type: ignore[type-arg]
    """Those of an answer to the long prompt."""
    return logprobs([*LONG_PROMPT, *completion.tokens.tolist()], config, parameters)[len(LONG_PROMPT) - 1 :]


def test_vllm_samples_with_the_adapters_of_each_version(run: RealRun, vllm_with_adapters: Vllm) -> None:
    vllm, lora = vllm_with_adapters, LoraConfig(rank=RANK, alpha=8.0)
    config = replace(load_config(vllm.directory), lora=lora)
    base = load(vllm.directory)
    provisioning.apply(run.kafka, TopicsConfig(partitions=1, weights_partitions=2), run.name)
    with StepWriter(run.kafka, run.name, model=json.dumps(asdict(config))) as trainer:
        trainer.publish_version(with_adapters(config, base, 0))
        process = run.start("serve-weights", "--engine", "vllm-lora", "--url", vllm.url, serving__dtype="float32")
        answers = []
        for version in range(3):
            if version:
                trainer.publish_version(with_adapters(config, base, version))
            eventually(lambda v=version: label(vllm) == str(v), 600, f"vLLM to have the adapters of version {version}")
            completion = sample(vllm)
            assert set(completion.versions.tolist()) == {version}
            found = logprobs_of(completion, config, with_adapters(config, base, version))
            np.testing.assert_allclose(found, completion.logprobs, atol=5e-3)
            other = logprobs_of(completion, config, with_adapters(config, base, version + 1))
            assert np.abs(other - completion.logprobs).max() > 0.1, "adapters change what is computed"
            answers.append(tuple(completion.tokens.tolist()))
        assert len(set(answers)) == 3, "every version answers otherwise"

        request = LongRequest(vllm)
        request.start()
        eventually(request.in_flight, 300, "a request in flight")
        trainer.publish_version(with_adapters(config, base, 3))
        request.assert_changed(2, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)

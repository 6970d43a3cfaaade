"""A real vLLM follows the policy versions of a run: it samples as their parameters say, and no request is lost."""

import asyncio
import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.decoder import logits
from rollstream.consumers.models.huggingface import SINGLE, load, load_config
from rollstream.consumers.serving.checkpoints import CheckpointDirectory
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.serving.engines import EngineHttp, VllmEngine
from rollstream.consumers.serving.replica_updater import ReplicaState, ReplicaUpdater
from rollstream.consumers.step_writer import StepWriter
from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.requests import SampleRequest
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import PolicyManifest
from tests.engines.conftest import Vllm
from tests.support.runs import RealRun
from tests.support.serving_engines import published_exactly
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PROMPT = [40, 41, 42]
Parameters = dict[str, NDArray[np.float32]]


def original(vllm: Vllm) -> Parameters:
    return published_exactly(load(vllm.directory))


def version_of(parameters: Parameters, version: int) -> Parameters:
    """Parameters of which each version answers otherwise: its head is another permutation of the same rows."""
    head = "lm_head.weight"
    return {**parameters, head: np.roll(parameters[head], 7 * version, axis=0)}


async def update(vllm: Vllm, directory: Path, label: str) -> None:
    async with EngineHttp(vllm.url, ServingConfig()) as http:
        engine = VllmEngine(http)
        await engine.pause()
        await engine.load(directory, label)
        await engine.resume()


@pytest.fixture
def served(vllm: Vllm) -> Iterator[Vllm]:
    """The vLLM of the session; other tests find it with the weights they know."""
    yield vllm
    asyncio.run(update(vllm, vllm.directory, "default"))


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield run
    run.stop()


def sample(vllm: Vllm) -> Completion:
    """A greedy answer, as a worker asks for it."""

    async def ask() -> Completion:
        async with CompletionsClient([vllm.url], model=vllm.model, timeout_s=300.0) as client:
            request = SampleRequest(prompt=PROMPT, n=1, max_tokens=16, temperature=0.0, seed=0)
            [completion] = await client.complete(request)
            return completion

    return asyncio.run(ask())


def assert_sampled_by(completion: Completion, config: DecoderConfig, parameters: Parameters) -> None:
    row = jnp.asarray([PROMPT + completion.tokens.tolist()])
    given = {name: jnp.asarray(array) for name, array in parameters.items()}
    scores = jax.nn.log_softmax(logits(given, config, row, jnp.arange(row.shape[1])[None], jnp.ones_like(row)))
    places = np.arange(len(PROMPT), row.shape[1]) - 1
    np.testing.assert_allclose(np.asarray(scores)[0, places, completion.tokens], completion.logprobs, atol=2e-3)


class LongRequest(threading.Thread):
    """A greedy request for 900 tokens, in flight while versions change."""

    def __init__(self, vllm: Vllm) -> None:
        super().__init__(daemon=True)
        self._vllm = vllm
        self.answer: dict[str, Any] = {}

    def run(self) -> None:
        sampling = {"max_tokens": 900, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        body = {"model": self._vllm.model, "token_ids": PROMPT, "sampling_params": sampling}
        request = urllib.request.Request(
            f"{self._vllm.root}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=1200) as answer:
            self.answer = json.loads(answer.read())

    def in_flight(self) -> bool:
        """Whether the engine has sampled tokens of it."""
        with urllib.request.urlopen(f"{self._vllm.root}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        [running] = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")]
        return running >= 1


def test_vllm_samples_with_each_version_and_a_request_in_flight_survives(run: RealRun, served: Vllm) -> None:
    config, parameters = load_config(served.directory), original(served)
    provisioning.apply(run.kafka, TopicsConfig(partitions=1, weights_partitions=2), run.name)
    with StepWriter(run.kafka, run.name, model=json.dumps(asdict(config))) as trainer:
        trainer.publish_version(version_of(parameters, 0))
        process = run.start("serve-weights", "--url", served.url, serving__dtype="float32")
        answers = []
        for version in range(3):
            if version:
                trainer.publish_version(version_of(parameters, version))
            completion = eventually(
                lambda v=version: answer if (answer := sample(served)).lowest_version == v else None,
                600,
                f"vLLM to sample with version {version}",
            )
            assert set(completion.versions.tolist()) == {version}
            assert_sampled_by(completion, config, version_of(parameters, version))
            answers.append(tuple(completion.tokens.tolist()))
        assert len(set(answers)) == 3, "every version answers otherwise"

        request = LongRequest(served)
        request.start()
        eventually(request.in_flight, 300, "a request in flight")
        trainer.publish_version(version_of(parameters, 3))
        request.join(1200)
        [choice] = request.answer["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 900)
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        assert [version for version, *_ in spans] == ["2", "3"], spans
        assert (spans[0][1], spans[0][2], spans[1][2]) == (0, spans[1][1], 900)
        assert spans[1][1] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, run.log_of(process)


class DamagedEngine(VllmEngine):
    """A vLLM whose disk loses the end of version 5."""

    async def load(self, directory: Path, label: str) -> None:
        if label == "5":
            data = (directory / SINGLE).read_bytes()
            (directory / SINGLE).write_bytes(data[: len(data) // 2])
        await super().load(directory, label)


def test_vllm_gets_the_last_good_version_back_before_it_samples_again(served: Vllm, tmp_path: Path) -> None:
    config, parameters = load_config(served.directory), original(served)

    def manifest(version: int) -> PolicyManifest:
        return PolicyManifest(
            version=version,
            learner="l",
            step=version,
            epoch="e",
            tensors=(),
            chunks=(),
            digest="",
            model=json.dumps(asdict(config)),
        )

    async def until(updater: ReplicaUpdater, version: int, failures: int) -> None:
        async with asyncio.timeout(600):
            while (updater.state, updater.version, updater.failures) != (ReplicaState.SERVING, version, failures):
                await asyncio.sleep(0.05)

    async def main() -> None:
        settings = ServingConfig(attempts=1, retry_s=0.2)
        with CheckpointDirectory(tmp_path / "good", keep_versions=2) as checkpoints:
            async with EngineHttp(served.url, settings) as http:
                updater = ReplicaUpdater(http.url, DamagedEngine(http), checkpoints, settings)
                running = asyncio.create_task(updater.run())
                await checkpoints.add(manifest(4), version_of(parameters, 4))
                await until(updater, 4, 0)
                await checkpoints.add(manifest(5), version_of(parameters, 5))
                await until(updater, 4, 1)
                running.cancel()

    asyncio.run(main())
    completion = sample(served)
    assert set(completion.versions.tolist()) == {4}
    assert_sampled_by(completion, config, version_of(parameters, 4))

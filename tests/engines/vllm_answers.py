"""Answers that a vLLM gives with known parameters, and requests that show which parameters answered."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.decoder import logits
from rollstream.consumers.models.huggingface import load
from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.requests import SampleRequest
from tests.engines.conftest import Vllm
from tests.support.serving_engines import published_exactly

PROMPT = [40, 41, 42]
_MOST_REQUESTS = 50
HEAD = "lm_head.weight"
Parameters = dict[str, NDArray[np.float32]]


def original(vllm: Vllm) -> Parameters:
    return published_exactly(load(vllm.directory))


def version_of(parameters: Parameters, version: int) -> Parameters:
    """Parameters with which each version gives another answer: its head is another permutation of the same rows."""
    return {**parameters, HEAD: np.roll(parameters[HEAD], 7 * version, axis=0)}


def few_changed(parameters: Parameters, version: int) -> Parameters:
    """Parameters with which each version gives another answer, although they differ in few elements: each version
    prefers another eight tokens."""
    head = parameters[HEAD].copy()
    head[100 + 8 * version : 108 + 8 * version] *= 64
    return {**parameters, HEAD: head}


def sample(vllm: Vllm) -> Completion:
    """A greedy answer, as a worker asks for it."""

    async def ask() -> Completion:
        async with CompletionsClient([vllm.url], model=vllm.model, timeout_s=300.0) as client:
            request = SampleRequest(prompt=PROMPT, n=1, max_tokens=16, temperature=0.0, seed=0)
            [completion] = await client.complete(request)
            return completion

    return asyncio.run(ask())


def logprobs(tokens: Sequence[int], config: DecoderConfig, parameters: Parameters) -> NDArray[np.float32]:
    """Logprobs of all tokens but the first, by our decoder. Shape [tokens - 1]."""
    row = jnp.asarray([tokens])
    given = {name: jnp.asarray(array) for name, array in parameters.items()}
    scores = jax.nn.log_softmax(logits(given, config, row, jnp.arange(row.shape[1])[None], jnp.ones_like(row)))
    return np.asarray(scores)[0, np.arange(row.shape[1] - 1), row[0, 1:]]


def assert_sampled_by(completion: Completion, config: DecoderConfig, parameters: Parameters) -> None:
    actual = logprobs([*PROMPT, *completion.tokens.tolist()], config, parameters)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(actual, completion.logprobs, atol=2e-3)


def _spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    [choice] = answer["choices"]
    return [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]


class LongRequest(threading.Thread):
    """Greedy requests for 900 tokens, one after the other, up to a limit or until a version changes within one."""

    def __init__(self, vllm: Vllm) -> None:
        super().__init__(daemon=True)
        self._vllm = vllm
        self.answers: list[dict[str, Any]] = []

    def run(self) -> None:
        sampling = {"max_tokens": 900, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        body = {"model": self._vllm.model, "token_ids": PROMPT, "sampling_params": sampling}
        request = urllib.request.Request(
            f"{self._vllm.root}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        # An idle machine samples 900 tokens in seconds, before an engine has fetched the next version.
        while len(self.answers) < _MOST_REQUESTS and not (self.answers and len(_spans(self.answers[-1])) > 1):
            with urllib.request.urlopen(request, timeout=1200) as answer:
                self.answers.append(json.loads(answer.read()))

    def in_flight(self) -> bool:
        """Whether the engine reports a running request."""
        with urllib.request.urlopen(f"{self._vllm.root}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        [running] = [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")]
        return running >= 1

    def assert_changed(self, config: DecoderConfig, before: Parameters, after: Parameters) -> None:
        """Assert that all requests are answered in full, and that the tokens of the last carry version 2 and then 3,
        with the logprobs of the parameters of each."""
        self.join(1200)
        for answer in self.answers:
            [choice] = answer["choices"]
            assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 900)
        spans = _spans(self.answers[-1])
        assert [version for version, *_ in spans] == ["2", "3"], spans
        assert (spans[0][1], spans[0][2], spans[1][2]) == (0, spans[1][1], 900)
        assert spans[1][1] > 0
        [choice] = self.answers[-1]["choices"]
        sampled = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
        for parameters, (version, start, end) in zip((before, after), spans, strict=True):
            actual = logprobs([*PROMPT, *choice["token_ids"]], config, parameters)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(actual[start:end], sampled[start:end], atol=1e-2, err_msg=f"version {version}")

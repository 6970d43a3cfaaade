"""The client: answers of ours and vLLM's, what is retried and what is not, over real sockets."""

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.inference.requests import SampleRequest
from rollstream.producers.worker.sampling import with_version
from tests.support.producing import TOKENIZER, SortingGenerator, nobody_listening, serving, serving_http


def vllm_choice(index: int, **change: Any) -> dict[str, Any]:
    """A choice as vLLM 0.11 answers it with return_token_ids and logprobs=1."""
    return {
        "index": index,
        "text": " 4",
        "logprobs": {
            "text_offset": [0, 2],
            "token_logprobs": [-0.25, -0.5 * (index + 1)],
            "tokens": [" 4", "<|im_end|>"],
            "top_logprobs": [{" 4": -0.25}, {"<|im_end|>": -0.5}],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [220, 151645],
        "prompt_logprobs": None,
        "prompt_token_ids": [17, 10, 17, 28],
        **change,
    }


def vllm_answer(*choices: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1760000000,
        "model": "Qwen/Qwen3-0.6B",
        "choices": list(choices),
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4, "prompt_tokens_details": None},
        "kv_transfer_params": None,
        **change,
    }


async def ask(base_url: str, *, n: int = 2, timeout_s: float = 60.0, **change: Any) -> list[Completion]:
    async with CompletionsClient([base_url], timeout_s=timeout_s, engine="rollstream") as client:
        request = {"max_tokens": 8, "temperature": 1.0, "seed": 5, **change}
        return await client.complete(SampleRequest(prompt="2+2=", n=n, **request))


def ask_fixed(answer: Any, **change: Any) -> list[Completion]:
    """Return the client's completions from a server that always gives this answer."""

    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(answer)

    with serving_http(handler) as base_url:
        return asyncio.run(ask(base_url, **change))


def test_a_vllm_answer_gives_tokens_as_sampled() -> None:
    asking: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/v1/completions"
        asking.append(await request.json())
        # vLLM does not promise the order of the choices.
        return web.json_response(vllm_answer(vllm_choice(1, finish_reason="length"), vllm_choice(0)))

    with serving_http(handler) as base_url:
        first, second = asyncio.run(ask(base_url, stop=["\n"]))
    assert asking == [
        {
            "model": "policy",
            "prompt": "2+2=",
            "n": 2,
            "max_tokens": 8,
            "temperature": 1.0,
            "seed": 5,
            "logprobs": 1,
            "return_token_ids": True,
            "top_p": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop": ["\n"],
        }
    ]
    assert (first.text, first.truncated, second.truncated) == (" 4", False, True)
    assert first.tokens.tolist() == [220, 151645]
    assert first.prompt_tokens.tolist() == [17, 10, 17, 28]
    assert (first.tokens.dtype, first.logprobs.dtype) == (np.int32, np.float32)
    assert first.logprobs.tolist() == [-0.25, -0.5]
    assert second.logprobs.tolist() == [-0.25, -1.0]
    assert (first.lowest_version, first.highest_version) == (-1, -1)
    assert first.sampling_params == {"temperature": "1.0", "max_tokens": "8", "seed": "5", "stop": "['\\n']"}


def test_a_server_without_a_version_needs_one_assumed() -> None:
    [completion] = ask_fixed(vllm_answer(vllm_choice(0)), n=1)
    assert with_version(completion, 7).highest_version == 7
    with pytest.raises(InferenceRefused, match=r"worker\.assume_version"):
        with_version(completion, -1)


def test_our_own_server_is_understood() -> None:
    with serving(SortingGenerator(versions=(4,)), replica_id="infer-3") as server:
        completions = asyncio.run(complete_when_ready(server.base_url))
    for completion in completions:
        assert completion.prompt_tokens.tolist() == TOKENIZER.encode("31>")
        assert completion.tokens.tolist() == [*TOKENIZER.encode(completion.text), TOKENIZER.eos_id]
        assert completion.logprobs.tolist() == [-0.125, -0.25, -0.375]
        assert (completion.lowest_version, completion.highest_version) == (4, 4)
        assert completion.replica_id == "infer-3"
        assert not completion.truncated


async def complete_when_ready(base_url: str) -> list[Completion]:
    async with CompletionsClient([base_url], timeout_s=60) as client:
        # The first attempts may find no weights yet: 503 is tried again.
        actual = await client.complete(SampleRequest(prompt="31>", n=3, max_tokens=8, temperature=1.0, seed=9))
        assert client.newest_version == await client.version() == 4
        return actual


def test_a_busy_server_is_asked_again_until_it_answers() -> None:
    seen = []

    async def handler(_request: web.Request) -> web.Response:
        seen.append(1)
        if len(seen) < 4:
            return web.json_response({"error": {"message": "busy"}}, status=[503, 429, 502][len(seen) - 1])
        return web.json_response(vllm_answer(vllm_choice(0)))

    with serving_http(handler) as base_url:
        assert len(asyncio.run(ask(base_url, n=1))) == 1
    assert len(seen) == 4


def test_a_refusal_is_not_asked_again_and_says_why() -> None:
    seen = []

    async def handler(_request: web.Request) -> web.Response:
        seen.append(1)
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)

    with serving_http(handler) as base_url, pytest.raises(InferenceRefused, match="prompt too long"):
        asyncio.run(ask(base_url))
    assert len(seen) == 1


def test_nobody_listening_is_an_error_with_the_address_after_the_deadline() -> None:
    with (
        nobody_listening() as address,
        pytest.raises(InferenceUnavailable, match=f"{address}/completions within 0.3 s"),
    ):
        asyncio.run(ask(address, timeout_s=0.3))


def test_a_server_that_never_answers_meets_the_deadline() -> None:
    async def handler(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    with serving_http(handler) as base_url, pytest.raises(InferenceUnavailable):
        asyncio.run(ask(base_url, timeout_s=0.3))


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(InferenceRefused, match="inference_urls"):
        asyncio.run(ask("not an address"))

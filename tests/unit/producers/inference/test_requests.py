"""Requests in the dialect of each engine."""

import pytest

from rollstream.producers.inference.requests import EngineName, SampleRequest, engine_of, engine_request, takes_tokens

REQUEST = SampleRequest(
    prompt=[1, 2], n=3, max_tokens=8, temperature=0.5, seed=7, stop=("\n",)
)  # fmt: skip


@pytest.mark.parametrize(
    ("models", "engine"),
    [
        ({"data": [{"id": "policy", "owned_by": "rollstream"}]}, "rollstream"),
        ({"data": [{"id": "policy", "owned_by": "vllm"}]}, "vllm"),
        ({"data": [{"id": "policy", "owned_by": "sglang"}]}, "sglang"),
        ({"data": [{"id": "policy", "owned_by": "organization"}]}, "rollstream"),
        ({"data": [3, {}]}, "rollstream"),
        ({"data": None}, "rollstream"),
        ({}, "rollstream"),
    ],
)
def test_a_server_tells_its_kind_by_the_owner_of_its_model(models: dict[str, object], engine: str) -> None:
    assert engine_of(models) == engine


def test_ours_is_asked_for_completions_with_token_ids() -> None:
    asked = engine_request(REQUEST, "rollstream", "policy")
    assert (asked.path, asked.dialect) == ("/v1/completions", "completions")
    assert asked.payload == {
        "model": "policy",
        "prompt": [1, 2],
        "n": 3,
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": 7,
        "logprobs": 1,
        "return_token_ids": True,
        "stop": ["\n"],
    }


def test_vllm_is_asked_on_its_route_of_tokens() -> None:
    asked = engine_request(REQUEST, "vllm", "policy")
    assert (asked.path, asked.dialect) == ("/inference/v1/generate", "generate")
    assert asked.payload["token_ids"] == [1, 2]
    assert asked.payload["sampling_params"] == {
        "n": 3,
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": 7,
        "logprobs": 0,
        "stop": ["\n"],
    }


def test_sglang_is_asked_on_its_own_route() -> None:
    asked = engine_request(REQUEST, "sglang", "policy")
    assert (asked.path, asked.dialect) == ("/generate", "sglang")
    assert asked.payload["input_ids"] == [1, 2]
    assert asked.payload["return_logprob"] is True
    assert asked.payload["sampling_params"] == {"n": 3, "max_new_tokens": 8, "temperature": 0.5, "stop": ["\n"]}


@pytest.mark.parametrize(("engine", "tokens"), [("rollstream", False), ("vllm", True), ("sglang", True)])
def test_engines_with_versions_of_tokens_take_token_ids(engine: EngineName, tokens: bool) -> None:
    assert takes_tokens(engine) is tokens

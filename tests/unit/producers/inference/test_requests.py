"""Requests in the dialect of each engine."""

from dataclasses import replace

import pytest

from rollstream.producers.inference.requests import (
    ENGINES,
    EngineName,
    Filters,
    SampleRequest,
    engine_request,
    listed_models,
    takes_tokens,
)

REQUEST = SampleRequest(
    prompt=[1, 2], n=3, max_tokens=8, temperature=0.5, seed=7, stop=("\n",)
)  # fmt: skip


@pytest.mark.parametrize(
    ("models", "engine", "version"),
    [
        ({"data": [{"id": "policy", "owned_by": "rollstream", "policy_version": 3}]}, "rollstream", 3),
        ({"data": [{"id": "policy", "owned_by": "vllm"}]}, "vllm", -1),
        ({"data": [{"id": "policy", "owned_by": "sglang"}]}, "sglang", -1),
        ({"data": [{"id": "policy", "owned_by": "organization"}]}, None, -1),
        ({"data": [{"owned_by": ["vllm"], "policy_version": True}, {"owned_by": "vllm"}]}, "vllm", -1),
        ({"data": [3, {"policy_version": "9"}]}, None, -1),
        ({"data": None}, None, -1),
        ({}, None, -1),
    ],
)
def test_a_list_of_models_tells_the_kind_of_server_and_its_newest_version(
    models: dict[str, object], engine: str | None, version: int
) -> None:
    assert listed_models(models) == (engine, version)


def test_ours_is_asked_for_completions_with_token_ids() -> None:
    request = engine_request(REQUEST, "rollstream", "policy", extensions=False)
    assert (request.path, request.dialect) == ("/v1/completions", "completions")
    assert request.payload == {
        "model": "policy",
        "prompt": [1, 2],
        "n": 3,
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": 7,
        "logprobs": 1,
        "return_token_ids": True,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": ["\n"],
    }


def test_completions_set_the_engines_own_parameters_only_where_a_server_takes_them() -> None:
    plain, extended = (
        engine_request(REQUEST, "rollstream", "policy", extensions=extensions).payload for extensions in (False, True)
    )
    assert {**plain, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} == extended


def test_the_experts_of_tokens_are_asked_for_where_a_server_knows_the_parameter() -> None:
    request = replace(REQUEST, routed_experts=True)
    asked = {
        (engine, extensions)
        for engine in ENGINES
        for extensions in (False, True)
        if "return_routed_experts" in engine_request(request, engine, "m", extensions=extensions).payload
    }
    assert asked == {("rollstream", True), ("sglang", True), ("sglang", False)}


@pytest.mark.parametrize("engine", ENGINES)
def test_filters_are_sent_and_the_tokens_that_they_keep_asked_for(engine: EngineName) -> None:
    payload = engine_request(
        replace(REQUEST, filters=Filters(top_p=0.9, min_p=0.1)), engine, "policy", extensions=True
    ).payload
    parameters = payload.get("sampling_params", payload)
    assert (parameters["top_p"], parameters["min_p"]) == (0.9, 0.1)
    assert parameters.get("top_k", -1) == -1
    assert payload.get("return_sampling_mask", engine == "vllm") is True


def test_vllm_is_asked_on_its_route_of_tokens() -> None:
    request = engine_request(REQUEST, "vllm", "policy", extensions=True)
    assert (request.path, request.dialect) == ("/inference/v1/generate", "generate")
    assert request.payload["token_ids"] == [1, 2]
    assert request.payload["sampling_params"] == {
        "n": 3,
        "max_tokens": 8,
        "temperature": 0.5,
        "seed": 7,
        "logprobs": 0,
        "stop": ["\n"],
    }


def test_sglang_is_asked_on_its_own_route() -> None:
    request = engine_request(REQUEST, "sglang", "policy", extensions=True)
    assert (request.path, request.dialect) == ("/generate", "sglang")
    assert request.payload["input_ids"] == [1, 2]
    assert request.payload["return_logprob"] is True
    assert request.payload["sampling_params"] == {"n": 3, "max_new_tokens": 8, "temperature": 0.5, "stop": ["\n"]}


@pytest.mark.parametrize(("engine", "tokens"), [("rollstream", False), ("vllm", True), ("sglang", True)])
def test_engines_with_versions_of_tokens_take_token_ids(engine: EngineName, tokens: bool) -> None:
    assert takes_tokens(engine) is tokens

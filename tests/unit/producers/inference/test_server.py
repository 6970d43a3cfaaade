"""The completions protocol over a real socket, asked by the official openai client."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from rollstream.producers.inference.replay_arrays import experts_of
from rollstream.producers.inference.server import InferenceServer
from rollstream.topics.errors import RollstreamError
from tests.support.log_lines import log_lines
from tests.support.producing import TOKENIZER, SortedRow, SortingGenerator, serving
from tests.support.waiting import eventually


def client_of(server: InferenceServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=300)


def get(server: InferenceServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def post(server: InferenceServer, body: bytes, *, url: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(url or f"{server.base_url}/completions", data=body, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def server() -> Iterator[InferenceServer]:
    with serving(SortingGenerator(versions=(3,)), max_rows=32) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        yield running


@pytest.fixture(scope="module")
def client(server: InferenceServer) -> Iterator[openai.OpenAI]:
    # One for the module: building a client reads the system's certificates, which takes longer than most tests here.
    with client_of(server) as asks:
        yield asks


def test_a_group_of_samples_comes_back_with_ids_logprobs_and_version(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="policy", prompt="429>", n=6, max_tokens=8, temperature=1.0, seed=11, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert {choice.text for choice in answer.choices} == {"249", "429"}
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.token_ids == [*TOKENIZER.encode(choice.text), TOKENIZER.eos_id]
        assert choice.prompt_token_ids == TOKENIZER.encode("429>")
        assert (choice.lowest_version, choice.highest_version) == (3, 3)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [-0.125, -0.25, -0.375, -0.5]
        assert choice.logprobs.tokens == [*choice.text, ""]
        assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert answer.policy_version == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 24)


def test_a_given_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:

    def texts(**seed: int) -> list[str]:
        answer = client.completions.create(model="policy", prompt="429>", n=16, max_tokens=8, **seed)
        return [choice.text for choice in answer.choices]

    assert texts(seed=1) == texts(seed=1)
    assert texts(seed=1) != texts(seed=2)
    assert texts() != texts()


def test_many_prompts_as_text_or_ids_keep_their_order(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="policy", prompt=["21>", "43>"], n=2, temperature=0)
    ids = client.completions.create(
        model="policy", prompt=[TOKENIZER.encode("21>"), TOKENIZER.encode("43>")], n=2, temperature=0
    )
    one = client.completions.create(model="policy", prompt=TOKENIZER.encode("21>"), temperature=0)
    assert [choice.text for choice in texts.choices] == ["12", "12", "34", "34"]
    assert [choice.text for choice in ids.choices] == ["12", "12", "34", "34"]
    assert [choice.text for choice in one.choices] == ["12"]
    assert one.choices[0].logprobs is None


def test_the_token_limit_ends_a_row_with_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="policy", prompt="4321>", max_tokens=2, temperature=0)
    assert answer.choices[0].text == "12"
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="policy", prompt="4321>", max_tokens=8, temperature=0, stop=["34", "9"], logprobs=1
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("12", "stop")
    assert choice.token_ids == TOKENIZER.encode("1234")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-0.125, -0.25, -0.375, -0.5]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"echo": True}, "echo"),
        ({"top_p": 0.9}, "top_p"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"typical_p": 0.1}}, "typical_p"),
        ({"best_of": 4}, "best_of"),
        ({"logprobs": 5}, "logprobs"),
        ({"n": 33}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["1"] * 5}, "stop"),
        ({"prompt": "abc"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "1" * 28}, "prompt"),
        ({"prompt": [1, 99]}, "prompt"),
        ({"prompt": ["1>", [True]]}, "prompt"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    request: dict[str, Any] = {"model": "policy", "prompt": "21>", **change}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**request)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_parameters_at_their_off_values_are_accepted(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="policy",
        prompt="21>",
        temperature=0,
        top_p=1,
        echo=False,
        stream=False,
        best_of=1,
        user="someone",
        extra_body={"top_k": -1, "min_p": 0.0, "return_token_ids": True},
    )
    assert answer.choices[0].text == "12"


def test_sampling_is_truncated_where_a_setting_allows_it() -> None:
    with serving(SortingGenerator(), truncated_sampling=True) as server, client_of(server) as client:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        ask: dict[str, Any] = {"model": "policy", "prompt": "21>", "temperature": 0}
        answer = client.completions.create(**ask, top_p=0.9, extra_body={"top_k": 5, "min_p": 0.1})
        assert answer.choices[0].text == "12"
        with pytest.raises(openai.BadRequestError, match="above 0"):
            client.completions.create(**ask, top_p=0)


class ExpertGenerator(SortingGenerator):
    """Names the position of each token as its expert."""

    def routed_experts(self, slot: int, length: int) -> NDArray[np.uint8]:
        return np.arange(length, dtype="|u1").reshape(-1, 1, 1)


def test_the_experts_of_prompt_and_answer_are_named_where_a_request_asks_for_them() -> None:
    with serving(ExpertGenerator()) as server:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        ask = {"prompt": "213>", "temperature": 0, "return_routed_experts": True}
        [whole] = post(server, json.dumps(ask).encode())[1]["choices"]
        experts = experts_of(whole["routed_experts"], 4, len(whole["token_ids"]))
        assert experts is not None
        assert experts.ravel().tolist() == [*range(4 + len(whole["token_ids"]) - 1), 255]
        [cut] = post(server, json.dumps({**ask, "stop": "2"}).encode())[1]["choices"]
        experts = experts_of(cut["routed_experts"], 4, 2)
        assert experts is not None
        assert experts.ravel().tolist() == [0, 1, 2, 3, 4, 255]
        [silent] = post(server, json.dumps({**ask, "return_routed_experts": False}).encode())[1]["choices"]
        assert "routed_experts" not in silent


class KeepingGenerator(SortingGenerator):
    """Keeps each token and the next one."""

    def decode(self) -> list[SortedRow]:
        return [row._replace(kept=[[token, token + 1] for token in row.tokens]) for row in super().decode()]


def test_filters_are_allowed_where_a_request_asks_for_the_tokens_that_they_keep() -> None:
    with serving(KeepingGenerator()) as server:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        ask = {"prompt": "213>", "temperature": 0, "top_p": 0.9, "stop": "2"}
        assert post(server, json.dumps(ask).encode())[0] == 400
        [choice] = post(server, json.dumps({**ask, "return_sampling_mask": True}).encode())[1]["choices"]
        assert choice["sampling_mask"] == [[token, token + 1] for token in choice["token_ids"]]
        assert len(choice["token_ids"]) == 2


def test_texts_are_tokenized_as_vllm_does_it(server: InferenceServer) -> None:
    def tokenize(body: dict[str, Any]) -> tuple[int, Any]:
        return post(server, json.dumps(body).encode(), url=f"{server.url}/tokenize")

    tokens = TOKENIZER.encode("42>")
    assert tokenize({"model": "policy", "prompt": "42>"}) == (200, {"tokens": tokens, "count": 3, "max_model_len": 28})
    assert tokenize({"model": "policy", "prompt": "abc"})[0] == 400
    assert tokenize({"model": "policy", "prompt": [1]})[0] == 400
    assert tokenize({"model": "other", "prompt": "42>"})[0] == 404


def test_models_health_and_metrics_say_what_runs() -> None:
    with serving(SortingGenerator(versions=(3,))) as server:
        eventually(lambda: get(server, "/readyz")[0] == 200, 60, "ready")
        body = json.dumps({"prompt": "21>", "n": 3, "temperature": 0}).encode()
        assert post(server, body)[1]["choices"][2]["text"] == "12"
        [model] = json.loads(get(server, "/v1/models")[1])["data"]
        assert (model["id"], model["policy_version"]) == ("policy", 3)
        assert get(server, "/livez")[0] == 200
        assert get(server, "/nowhere")[0] == 404
        lines = get(server, "/metrics")[1].splitlines()
    assert "rollstream_inference_policy_version 3.0" in lines
    assert "rollstream_inference_rows_total 3.0" in lines
    assert "rollstream_inference_completion_tokens_total 9.0" in lines
    assert "rollstream_inference_errors_total 1.0" in lines, "the path that there is not"


def test_before_the_first_weights_it_lives_but_is_not_ready() -> None:
    with serving(SortingGenerator(versions=(-1,))) as server, client_of(server) as client:
        assert get(server, "/livez")[0] == 200
        assert get(server, "/readyz")[0] == 503
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="policy", prompt="21>")
        assert refused.value.status_code == 503


def test_rows_start_in_the_order_of_arrival_as_slots_become_free() -> None:
    began, go_on = threading.Event(), threading.Event()

    def first_start_waits(_prompts: list[str]) -> None:
        began.set()
        assert go_on.wait(300)

    generator = SortingGenerator(before_generate=first_start_waits)
    with serving(generator, max_rows=8) as server, client_of(server) as client, ThreadPoolExecutor(8) as pool:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        asks = [pool.submit(client.completions.create, model="policy", prompt="10>", n=1)]
        assert began.wait(300)
        for n in (3, 4, 5, 3):
            asks.append(pool.submit(client.completions.create, model="policy", prompt=f"{n}{n}>", n=n))
            waiting = f"rollstream_inference_waiting_requests {len(asks) - 1}"
            eventually(lambda want=waiting: want in get(server, "/metrics")[1], 60, waiting)
        go_on.set()
        for ask in asks:
            ask.result(300)
    assert [prompts for _, prompts in generator.batches] == [
        ["10>"],
        ["33>"] * 3 + ["44>"] * 4 + ["55>"],
        ["55>"] * 4 + ["33>"] * 3,
    ]


def test_a_generator_that_fails_costs_its_batch_only_and_its_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail_on_nines(prompts: list[str]) -> None:
        if "99>" in prompts:
            raise ValueError("no nines")

    with serving(SortingGenerator(before_generate=fail_on_nines)) as server, client_of(server) as client:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        with pytest.raises(openai.InternalServerError, match="no nines"):
            client.completions.create(model="policy", prompt="99>")
        assert client.completions.create(model="policy", prompt="21>", temperature=0).choices[0].text == "12"
    assert ", in fail_on_nines" in log_lines(caplog)


def test_weights_that_cannot_be_followed_stop_the_server_rather_than_grow_stale() -> None:
    class LosesItsBroker(SortingGenerator):
        def refresh(self) -> int:
            if len(self.batches) > 0:
                raise RollstreamError("the weights topic is gone")
            return super().refresh()

    with serving(LosesItsBroker()) as server, client_of(server) as client:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        client.completions.create(model="policy", prompt="21>")
        eventually(lambda: get(server, "/livez")[0] == 503, 60, "the engine has stopped")
        assert "the weights topic is gone" in get(server, "/livez")[1]
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="policy", prompt="21>")

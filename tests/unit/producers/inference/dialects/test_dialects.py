"""Every dialect over a real socket: answers that our client reads in the same way, and bodies of any kind."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import renderers.client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from renderers.base import ParsedResponse

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.producers.inference.answers import Dialect, samples_of
from rollstream.producers.inference.server import InferenceServer
from tests.support.producing import CountingCodec, ScriptedGenerator, SortedRow, serving
from tests.support.waiting import eventually

TOKENIZER = CharacterTokenizer()
PROMPT = [*TOKENIZER.encode("user\nhi"), TOKENIZER.eos_id, *TOKENIZER.encode("\nassistant\n")]
SAMPLED = [*TOKENIZER.encode("hello you"), TOKENIZER.eos_id]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/inference/v1/generate",
    "sglang": "/generate",
}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "completions": {"prompt": PROMPT, "logprobs": 1, "max_tokens": 50},
    "generate": {"token_ids": PROMPT, "sampling_params": {"logprobs": 1, "max_tokens": 50}},
    "sglang": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 50}, "return_logprob": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[InferenceServer]:
    with serving(ScriptedGenerator(["hello you"], versions=(3,)), max_rows=8) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        yield running


def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=body, method="POST", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(server: InferenceServer, dialect: str, change: dict[str, Any] | None = None) -> Any:
    status, body = post(server.url + PATHS[dialect], json.dumps({**ASKED[dialect], **(change or {})}).encode())
    assert status == 200, body
    return json.loads(body)


@pytest.mark.parametrize("dialect", PATHS)
def test_our_client_reads_the_same_sample_from_every_dialect(server: InferenceServer, dialect: Dialect) -> None:
    [sample] = samples_of(ask(server, dialect), dialect, source=server.url)
    assert sample.prompt_tokens.tolist() == PROMPT
    assert sample.tokens.tolist() == SAMPLED
    assert sample.logprobs.tolist() == [-(i + 1) / 8 for i in range(len(SAMPLED))]
    assert sample.finish_reason == "stop"
    assert [(span.label, span.start, span.stop) for span in sample.spans] == [("3", 0, len(SAMPLED))]
    assert sample.text in ("hello you", "")
    assert sample.replica_id == "infer-0"


@pytest.mark.parametrize("dialect", PATHS)
def test_a_stop_ends_the_tokens_with_the_one_that_completed_it(server: InferenceServer, dialect: str) -> None:
    token = TOKENIZER.encode("o")[0]
    place = "sampling_params" if dialect in ("generate", "sglang") else ""

    def tokens_until(**stop: Any) -> tuple[list[int], Any]:
        change: dict[str, Any] = {place: {**ASKED[dialect][place], **stop}} if place else stop
        answer = ask(server, dialect, change)
        if dialect == "sglang":
            return answer["output_ids"], answer["meta_info"]["finish_reason"]["matched"]
        return answer["choices"][0]["token_ids"], answer["choices"][0]["stop_reason"]

    assert tokens_until(stop=["lo y", "zz"]) == (TOKENIZER.encode("hello y"), "lo y")
    assert tokens_until(stop_token_ids=[token]) == (TOKENIZER.encode("hello"), token)


def test_a_stop_token_of_the_request_is_no_part_of_a_chats_content(server: InferenceServer) -> None:
    change = {"stop_token_ids": TOKENIZER.encode("o")}
    assert ask(server, "chat", change)["choices"][0]["message"]["content"] == "hell"
    body = json.dumps({**ASKED["chat"], **change, "stream": True}).encode()
    _, answer = post(server.url + PATHS["chat"], body)
    events = [json.loads(line) for line in answer.decode().replace("data: ", "").splitlines() if line[:1] == "{"]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "hell"


def test_vllms_generate_names_tokens_in_both_ways(server: InferenceServer) -> None:
    answer = ask(server, "generate", {"request_id": "r-1", "cache_salt": "v3", "priority": 2})
    [choice] = answer["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in SAMPLED]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == SAMPLED
    assert answer["request_id"] == "r-1"
    assert answer["prompt_token_ids"] == PROMPT
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(SAMPLED)}]


@pytest.mark.parametrize("dialect", ["completions", "generate"])
def test_a_stream_of_tokens_holds_what_the_whole_answer_does(server: InferenceServer, dialect: str) -> None:
    whole = ask(server, dialect)["choices"][0]
    _, body = post(server.url + PATHS[dialect], json.dumps({**ASKED[dialect], "stream": True}).encode())
    events = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
    assert events.pop() == "[DONE]"
    parts = [json.loads(line)["choices"][0] for line in events]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    name = "content" if dialect == "generate" else "token_logprobs"
    assert [entry for part in parts for entry in part["logprobs"][name]] == whole["logprobs"][name]
    assert "".join(part.get("text", "") for part in parts) == whole.get("text", "")
    assert parts[-1]["finish_reason"] == "stop"
    assert parts[-1]["weight_versions"] == whole["weight_versions"]


class FollowedGenerator(ScriptedGenerator):
    """Decodes the next tokens once the client has read the last ones, so that each step is a part of its own."""

    tokenizer = CountingCodec()

    def __init__(self, text: str) -> None:
        super().__init__([text], versions=(3,), tokens_at_once=8)
        self.go_on = threading.Semaphore(1)

    def decode(self) -> list[SortedRow]:
        assert self.go_on.acquire(timeout=300)
        return super().decode()


@pytest.mark.parametrize("dialect", ["chat", "completions", "generate"])
def test_for_a_stream_each_token_is_decoded_a_few_times_however_long_the_answer_is(dialect: str) -> None:
    text, generator, parts = "ab" * 750, FollowedGenerator("ab" * 750), []
    limit = {"sampling_params": {"logprobs": 1, "max_tokens": 2000}} if dialect == "generate" else {"max_tokens": 2000}
    with serving(generator) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        CountingCodec.decoded = 0
        body = json.dumps({**ASKED[dialect], **limit, "stream": True}).encode()
        request = urllib.request.Request(running.url + PATHS[dialect], data=body, method="POST")
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    parts.append(json.loads(line.removeprefix(b"data: "))["choices"][0])
                    generator.go_on.release()
        decoded = CountingCodec.decoded
    assert [token for part in parts for token in part["token_ids"]] == [*TOKENIZER.encode(text), TOKENIZER.eos_id]
    assert len(parts) >= len(text) / 8
    assert decoded <= 12 * len(text)
    if dialect == "completions":
        assert [offset for part in parts for offset in part["logprobs"]["text_offset"]] == [*range(len(text) + 1)]


def test_texts_chats_and_tokens_are_converted_as_vllm_does_it(server: InferenceServer) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = json.loads(post(f"{server.url}/tokenize", chat)[1])
    assert answer == {"tokens": PROMPT, "count": len(PROMPT), "max_model_len": 2048}
    closed = json.dumps({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}).encode()
    assert json.loads(post(f"{server.url}/tokenize", closed)[1])["tokens"] == PROMPT[: -len("assistant\n")]
    back = json.dumps({"tokens": TOKENIZER.encode("hi")}).encode()
    assert json.loads(post(f"{server.url}/detokenize", back)[1]) == {"prompt": "hi"}
    assert post(f"{server.url}/detokenize", b'{"tokens": [999]}')[0] == 400
    assert post(f"{server.url}/detokenize", b"{}")[0] == 400


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message=True is not supported"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens=True is not supported"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs="),
        ({"messages": MESSAGES, "add_generation_prompt": "no"}, "add_generation_prompt='no' must be true or false"),
        ({"messages": MESSAGES, "nonsense": 1}, "unrecognized request argument supplied: 'nonsense'"),
        ({"messages": MESSAGES, "prompt": "hi"}, "give either prompt or messages"),
        ({"prompt": "hi", "add_special_tokens": True}, "add_special_tokens=True is not supported"),
        ({"prompt": "hi", "nonsense": 1}, "unrecognized request argument supplied: 'nonsense'"),
    ],
)
def test_a_field_that_would_change_the_tokens_of_a_text_or_chat_is_refused_by_name(
    server: InferenceServer, body: dict[str, Any], named: str
) -> None:
    status, answer = post(f"{server.url}/tokenize", json.dumps(body).encode())
    assert status == 400
    assert named in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "off", [{"add_special_tokens": False, "return_token_strs": None}, {"continue_final_message": False, "user": "me"}]
)
def test_fields_of_vllm_that_are_turned_off_change_no_tokens(server: InferenceServer, off: dict[str, Any]) -> None:
    body = {"model": "policy", "messages": MESSAGES, "add_generation_prompt": True, **off}
    assert json.loads(post(f"{server.url}/tokenize", json.dumps(body).encode())[1])["tokens"] == PROMPT


def test_the_librarys_client_takes_our_evidence(server: InferenceServer) -> None:
    class PlainRenderer:
        """A renderer of the kind that users of the library may write, over our characters."""

        supports_tools = False

        def render(self, *_messages: Any, **_options: Any) -> Any:
            return None

        def get_stop_token_ids(self) -> list[int]:
            return [TOKENIZER.eos_id]

        def parse_response(self, token_ids: list[int], **_options: Any) -> ParsedResponse:
            return ParsedResponse(content=TOKENIZER.decode(token_ids))

    async def generate() -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            answer: dict[str, Any] = await renderers.client.generate(
                client=client,
                renderer=PlainRenderer(),
                messages=[],
                model="policy",
                prompt_ids=PROMPT,
                sampling_params={"max_tokens": 50, "temperature": 1.0},
                cache_salt="v3",
                extra_headers={"X-Session-ID": "s-1"},
            )
            with pytest.raises(renderers.client.OverlongPromptError, match="2048"):
                await renderers.client.generate(
                    client=client, renderer=PlainRenderer(), messages=[], model="policy", prompt_ids=PROMPT * 200
                )
            return answer

    answer = asyncio.run(generate())
    assert answer["completion_ids"] == SAMPLED
    assert answer["completion_logprobs"] == [-(i + 1) / 8 for i in range(len(SAMPLED))]
    assert (answer["content"], answer["finish_reason"]) == ("hello you", "stop")


# ---------------------------------------------------------------------- bodies of any kind

_NAMES = st.sampled_from(
    sorted(
        {
            "messages", "prompt", "token_ids", "input_ids", "text", "sampling_params", "n", "best_of", "max_tokens",
            "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "logprobs",
            "top_logprobs", "stream", "stream_options", "tools", "tool_choice", "previous_turn", "model", "user",
            "return_logprob", "request_id", "response_format", "logit_bias", "tokens", "role", "content",
        }
    )
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([[1, 5], ["user"], 10**400, "\ud800", "hi", -1, 1e308, "stop"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def mutated(dialect: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are right except for a few fields."""
    return st.dictionaries(_NAMES, _VALUES, max_size=3).map(lambda change: {**ASKED.get(dialect, {}), **change})


@pytest.mark.parametrize("dialect", [*PATHS, "/tokenize", "/detokenize"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_makes_the_server_fail(server: InferenceServer, dialect: str, data: st.DataObject) -> None:
    body = data.draw(mutated(dialect) | _VALUES)
    status, answer = post(server.url + PATHS.get(dialect, dialect), json.dumps(body).encode())
    assert status in (200, 400, 404), answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b"NaN"]
)
@pytest.mark.parametrize("path", PATHS.values())
def test_bytes_that_are_no_request_are_refused(server: InferenceServer, path: str, body: bytes) -> None:
    status, answer = post(server.url + path, body, **{"Content-Type": "application/json; charset=nonsense"})
    assert status == 400
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"

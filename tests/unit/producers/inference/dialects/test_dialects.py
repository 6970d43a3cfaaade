"""Every dialect over a real socket: answers that our client reads in the same way, and bodies of any kind."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.producers.inference.answers import Dialect, samples_of
from rollstream.producers.inference.chat.conversations import ConversationMemory
from rollstream.producers.inference.chat.plain_template import PlainTemplate
from rollstream.producers.inference.dialects.chat_completions import ChatCompletions
from rollstream.producers.inference.dialects.completions import Completions
from rollstream.producers.inference.dialects.sampling_parameters import RequestLimits
from rollstream.producers.inference.server import InferenceServer
from tests.support.producing import CountingCodec, ScriptedGenerator, SortedRow, serving
from tests.support.waiting import eventually

TOKENIZER = CharacterTokenizer()
PROMPT = [*TOKENIZER.encode("user\nhi"), TOKENIZER.eos_id, *TOKENIZER.encode("\nassistant\n")]
SAMPLED = [*TOKENIZER.encode("hello you"), TOKENIZER.eos_id]
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "completions": {"prompt": PROMPT, "logprobs": 1, "max_tokens": 50},
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

    def tokens_until(**stop: Any) -> tuple[list[int], Any]:
        answer = ask(server, dialect, stop)
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


def test_a_stream_of_tokens_holds_what_the_whole_answer_does(server: InferenceServer) -> None:
    whole = ask(server, "completions")["choices"][0]
    _, body = post(server.url + PATHS["completions"], json.dumps({**ASKED["completions"], "stream": True}).encode())
    events = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
    assert events.pop() == "[DONE]"
    parts = [json.loads(line)["choices"][0] for line in events]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    logprobs = [entry for part in parts for entry in part["logprobs"]["token_logprobs"]]
    assert logprobs == whole["logprobs"]["token_logprobs"]
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


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_for_a_stream_each_token_is_decoded_a_few_times_however_long_the_answer_is(dialect: str) -> None:
    text, generator, parts = "ab" * 750, FollowedGenerator("ab" * 750), []
    with serving(generator) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        CountingCodec.decoded = 0
        body = json.dumps({**ASKED[dialect], "max_tokens": 2000, "stream": True}).encode()
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


def test_a_text_is_converted_as_vllm_does_it(server: InferenceServer) -> None:
    body = {"model": "policy", "prompt": "hi", "add_special_tokens": False, "user": "me"}
    answer = json.loads(post(f"{server.url}/tokenize", json.dumps(body).encode())[1])
    tokens = TOKENIZER.encode("hi")
    assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": 2048}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "hi", "add_special_tokens": True}, "add_special_tokens=True is not supported"),
        ({"prompt": "hi", "nonsense": 1}, "unrecognized request argument supplied: 'nonsense'"),
        ({"prompt": [1]}, "prompt must be a string"),
    ],
)
def test_a_field_that_would_change_the_tokens_of_a_text_is_refused_by_name(
    server: InferenceServer, body: dict[str, Any], named: str
) -> None:
    status, answer = post(f"{server.url}/tokenize", json.dumps(body).encode())
    assert status == 400
    assert named in json.loads(answer)["error"]["message"]


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


@pytest.mark.parametrize("dialect", [*PATHS, "/tokenize"])
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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_larger_than_the_context_is_cut_to_its_room(name: str) -> None:
    tokenizer = CharacterTokenizer()
    limits = RequestLimits(max_model_len=40, max_rows=8, vocab_size=tokenizer.vocab_size, truncated_sampling=False)
    chat = ChatCompletions(tokenizer, limits, PlainTemplate(tokenizer), ConversationMemory(1000))
    assert chat.parse({**ASKED["chat"], name: 3000}, "").sampling.max_tokens == 40 - len(PROMPT)
    assert chat.parse({**ASKED["chat"], name: 3}, "").sampling.max_tokens == 3
    completions = Completions(tokenizer, limits)
    assert completions.parse({"prompt": PROMPT, "max_tokens": 3000}, "").sampling.max_tokens == 40 - len(PROMPT)


@pytest.mark.parametrize("dialect", PATHS)
def test_every_optional_field_may_be_null(dialect: str) -> None:
    tokenizer = CharacterTokenizer()
    limits = RequestLimits(max_model_len=100, max_rows=8, vocab_size=tokenizer.vocab_size, truncated_sampling=False)
    chat = ChatCompletions(tokenizer, limits, PlainTemplate(tokenizer), ConversationMemory(1000))
    parser: Any = chat if dialect == "chat" else Completions(tokenizer, limits)
    needed = {name: ASKED[dialect][name] for name in ("messages", "prompt") if name in ASKED[dialect]}
    of_openai = completion_create_params if dialect == "chat" else text_create_params
    own = {"top_k", "min_p", "stop_token_ids", "return_token_ids", "chat_template_kwargs", "previous_turn", "best_of"}
    fields = own | of_openai.CompletionCreateParamsNonStreaming.__annotations__.keys() - {"messages", "prompt"}
    assert {"stop", "logprobs", "max_tokens", "stream", "suffix" if dialect == "completions" else "tools"} <= fields
    for name in sorted(fields):
        assert parser.parse({**needed, name: None}, "") == parser.parse(needed, ""), name

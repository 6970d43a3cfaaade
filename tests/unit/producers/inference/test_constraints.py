"""Constraints on the form of answers: whatever is sampled among the allowed tokens has the form."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.constraints import Constraints
from rollstream.producers.inference.decoding import DecodeRow, TokenMask
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.token_codec import TokenCodec
from tests.support.checkpoints import write_tokenizer
from tests.support.producing import ScriptedGenerator, SortedRow, serving
from tests.support.waiting import eventually

SCHEMA = {
    "type": "object",
    "properties": {
        "total": {"type": "integer", "minimum": -9, "maximum": 99},
        "sure": {"enum": [True, "perhaps"]},
        "why": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["total", "sure"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "subtract")
]
ADD = {"type": "function", "function": {"name": "add"}}


def draw(mask: TokenMask, codec: TokenCodec, seed: int) -> str:
    """The text of an answer, each of whose tokens is any of the allowed ones."""
    random, tokens = np.random.default_rng(seed), list[int]()
    while not tokens or tokens[-1] not in codec.eos_ids:
        tokens.append(allowed_token(mask, random))
        assert len(tokens) < 100_000
    return codec.decode(tokens)


def allowed_token(mask: TokenMask, random: np.random.Generator) -> int:
    bits = np.unpackbits(mask.allowed().view(np.uint8), bitorder="little")
    token = int(random.choice(np.flatnonzero(bits)))
    mask.accept(token)
    return token


@pytest.fixture(scope="module", params=["characters", "tokenizer.json"])
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenCodec:
    if request.param == "characters":
        return CharacterTokenizer()
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, ['{"total": 17, "sure": "perhaps"}, <tool_call>'], 300)
    return load_tokenizer(directory)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_answer_to_a_schema_is_valid(codec: TokenCodec, seed: int) -> None:
    begin = Constraints(codec, codec.vocab_size + 40, call_markers=True).of({"response_format": FORM}, ())
    assert begin is not None
    jsonschema.validate(json.loads(draw(begin(), codec, seed)), SCHEMA)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), choice=st.sampled_from([ADD, "required"]), parallel=st.booleans())
def test_any_answer_to_a_forced_choice_calls_a_tool(codec: TokenCodec, seed: int, choice: Any, parallel: bool) -> None:
    constraints = Constraints(codec, codec.vocab_size, call_markers=True)
    begin = constraints.of({"tool_choice": choice, "parallel_tool_calls": parallel}, TOOLS)
    assert begin is not None
    message = hermes.parse(draw(begin(), codec, seed))
    assert message.content == ""
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert {call.name for call in message.tool_calls} <= ({"add"} if choice == ADD else {"add", "subtract"})
    assert len(message.tool_calls) >= 1
    assert len(message.tool_calls) == 1 or (parallel and choice == "required")


def test_several_tools_are_called_only_if_calls_may_be_parallel() -> None:
    codec = CharacterTokenizer()
    constraints = Constraints(codec, codec.vocab_size, call_markers=True)
    begin = constraints.of({"tool_choice": "required"}, TOOLS)
    assert begin is not None
    numbers = {len(hermes.parse(draw(begin(), codec, seed)).tool_calls) for seed in range(20)}
    assert len(numbers) > 1


@pytest.mark.parametrize("body", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"response_format": {}}])
def test_a_request_without_a_constraint_has_none(body: dict[str, Any]) -> None:
    assert Constraints(CharacterTokenizer(), 97, call_markers=False).of(body, TOOLS) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "divide"}}}, "names no tool of the request"),
        ({"tool_choice": 3}, "names no tool of the request"),
        ({"tool_choice": "required", "response_format": FORM}, "excludes a response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format.type='grammar' is not supported here"),
        ({"response_format": {"type": "json_schema"}}, "schema must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "(?s)cannot be compiled: .*nonsense",
        ),
    ],
)
def test_what_cannot_be_constrained_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Constraints(CharacterTokenizer(), 97, call_markers=True).of(body, TOOLS)


def test_forced_calls_need_a_template_whose_calls_are_known() -> None:
    with pytest.raises(BadRequest, match="this chat template marks calls in another form"):
        Constraints(CharacterTokenizer(), 97, call_markers=False).of({"tool_choice": "required"}, TOOLS)


def test_without_the_package_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadRequest, match=r"tool_choice='required' is not supported here.*rollstream\[constraints\]"):
        Constraints(CharacterTokenizer(), 97, call_markers=True).of({"tool_choice": "required"}, TOOLS)


class _RandomGenerator(ScriptedGenerator):
    """Samples any token that the constraint of a row allows."""

    def __init__(self) -> None:
        super().__init__(["unconstrained"], tokens_at_once=5)

    def start(self, rows: Sequence[DecodeRow]) -> list[int]:
        slots = super().start(rows)
        for slot, row in zip(slots, rows, strict=True):
            if row.request.constraint is not None:
                text = draw(row.request.constraint(), self.tokenizer, row.seed)
                tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_id]
                self.decoding[slot] = SortedRow(slot, tokens, [-0.5] * len(tokens), "stop")
        return slots


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(_RandomGenerator()) as server:
        eventually(lambda: server.version >= 0, 60, "weights are loaded")
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("stream", [False, True])
def test_the_server_answers_in_the_form_that_a_client_asks_for(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "1?"}], "n": 3}

    def answers(**more: Any) -> list[Any]:
        if not stream:
            return [choice.message for choice in client.chat.completions.create(**asked, **more).choices]
        with client.chat.completions.stream(**asked, **more) as events:
            for _event in events:
                pass
            return [choice.message for choice in events.get_final_completion().choices]

    for message in answers(response_format=FORM):
        jsonschema.validate(json.loads(message.content), SCHEMA)
    for message in answers(tools=TOOLS, tool_choice=ADD):
        (call,) = message.tool_calls
        assert call.function.name == "add"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert {message.content for message in answers()} == {"unconstrained"}

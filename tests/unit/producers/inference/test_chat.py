"""Chats over a real socket, asked by the official openai client: tools, streams, and turns continued from tokens."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rollstream.consumers.models.tokenizer import CharacterTokenizer
from rollstream.producers.inference.server import InferenceServer
from tests.support.producing import ScriptedGenerator, SortedRow, serving
from tests.support.waiting import eventually

TOKENIZER = CharacterTokenizer()
CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}},
    }
]
SCRIPT = [f"I add.\n{CALL}", f"{CALL}\n{CALL}", "42", "bye"]


@pytest.fixture(scope="module")
def server() -> Iterator[InferenceServer]:
    with serving(ScriptedGenerator(SCRIPT, versions=(3,), tokens_at_once=3), max_rows=32) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        yield running


@pytest.fixture(scope="module")
def client(server: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=300) as asks:
        yield asks


def tokens_of(*messages: tuple[str, str]) -> list[int]:
    ids: list[int] = []
    for role, content in messages:
        ids += [*TOKENIZER.encode(f"{role}\n{content}"), TOKENIZER.eos_id, *TOKENIZER.encode("\n")]
    return ids


def test_a_first_turn_is_rendered_with_its_tools_and_answered_in_every_dialects_fields(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "20+22?"}], tools=TOOLS, logprobs=True, temperature=0
    )
    [choice] = answer.choices
    tools = json.dumps(TOOLS[0]["function"], separators=(",", ":"))
    prompt = tokens_of(("system", f"<tools>\n{tools}\n</tools>"), ("user", "20+22?")) + TOKENIZER.encode("assistant\n")
    sampled = [*TOKENIZER.encode(SCRIPT[0]), TOKENIZER.eos_id]
    assert answer.prompt_token_ids == choice.prompt_token_ids == prompt
    assert choice.token_ids == choice.response_token_ids == sampled
    assert choice.message.content == "I add.\n"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 20, "b": 22})
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-(i + 1) / 8 for i in range(len(sampled))]
    assert [entry.token_id for entry in choice.logprobs.content] == sampled
    assert choice.weight_versions == [{"version": "3", "start": 0, "end": len(sampled)}]
    assert answer.metadata == {"weight_version": "3", "weight_versions": choice.weight_versions}
    assert (answer.policy_version, choice.lowest_version, choice.highest_version) == (3, 3, 3)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(sampled))


def tool_loop(client: openai.OpenAI, **extra: Any) -> list[Any]:
    """Play three turns with tools, and a fourth turn by the user; return the answers."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "20+22?"}]
    answers = []
    for _ in range(3):
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, logprobs=True, temperature=0, **extra
        )
        answers.append(answer)
        messages.append(answer.choices[0].message)
        for call in answer.choices[0].message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
    messages.append({"role": "user", "content": "Thanks."})
    answers.append(client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, **extra))
    return answers


def test_a_loop_of_tools_is_one_sequence_of_tokens(client: openai.OpenAI) -> None:
    # If it were rendered again, the second answer would lose the line break between its calls.
    answers = tool_loop(client)
    assert [answer.choices[0].finish_reason for answer in answers] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert answers[1].choices[0].message.content is None
    assert len(answers[1].choices[0].message.tool_calls or []) == 2
    between = [tokens_of(("tool", "42")), tokens_of(("tool", "42"), ("tool", "42")), tokens_of(("user", "Thanks."))]
    for before, after, messages in zip(answers, answers[1:], between, strict=False):
        assert after.prompt_token_ids == [
            *before.prompt_token_ids,
            *before.choices[0].token_ids,
            *TOKENIZER.encode("\n"),
            *messages,
            *TOKENIZER.encode("assistant\n"),
        ]


def test_a_turn_cut_off_is_closed_and_continued(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "20+22?"}]
    first = client.chat.completions.create(model="policy", messages=messages, max_completion_tokens=3)
    assert first.choices[0].finish_reason == "length"
    assert first.choices[0].message.content == "I a"
    messages += [first.choices[0].message, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model="policy", messages=messages)
    assert second.prompt_token_ids == [
        *first.prompt_token_ids,
        *first.choices[0].token_ids,
        TOKENIZER.eos_id,
        *TOKENIZER.encode("\n"),
        *tokens_of(("user", "Go on.")),
        *TOKENIZER.encode("assistant\n"),
    ]


def test_a_rewritten_history_is_rendered_as_a_whole(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "20+22?"}]
    first = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    messages += [{"role": "assistant", "content": "rewritten"}, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    rest = second.prompt_token_ids[len(first.prompt_token_ids) :]
    assert TOKENIZER.decode(rest) == "rewritten\nuser\nGo on.\nassistant\n"


def test_the_client_may_send_the_turn_that_a_server_has_forgotten() -> None:
    messages: list[Any] = [{"role": "user", "content": "20+22?"}]
    with serving(ScriptedGenerator(SCRIPT), conversation_cache_tokens=0) as server:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=300) as client:
            first = client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
            [choice] = first.choices
            # The tokens count, not the text that stands for them.
            messages += [{"role": "assistant", "content": "changed"}, {"role": "user", "content": "Go on."}]
            turn = {"prompt_token_ids": choice.prompt_token_ids, "token_ids": choice.token_ids}
            sent = client.chat.completions.create(model="policy", messages=messages, extra_body={"previous_turn": turn})
            forgotten = client.chat.completions.create(model="policy", messages=messages)
    text = "user\n20+22?\nassistant\n{}\nuser\nGo on.\nassistant\n"
    assert TOKENIZER.decode(sent.prompt_token_ids) == text.format("I a")
    assert TOKENIZER.decode(forgotten.prompt_token_ids) == text.format("changed")


@pytest.mark.parametrize("turn", range(4))
def test_a_stream_holds_what_the_whole_answer_does(client: openai.OpenAI, turn: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "20+22?"}]
    for i in range(turn):
        messages += [{"role": "assistant", "content": f"{i}"}, {"role": "user", "content": "Go on."}]
    request: dict[str, Any] = {
        "model": "policy",
        "messages": messages,
        "tools": TOOLS,
        "logprobs": True,
        "n": 2,
        "seed": 4,
    }
    whole = client.chat.completions.create(**request)
    parts = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].usage == whole.usage
    for choice in whole.choices:
        own = [part.choices[0] for part in parts[:-1] if part.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in own) == (choice.message.content or "")
        streamed = [call for part in own for call in part.delta.tool_calls or []]
        calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
        assert [(call.id, call.function.name, call.function.arguments) for call in streamed if call.function] == [
            (call.id, call.function.name, call.function.arguments) for call in calls
        ]
        assert [token for part in own for token in part.token_ids] == choice.token_ids
        assert choice.logprobs is not None
        assert [entry for part in own if part.logprobs for entry in part.logprobs.content or []] == (
            choice.logprobs.content
        )
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        # Each part has three tokens at most; one more part is the end.
        assert len(own) == -(-len(choice.token_ids) // 3) + 1
        assert own[-1].weight_versions == choice.weight_versions


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\u00fc"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_logprobs": 5, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1, "logprobs": True}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, "chat_template_kwargs"),
        ({"extra_body": {"previous_turn": {"prompt_token_ids": [5]}}}, "previous_turn"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    request: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "x"}], **change}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**request)
    assert refused.value.param == param


def test_a_conversation_longer_than_the_context_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 2100}])
    assert refused.value.code == "context_length_exceeded"


def test_fields_of_routers_and_agents_change_nothing(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "20+22?"}]
    plain = client.chat.completions.create(model="policy", messages=messages, temperature=0)
    dressed = client.chat.completions.create(
        model="policy",
        messages=messages,
        temperature=0,
        user="someone",
        store=False,
        parallel_tool_calls=True,
        extra_headers={"X-Session-ID": "s-1"},
        extra_body={"cache_salt": "v3", "priority": 1, "session_id": "s-1", "skip_special_tokens": False},
    )
    assert dressed.choices == plain.choices


@pytest.mark.parametrize("stop", ["dd.", "<tool", "42"])
def test_a_stop_string_ends_a_stream_where_it_ends_the_whole_answer(client: openai.OpenAI, stop: str) -> None:
    request: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "20+22?"}], "stop": stop}
    [whole] = client.chat.completions.create(**request).choices
    parts = [part.choices[0] for part in client.chat.completions.create(**request, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert parts[-1].finish_reason == whole.finish_reason
    text = TOKENIZER.decode(whole.token_ids)
    assert text == (f"{SCRIPT[0].partition(stop)[0]}{stop}" if stop in SCRIPT[0] else SCRIPT[0])


def test_each_token_of_an_answer_names_the_version_that_sampled_it() -> None:
    with serving(ScriptedGenerator(SCRIPT, versions=range(100), tokens_at_once=4), refresh_ms=1000) as server:
        eventually(lambda: server.version >= 0, 60, "weights are loaded")
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=300) as client:
            messages: list[Any] = [{"role": "user", "content": "20+22?"}]
            whole = client.chat.completions.create(model="policy", messages=messages)
            parts = list(client.chat.completions.create(model="policy", messages=messages, stream=True))
    for choice, metadata in ((whole.choices[0], whole.metadata), (parts[-1].choices[0], parts[-1].metadata)):
        spans = choice.weight_versions
        assert len(spans) > 10
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(whole.choices[0].token_ids)
        versions = [int(span["version"]) for span in spans]
        assert versions == sorted(set(versions))
        assert (choice.lowest_version, choice.highest_version) == (versions[0], versions[-1])
        assert metadata == {"weight_version": str(versions[-1]), "weight_versions": spans}


class EndlessGenerator(ScriptedGenerator):
    """A generator whose rows never end by themselves."""

    def decode(self) -> list[SortedRow]:
        whole = dict(self.decoding)
        rows = super().decode()
        self.decoding.update(whole)
        return rows


def test_a_stream_whose_client_is_gone_frees_its_slot() -> None:
    generator = EndlessGenerator(["hello"], tokens_at_once=1)
    with serving(generator) as server:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=300) as client:
            messages: list[Any] = [{"role": "user", "content": "x"}]
            stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
            # Tokens come one by one, and each is the first token of the answer again.
            assert [next(stream).choices[0].delta.content for _ in range(2)] == ["h", "h"]
            assert generator.decoding
            stream.close()
        eventually(lambda: not generator.decoding, 60, "the slot is free")


class BreakingGenerator(ScriptedGenerator):
    """Fails at its third step of decoding."""

    steps = 0

    def decode(self) -> list[SortedRow]:
        self.steps += 1
        if self.steps == 3:
            raise ValueError("out of memory")
        return super().decode()


def test_an_answer_that_fails_in_the_middle_of_its_stream_counts_as_an_error() -> None:
    with serving(BreakingGenerator(["hello"], tokens_at_once=1)) as server:
        eventually(lambda: server.version == 0, 60, "weights are loaded")
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=300) as client:
            messages: list[Any] = [{"role": "user", "content": "x"}]
            stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
            with pytest.raises(openai.APIError, match="out of memory"):
                list(stream)
        eventually(lambda: server.metrics()["errors_total"] == 1, 60, "the error is counted")

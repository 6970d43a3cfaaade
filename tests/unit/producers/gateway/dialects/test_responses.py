"""Responses become chats, and chats become responses whose events OpenAI's own types parse without a loss."""

from typing import Any

import numpy as np
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollstream.producers.episodes.call_sequences import CallSequences, token_digest
from rollstream.producers.gateway.dialects.responses import ResponseStream, chat_request
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.json_text import readable
from rollstream.topics.records import CallAnswer, ModelCall
from tests.unit.producers.gateway.dialects.chat_parts import ANSWERS, Answer, events_and_whole, ids

USER = {"role": "user", "content": "8+9?"}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": "x"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So"}]}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "17"}]}
SPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "sums",
    "description": "d",
    "tools": [{"type": "function", "strict": False, **ADD}],
}


def named(value: dict[str, Any], name: str) -> dict[str, Any]:
    """A function, or a call of it, with another name."""
    return (
        {**value, "function": {**value["function"], "name": name}} if "function" in value else {**value, "name": name}
    )


@pytest.mark.parametrize(
    ("body", "messages", "more"),
    [
        ({"input": "8+9?"}, [USER], {}),
        ({"input": [USER], "store": False, "reasoning": {"effort": "low"}, "stream": True, "text": {}}, [USER], {}),
        (
            # As codex 0.171 sends it.
            {
                "input": [{"type": "message", **USER}],
                "include": ["reasoning.encrypted_content"],
                "client_metadata": {"session_id": "s"},
                "prompt_cache_key": "k",
                "tool_choice": "auto",
                "tools": [{"type": "web_search", "external_web_access": True}],
            },
            [USER],
            {"tool_choice": "auto"},
        ),
        (
            {"input": [USER, {**CALL, "namespace": "sums"}], "tools": [SPACE, {"type": "function", **ADD}]},
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [named(CALLED, "sums__add")]},
            ],
            {
                "tools": [
                    {"type": "function", "function": named(ADD, "sums__add")},
                    {"type": "function", "function": ADD},
                ]
            },
        ),
        (
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "Be"}]}, USER]},
            [{"role": "system", "content": "Be"}, USER],
            {},
        ),
        ({"input": "8+9?", "instructions": "Be"}, [{"role": "system", "content": "Be"}, USER], {}),
        (
            {"input": [USER, REASONING, MESSAGE, CALL, {**CALL, "call_id": "c2"}, OUTPUT]},
            [
                USER,
                {
                    "role": "assistant",
                    "reasoning_content": "So",
                    "content": "I add.",
                    "tool_calls": [CALLED, {**CALLED, "id": "c2"}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "17"},
            ],
            {},
        ),
        (
            {"input": [USER, CALL, OUTPUT, MESSAGE, MESSAGE, USER]},
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": "17"},
                *[{"role": "assistant", "content": "I add."}] * 2,
                USER,
            ],
            {},
        ),
        (
            {"input": "8+9?", "tools": [{"type": "function", "strict": True, **ADD}], "max_output_tokens": 7},
            [USER],
            {"tools": [{"type": "function", "function": ADD}], "max_tokens": 7},
        ),
        (
            {"input": "8+9?", "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False},
            [USER],
            {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False},
        ),
        (
            {
                "input": "8+9?",
                "text": {"format": {"type": "json_schema", "name": "sum", "schema": {}, "strict": True}},
            },
            [USER],
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "sum", "schema": {}, "strict": True},
                }
            },
        ),
        (
            {"input": "8+9?", "text": {"format": {"type": "json_object"}}},
            [USER],
            {"response_format": {"type": "json_object"}},
        ),
        (
            {
                "input": "8+9?",
                "tool_choice": "required",
                "temperature": 0.5,
                "top_p": 0.9,
                "text": {"verbosity": "low"},
            },
            [USER],
            {"tool_choice": "required", "temperature": 0.5, "top_p": 0.9},
        ),
    ],
)
def test_a_request_becomes_a_chat_request(body: Any, messages: Any, more: Any) -> None:
    assert chat_request({"model": "m", **body}, CallSequences()).body == {"messages": messages, **more}


def recorded(uid: str, messages: list[Any], answer: dict[str, Any], **notes: str) -> CallSequences:
    """The calls of a session with one call."""
    digest = token_digest(np_tokens(1, 2))
    answers = (CallAnswer(tokens=np_tokens(3), logprobs=np_tokens(0).astype("<f4")),)
    body = readable({"choices": [{"index": 0, "message": answer}]})
    call = ModelCall(
        session="g.0", uid=uid, request="r", prompt=np_tokens(1, 2), prompt_digest=digest, answers=answers,
        messages=readable(messages), body=body, sampling=notes,
    )  # fmt: skip
    return CallSequences([call])


def np_tokens(*tokens: int) -> Any:
    return np.array(tokens, "<i4")


def test_a_response_is_continued_without_its_instructions() -> None:
    system, answer = {"role": "system", "content": "Be"}, {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    first = chat_request({"input": "8+9?", "instructions": "Be"}, CallSequences())
    known = recorded("resp_1", first.body["messages"], answer, **first.notes)
    body = {"input": [OUTPUT], "previous_response_id": "resp_1"}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "17"}
    said = {"role": "assistant", "tool_calls": [CALLED]}
    assert chat_request(body, known).body["messages"] == [USER, said, tool]
    again = chat_request({**body, "instructions": "Be"}, known)
    assert again.body["messages"] == [system, USER, said, tool]
    plain = recorded("resp_1", [system, USER], answer)
    assert chat_request(body, plain).body["messages"] == [system, USER, said, tool], "a system message carries over"


@pytest.mark.parametrize("uid", ["resp_2", "chatcmpl-1", 7])
def test_a_response_of_no_call_of_the_session_is_refused_with_openais_code(uid: Any) -> None:
    known = recorded("chatcmpl-1", [USER], {"role": "assistant", "content": "17"})
    with pytest.raises(BadRequest, match=r"no response .*send the whole conversation as input") as refused:
        chat_request({"input": "8+9?", "previous_response_id": uid}, known)
    assert refused.value.body["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"background": True}, "background=True is not supported here; leave it out, or set it to False", "background"),
        ({"conversation": "c"}, "conversation='c' is not supported here", "conversation"),
        ({"prompt": {"id": "p"}}, "prompt={'id': 'p'} is not supported here", "prompt"),
        ({"truncation": "auto"}, "truncation='auto' is not supported here", "truncation"),
        ({"top_logprobs": 3}, "top_logprobs=3 is not supported here", "top_logprobs"),
        ({"voice": "x"}, "'voice'", "voice"),
        ({"include": ["message.output_text.logprobs"]}, "include: 'message.output_text.logprobs'", "include"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type='grammar' is not supported here", "text.format"),
        (
            {"tools": [{"type": "code_interpreter"}]},
            r"tools\[0\].type='code_interpreter' .* use function or namespace",
            "tools[0]",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
            r"tools\[0\].tools\[0\].type='custom' is not supported here",
            "tools[0].tools[0]",
        ),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "defer_loading=True", "defer_loading"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name must be a string", "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type='web_search'", "tool_choice"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            r"input\[0\].content\[0\].type='input_image' is not supported here; use input_text",
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "i"}]}, r"input\[0\].type='item_reference'", "input[0]"),
        ({"input": [{**CALL, "name": None}]}, r"input\[0\] must have a name", "input[0]"),
        ({"input": [{"role": "tool", "content": ""}]}, r"input\[0\].role must be one of", "input[0].role"),
        ({"input": []}, "input must be a text or a list of at least one item", "input"),
        ({"input": ["8+9?"]}, "input must be a list of objects", "input"),
    ],
)
def test_what_is_not_spoken_is_refused_by_name(body: Any, message: str, param: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        chat_request({"input": "8+9?", **body}, CallSequences())
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("answer", ANSWERS, ids=ids)
def test_events_and_response_are_as_openais_types_parse_them(answer: Answer) -> None:
    request = {"input": "8+9?", "tools": [{"type": "function", "strict": None, **ADD}], "store": None}
    events, whole = events_and_whole(ResponseStream, request, "resp_1", answer)
    parser: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for event in events:
        assert parser.validate_python(event).model_dump(exclude_unset=True, mode="json") == event
    assert Response.model_validate(whole).model_dump(exclude_unset=True, mode="json") == whole
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = "response.incomplete" if answer.finish_reason == "length" else "response.completed"
    assert [events[0]["type"], events[1]["type"], events[-1]["type"]] == [
        "response.created", "response.in_progress", last,
    ]  # fmt: skip
    assert events[-1]["response"] == whole
    assert (whole["id"], whole["model"], whole["store"], whole["tools"]) == ("resp_1", "m", True, request["tools"])
    assert (events[0]["response"]["policy_version"], whole["policy_version"]) == (None, 3)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == whole["output"]
    assert [blocks_of(item) for item in items] == answer.blocks
    deltas = [
        "".join(e["delta"] for e in events if e.get("output_index") == n and "delta" in e) for n in range(len(items))
    ]
    assert deltas == [text for _kind, text in answer.blocks]
    assert whole["usage"]["input_tokens"], whole["usage"]["output_tokens"] == (3, 2)
    reason = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
    assert whole["incomplete_details"] == reason


def test_a_function_of_a_namespace_is_called_by_its_name_and_namespace() -> None:
    request = {"input": "8+9?", "tools": [SPACE, {"type": "function", **ADD}]}
    calls = [
        {"index": n, "id": f"c{n}", "function": {"name": name, "arguments": "{}"}}
        for n, name in enumerate(("sums__add", "add"))
    ]
    answer = Answer("", [{"tool_calls": calls}], "tool_calls", [])
    events, whole = events_and_whole(ResponseStream, request, "resp_1", answer)
    assert [(item["name"], item.get("namespace")) for item in whole["output"]] == [("add", "sums"), ("add", None)]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in done] == ["add", "add"]
    Response.model_validate(whole)
    again = chat_request({**request, "input": whole["output"]}, CallSequences()).body["messages"]
    assert [call["function"]["name"] for call in again[0]["tool_calls"]] == ["sums__add", "add"]


def blocks_of(item: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of an item of the output."""
    if item["type"] == "function_call":
        return f"call {item['call_id']} {item['name']}", item["arguments"]
    (part,) = item["content"]
    return {"reasoning_text": "reasoning", "output_text": "text"}[part["type"]], part["text"]

"""Messages become chats, and chats become messages whose events Anthropic's own types parse without a loss."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.dialects.messages import MessageStream, chat_request, error_body
from rollstream.producers.inference.dialects.fields import BadRequest
from tests.unit.producers.gateway.dialects.chat_parts import ANSWERS, Answer, events_and_whole, ids

USER = {"role": "user", "content": "8+9?"}
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object"}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": "é"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, **CACHED}


@pytest.mark.parametrize(
    ("body", "messages", "more"),
    [
        ({}, [USER], {}),
        ({"thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"}, "stream": True}, [USER], {}),
        # As Claude Code 2.1 sends it: it keeps everything.
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, [USER], {}),
        ({"system": "Be"}, [{"role": "system", "content": "Be"}, USER], {}),
        ({"system": [text("Be"), text("brief")]}, [{"role": "system", "content": "Be\nbrief"}, USER], {}),
        (
            {"messages": [{"role": "user", "content": [text("8"), text("9")]}]},
            [{"role": "user", "content": "8\n9"}],
            {},
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "So", "signature": ""}, text("I add."), USE],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c1", "content": [text("17")], "is_error": False},
                            {"type": "tool_result", "tool_use_id": "c2"},
                            text("Go on."),
                        ],
                    },
                ]
            },
            [
                USER,
                {"role": "assistant", "content": "I add.", "reasoning_content": "So", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": "17"},
                {"role": "tool", "tool_call_id": "c2", "content": ""},
                {"role": "user", "content": "Go on."},
            ],
            {},
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "17"}, USER]},
            [USER, {"role": "assistant", "content": "17"}, USER],
            {},
        ),
        (
            {"tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA, **CACHED}]},
            [USER],
            {
                "tools": [
                    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
                ]
            },
        ),
        ({"tool_choice": {"type": "any"}}, [USER], {"tool_choice": "required"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}},
            [USER],
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA},
                }
            },
        ),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            [USER],
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "add"}},
            [USER],
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        (
            {"stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5},
            [USER],
            {"stop": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5},
        ),
    ],
)
def test_a_request_becomes_a_chat_request(body: Any, messages: Any, more: Any) -> None:
    request = {"model": "m", "messages": [USER], "max_tokens": 7, **body}
    assert chat_request(request, CallSequences()).body == {"messages": messages, "max_tokens": 7, **more}


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}, USER]}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"max_tokens": None}, "max_tokens is missing", "max_tokens"),
        ({"mcp_servers": [{}]}, r"mcp_servers=\[{}\] is not supported here", "mcp_servers"),
        ({"container": "c"}, "container='c' is not supported here", "container"),
        ({"context_management": {}}, "context_management={} is not supported here", "context_management"),
        ({"voice": "x"}, "'voice'", "voice"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type='regex'", "output_config.format"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}]}, r"tools\[0\].type='bash_20250124'", "tools[0]"),
        ({"tools": [{"name": "b", "defer_loading": True}]}, "defer_loading=True", "defer_loading"),
        ({"tools": [{"input_schema": SCHEMA}]}, r"tools\[0\].name must be a string", "tools[0].name"),
        ({"tool_choice": {"type": "server"}}, "tool_choice.type='server'", "tool_choice"),
        (
            content({"type": "image", "source": {}}),
            r"messages\[0\].content\[0\].type='image' is not supported here; use text or tool_result",
            "messages[0].content[0]",
        ),
        (
            content({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
            r"messages\[0\].content\[0\].content\[0\].type='image'",
            "messages[0].content[0].content[0]",
        ),
        (
            content({"type": "redacted_thinking", "data": "x"}, role="assistant"),
            r"messages\[0\].content\[0\].type='redacted_thinking'",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\].role must be user", "messages[0].role"),
        ({"messages": []}, "at least one message", "messages"),
        (
            {"messages": [USER, {"role": "assistant", "content": "1"}]},
            "does not continue a begun answer",
            "messages[1]",
        ),
    ],
)
def test_what_is_not_spoken_is_refused_by_name(body: Any, message: str, param: str) -> None:
    with pytest.raises(BadRequest, match=message) as refused:
        chat_request({"messages": [USER], "max_tokens": 7, **body}, CallSequences())
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("answer", ANSWERS, ids=ids)
def test_events_and_message_are_as_anthropics_types_parse_them(answer: Answer) -> None:
    events, whole = events_and_whole(MessageStream, {}, "msg_1", answer)
    parser: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for event in events:
        assert parser.validate_python(event).model_dump(exclude_unset=True, mode="json") == event
    assert Message.model_validate(whole).model_dump(exclude_unset=True, mode="json") == whole
    assert (events[0]["type"], events[0]["message"]["content"]) == ("message_start", [])
    assert "policy_version" not in events[0]["message"], "a stream says it at its end"
    assert events[-2]["policy_version"] == 3
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["usage"] == whole["usage"] == {"input_tokens": 3, "output_tokens": 2}
    stopped = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    assert events[-2]["delta"] == stopped
    assert [stopped["stop_reason"], stopped["stop_sequence"]] == {
        ("stop", "END"): ["stop_sequence", "END"],
        ("length", None): ["max_tokens", None],
        ("tool_calls", None): ["tool_use", None],
    }.get((answer.finish_reason, answer.stop_reason), ["end_turn", None])
    assert (whole["id"], whole["model"], whole["policy_version"]) == ("msg_1", "m", 3)
    assert [blocks_of(block) for block in whole["content"]] == answer.blocks
    for index, (_kind, words) in enumerate(answer.blocks):
        of_block = [event for event in events if event.get("index") == index]
        assert [of_block[0]["type"], of_block[-1]["type"]] == ["content_block_start", "content_block_stop"]
        assert blocks_of(of_block[0]["content_block"])[1] in ("", "{}")
        deltas = [event["delta"] for event in of_block[1:-1]]
        assert "".join(value for delta in deltas for name, value in delta.items() if name != "type") == words


def blocks_of(block: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of a block."""
    if block["type"] == "tool_use":
        return f"call {block['id']} {block['name']}", json.dumps(block["input"])
    return ("reasoning", block["thinking"]) if block["type"] == "thinking" else ("text", block["text"])


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]"])
def test_arguments_that_are_no_object_stay_visible(arguments: str) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    answer = {"id": "msg_1", "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    assert MessageStream({}).whole(answer)["content"][0]["input"] == {"invalid_json": arguments}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"), (502, "api_error")],
)
def test_errors_are_in_anthropics_form(status: int, kind: str) -> None:
    error = {"message": "m", "type": "x", "code": None}
    assert error_body(error, status) == {"type": "error", "error": {"type": kind, "message": "m"}}

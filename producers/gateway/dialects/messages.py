"""Anthropic's Messages: a request as a chat request, a chat answer as a message or its events. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.dialects.answer_blocks import (
    AnswerStream,
    Block,
    ChatForm,
    Event,
    call_of,
    function_tool,
    objects,
    part_text,
    text_of,
    unsupported,
)
from rollstream.producers.inference.dialects import fields
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.dialects.sampling_parameters import check_names
from rollstream.producers.json_text import readable

PREFIX = "msg_"
_READ = {
    "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k",
    "stream", "output_config",
}  # fmt: skip
_HARMLESS = {"model", "metadata", "service_tier", "thinking", "cache_control", "inference_geo"}
_OFF: Mapping[str, tuple[Any, ...]] = {
    "container": (None,),
    # Claude Code's, which keeps everything.
    "context_management": (None, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_TOOL_FIELDS = {"type", "name", "description", "input_schema"}
_TOOL_OFF = {"defer_loading": (False,), "allowed_callers": (["direct"],), "input_examples": ([],)}
_TOOL_HARMLESS = {"cache_control", "strict", "eager_input_streaming"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCKS = ("text", "thinking", "tool_use", "tool_result")
_STOPS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def chat_request(body: Mapping[str, Any], _known: CallSequences) -> ChatForm:
    """Return a request as a chat request. Raises BadRequest."""
    check_names(body, _READ, _OFF, _HARMLESS)
    if body.get("max_tokens") is None:
        raise BadRequest("max_tokens is missing; set it to the most tokens of the answer", "max_tokens")
    form = fields.mapping(fields.mapping(body, "output_config"), "format")
    if form and form.get("type") != "json_schema":
        raise unsupported("output_config.format", form.get("type"), ("json_schema",))
    system = text_of(body.get("system"), "system", ("text",))
    chat = {
        "messages": [*([{"role": "system", "content": system}] if system else []), *_messages(body)],
        "tools": [_tool(tool, f"tools[{n}]") for n, tool in enumerate(objects(body, "tools"))] or None,
        "stop": body.get("stop_sequences") or None,
        **_tool_choice(fields.mapping(body, "tool_choice")),
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.get("schema")},
        }
        if form
        else None,
        **{name: body.get(name) for name in ("max_tokens", "temperature", "top_p", "top_k")},
    }
    return ChatForm(body={name: value for name, value in chat.items() if value is not None})


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(objects(body, "messages")):
        role, place = message.get("role"), f"messages[{number}]"
        if role == "assistant":
            messages.append(_answer(message.get("content"), f"{place}.content"))
        elif role in ("user", "system"):
            messages += _question(role, message.get("content"), f"{place}.content")
        else:
            raise BadRequest(f"{place}.role must be user, assistant or system", f"{place}.role")
    if not messages:
        raise BadRequest("messages must be a list of at least one message", "messages")
    if messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's; this gateway does not continue a begun answer", place)
    return messages


def _question(role: str, content: Any, place: str) -> list[dict[str, Any]]:
    """Return a message of the user; results of tools in it are messages of their own."""
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, place, ("text",))}]
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(objects({place: content}, place)):
        if block.get("type") == "tool_result":
            result = text_of(block.get("content"), f"{place}[{number}].content", ("text",))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            text = part_text(block, f"{place}[{number}]", ("text", "tool_result"))
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": role, "content": text})
    return messages


def _answer(content: Any, place: str) -> dict[str, Any]:
    """Return a message of the assistant."""
    blocks = objects({place: content}, place) if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for number, block in enumerate(blocks):
        at, kind = f"{place}[{number}]", block.get("type")
        if kind == "tool_use":
            arguments = readable(block.get("input") or {})
            calls.append(call_of(block.get("name"), arguments, block.get("id"), at))
        elif kind in texts and isinstance(block.get(kind), str):
            texts[kind].append(block[kind])
        else:
            raise unsupported(at, kind, _BLOCKS[:3])
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts["text"])}
    if texts["thinking"]:
        message["reasoning_content"] = "\n".join(texts["thinking"])
    return {**message, "tool_calls": calls} if calls else message


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in (None, "custom"):
        raise unsupported(place, tool["type"], ("custom",))
    check_names(tool, _TOOL_FIELDS, _TOOL_OFF, _TOOL_HARMLESS)
    return function_tool(tool, "input_schema", place)


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    if not choice:
        return {}
    parallel = False if choice.get("disable_parallel_tool_use") else None
    if choice.get("type") == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif (chosen := _CHOICES.get(str(choice.get("type")))) is None:
        raise unsupported("tool_choice", choice.get("type"), (*_CHOICES, "tool"))
    return {"tool_choice": chosen, "parallel_tool_calls": parallel}


class MessageStream(AnswerStream):
    """The events of a message, and the message."""

    def begin(self) -> Iterator[Event]:
        """Yield the empty message."""
        yield {"type": "message_start", "message": self._message([])}

    def begin_block(self, block: Block) -> Iterator[Event]:
        """Yield the empty block."""
        yield {"type": "content_block_start", "index": block.index, "content_block": _block(block)}

    def grow_block(self, block: Block, text: str) -> Iterator[Event]:
        """Yield new text or arguments."""
        kind, name = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def end_block(self, block: Block) -> Iterator[Event]:
        """Yield the end of a block."""
        yield {"type": "content_block_stop", "index": block.index}

    def end(self) -> Iterator[Event]:
        """Yield why the message ended and its usage."""
        message = self.answer()
        stops = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        ending = {name: message[name] for name in ("usage", "policy_version")}
        yield {"type": "message_delta", "delta": stops, **ending}
        yield {"type": "message_stop"}

    def answer(self) -> dict[str, Any]:
        """Return the message."""
        stopped = isinstance(self.stop, str) and self.finish_reason == "stop"
        return {
            **self._message([_block(block) for block in self.blocks]),
            "stop_reason": "stop_sequence" if stopped else _STOPS.get(self.finish_reason, "end_turn"),
            "stop_sequence": self.stop if stopped else None,
            "policy_version": self.policy_version,
        }

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.head.get("id"),
            "type": "message",
            "role": "assistant",
            "model": self.head.get("model"),
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": self.usage.get("prompt_tokens", 0),
                "output_tokens": self.usage.get("completion_tokens", 0),
            },
        }


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "text":
            return {"type": "text", "text": block.text, "citations": None}
        case "call":
            return {"type": "tool_use", "id": block.identifier, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Return arguments as the object that clients expect; arguments that are none are shown as a text."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": arguments}


def error_body(error: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Return OpenAI's error in Anthropic's form, which is also the last event of a stream."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error.get("message") or error)}}

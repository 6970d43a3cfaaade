"""Messages and tools of a chat request, validated and normalized. Raises BadRequest, naming the field."""

import json
from collections.abc import Mapping
from typing import Any

from rollstream.producers.inference.chat.messages import Message, Tool, call_object
from rollstream.producers.inference.dialects import fields
from rollstream.producers.inference.dialects.refusals import BadRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = {
    **dict.fromkeys(("reasoning_content", "thinking", "reasoning"), "reasoning_content"),
    **{name: name for name in ("tool_call_id", "name")},
}
"""Optional texts of a message, each with the name under which templates read it."""


def parse_messages(value: Any) -> list[Message]:
    """Return the messages of a conversation; fields without a meaning for a model are left out."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message", "messages")
    return [_message(message, f"messages[{position}]") for position, message in enumerate(value)]


def parse_tools(value: Any, choice: Any) -> list[Tool]:
    """Return the tools that a model may call: none if `choice`, the field tool_choice, is "none"."""
    if value is not None and not isinstance(value, list):
        raise BadRequest("tools must be a list", "tools")
    tools = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(value or [])]
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            f"tool_choice={fields.shown(choice)} is not supported here, because answers are not constrained; leave it "
            "out, or use auto or none",
            "tool_choice",
        )
    return [] if choice == "none" else tools


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise BadRequest(f"{place} must be an object", place)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{place}.role={fields.shown(role)} must be one of {', '.join(_ROLES)}", f"{place}.role")
    if value.get("function_call"):
        raise BadRequest(f"{place}.function_call is not supported here; use tool_calls", f"{place}.function_call")
    message: Message = {"role": _ROLES[role], "content": _content(value.get("content"), f"{place}.content")}
    calls = value.get("tool_calls")
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise BadRequest(f"{place}.tool_calls must be a list", f"{place}.tool_calls")
        message["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name, meaning in _TEXTS.items():
        text = value.get(name)
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"{place}.{name} must be a string", f"{place}.{name}")
        if text:
            message.setdefault(meaning, text)
    return message


def _content(value: Any, place: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise BadRequest(f"{place} must be a string or a list of parts", place)
    texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{place}: only parts of type text are supported", place)
    return "".join(map(str, texts))


def _call(value: Any, place: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{place} must be an object with a function that has a name", place)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise BadRequest(f"{place}.function.arguments must be JSON in a string", place)
    identifier = value.get("id")
    return call_object(function["name"], arguments or "{}", identifier if isinstance(identifier, str) else "")


def _tool(value: Any, place: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{place} must be of type function, and its function must have a name", place)
    return {"type": "function", "function": function}

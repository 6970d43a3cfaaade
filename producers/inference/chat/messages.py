"""Messages of a conversation in OpenAI's format, without fields that have no meaning for a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A message has `role` (system, user, assistant, tool) and `content`, a string. It may have `name`; an assistant
message may have `tool_calls` and `reasoning_content`, and a tool message may have `tool_call_id`."""
Tool = dict[str, Any]
"""OpenAI's description of a function: {"type": "function", "function": {"name", "description", "parameters"}}."""


class ToolCall(NamedTuple):
    """A call of a function by the model."""

    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """The answer of the model in a turn."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class SampledTurn(NamedTuple):
    """A turn as it was sampled."""

    prompt: Sequence[int]
    """Token ids of the conversation before the answer."""
    sampled: Sequence[int]
    """Token ids of the answer."""


def call_object(name: str, arguments: str, identifier: str) -> dict[str, Any]:
    """Return OpenAI's object of a tool call."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}

"""The protocol of chat templates, from a conversation to tokens and back, and messages in OpenAI's format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from rollstream.topics.errors import RollstreamError

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


class TemplateRefused(RollstreamError):
    """A template raised an error for a conversation."""


class ChatTemplate(Protocol):
    """Renders conversations for one model. No method is called by two threads at once."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Tokens that end the model's turn."""

    @property
    def markers(self) -> Sequence[str]:
        """Texts that change the meaning of what comes before or after them, such as the beginning of a tool call."""

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """Return this template with the values of variables, at least one. Raises TemplateRefused for a bad one."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation, up to where the model's next turn begins.

        Raises a RollstreamError or ValueError if a text cannot be encoded, or the template refuses the conversation.
        """

    def extend(
        self, turn: SampledTurn, messages: Sequence[Message], known: int, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the prompt of a conversation whose first `known` messages are the prompt and the answer of `turn`.

        The prompt begins with the tokens of the turn. Returns None if the template cannot continue from them, e.g.
        because it renders an earlier turn differently once a later turn follows. Raises as `render` does.
        """

    def parse(self, turn: SampledTurn, *, text: str | None = None, complete: bool = True) -> AssistantMessage:
        """Return the message that a turn's sampled tokens represent. `text` is their text if it is known.

        The message of an incomplete answer contains only text that later tokens do not change, except that it may end
        with the beginning of a marker.
        """

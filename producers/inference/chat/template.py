"""The protocol of chat templates: from a conversation to a prompt's tokens, from an answer's tokens to a message."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from rollstream.producers.inference.chat.messages import AssistantMessage, Message, SampledTurn, Tool
from rollstream.topics.errors import RollstreamError


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

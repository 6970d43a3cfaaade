"""A policy that gives scripted replies, for tests of environments without a model or a server."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.producers.environments.chat import ChatMessage, ChatReply, ToolCall


@dataclass(frozen=True)
class ScriptedReply:
    """A reply of a ScriptedPolicy."""

    text: str
    truncated: bool = False
    calls: Mapping[str, Any] | None = None


class ScriptedPolicy:
    """The `generate` of an episode, and with `ask` the policy of a conversation: it gives its replies in order and
    keeps the texts that it receives."""

    def __init__(self, *replies: str | Mapping[str, Any], truncated: bool = False) -> None:
        """A reply is a text, or calls of tools: arguments by the tool's name. `truncated` is whether the last reply is
        cut off by a token limit."""
        self._replies: Sequence[ScriptedReply] = [
            ScriptedReply(
                reply if isinstance(reply, str) else "",
                truncated=truncated and number == len(replies),
                calls=None if isinstance(reply, str) else reply,
            )
            for number, reply in enumerate(replies, start=1)
        ]
        self.texts: list[str] = []
        """Texts received so far; of a conversation, the content of the last message."""

    async def __call__(self, text: str) -> ScriptedReply:
        """Return the next reply. Raises IndexError if no replies are left."""
        if len(self.texts) == len(self._replies):
            raise IndexError(f"the script has {len(self._replies)} replies, but the environment asked for another")
        self.texts.append(text)
        return self._replies[len(self.texts) - 1]

    async def ask(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> ChatReply:
        """Return the next reply in a conversation. Raises IndexError if no replies are left."""
        reply = await self(str(messages[-1]["content"]))
        calls = tuple(
            ToolCall(name, json.dumps(arguments), f"call-{len(self.texts)}-{number}")
            for number, (name, arguments) in enumerate((reply.calls or {}).items())
        )
        return ChatReply(text=reply.text, calls=calls, truncated=reply.truncated)

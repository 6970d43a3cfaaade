"""The chat template of vocabularies whose only special token is the end of a text, such as rollstream's characters.

A message is its role, a line break, its text, the end token and a line break. No text can be mistaken for the end of a
turn, because no text is encoded as the end token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rollstream.producers.inference.chat import hermes
from rollstream.producers.inference.chat.template import AssistantMessage, Message, SampledTurn, TemplateRefused, Tool
from rollstream.producers.inference.token_codec import TokenCodec


class PlainTemplate:
    """Renders conversations for a tokenizer whose first end token closes every message."""

    markers = (hermes.OPEN,)

    def __init__(self, tokenizer: TokenCodec) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = tuple(tokenizer.eos_ids)

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """Refuse variables: this template has none."""
        raise TemplateRefused(f"the plain chat template has no variable {min(variables)}; leave it out")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a whole conversation. Tools become part of the system message."""
        if tools and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": ""}, *messages]
        prompt: list[int] = []
        for position, message in enumerate(messages):
            prompt += self._message(message, tools if position == 0 else ())
        return [*prompt, *self._tokenizer.encode("assistant\n")]

    def extend(
        self, turn: SampledTurn, messages: Sequence[Message], known: int, tools: Sequence[Tool]
    ) -> list[int] | None:
        """Return the turn's tokens, the end token if the answer was cut off before it, and the new messages."""
        prompt = [*turn.prompt, *turn.sampled]
        if not turn.sampled or turn.sampled[-1] not in self.stop_ids:
            prompt.append(self.stop_ids[0])
        prompt += self._tokenizer.encode("\n")
        for message in messages[known:]:
            prompt += self._message(message, ())
        return [*prompt, *self._tokenizer.encode("assistant\n")]

    def parse(self, turn: SampledTurn, *, text: str | None = None, complete: bool = True) -> AssistantMessage:
        """Return the text of the answer and its tool calls."""
        return hermes.parse(self._tokenizer.decode(turn.sampled) if text is None else text, complete=complete)

    def _message(self, message: Message, tools: Sequence[Tool]) -> list[int]:
        text = message["content"]
        if tools:
            described = "\n".join(_compact(tool["function"]) for tool in tools)
            text = "\n".join(line for line in (text, "<tools>", described, "</tools>") if line)
        calls = (call["function"] for call in message.get("tool_calls", ()))
        text += "".join(hermes.call_text(call["name"], call["arguments"]) for call in calls)
        encode = self._tokenizer.encode
        return [*encode(f"{message['role']}\n{text}"), self.stop_ids[0], *encode("\n")]


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

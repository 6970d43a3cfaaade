"""Recent turns, looked up by their messages, so that a conversation is continued from its sampled tokens.

A turn is found only if every message up to its answer is sent back unchanged, apart from reasoning. Its sampled text is
then not tokenised again. A changed history counts as a new conversation.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from rollstream.producers.inference.chat.template import Message, SampledTurn, Tool
from rollstream.topics.records import Int32


class ConversationMemory:
    """Remembers at most `max_tokens` tokens of turns; the least recently used turns are forgotten first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._turns: OrderedDict[bytes, tuple[Int32, int]] = OrderedDict()
        """Tokens of prompt and answer, and the length of the prompt."""
        self.tokens = 0
        """Tokens held."""

    def add(
        self,
        session: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        turn: SampledTurn,
    ) -> None:
        """Remember a turn; the last of `messages` is its answer, as the client received it."""
        key = _key(session, messages, tools, variables)
        self._forget(key)
        tokens = np.asarray([*turn.prompt, *turn.sampled], np.int32)
        self._turns[key] = (tokens, len(turn.prompt))
        self.tokens += len(tokens)
        while self.tokens > self._max_tokens:
            self._forget(next(iter(self._turns)))

    def find(
        self, session: str, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> SampledTurn | None:
        """Return the turn of the last answer of a conversation, if it is remembered."""
        last = last_answer(messages)
        if last is None:
            return None
        key = _key(session, messages[:last], tools, variables)
        if key not in self._turns:
            return None
        self._turns.move_to_end(key)
        tokens, prompt = self._turns[key]
        return SampledTurn(tokens[:prompt].tolist(), tokens[prompt:].tolist())

    def _forget(self, key: bytes) -> None:
        if key in self._turns:
            tokens, _ = self._turns.pop(key)
            self.tokens -= len(tokens)


def last_answer(messages: Sequence[Message]) -> int | None:
    """Return the number of messages up to the model's last answer; None if there is none or nothing follows it."""
    last = next((i + 1 for i in range(len(messages) - 1, -1, -1) if messages[i]["role"] == "assistant"), None)
    return last if last is not None and last < len(messages) else None


def _key(session: str, messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]) -> bytes:
    # Ignore reasoning: clients rarely send it back, and the remembered tokens contain it.
    shown = [{name: value for name, value in message.items() if name != "reasoning_content"} for message in messages]
    conversation = json.dumps([session, list(tools), variables, shown], sort_keys=True)
    return blake3(conversation.encode()).digest(length=16)

"""What the dialects share: a request as a chat request, and a chat answer as blocks of reasoning, text and calls. Pure.

A whole answer is the stream of its events added up, so that both always say the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollstream.producers.gateway.streamed_answers import events_of
from rollstream.producers.inference.chat.template import call_object
from rollstream.producers.inference.dialects.fields import BadRequest, shown

Event = dict[str, Any]
_REASONING = ("reasoning_content", "reasoning")
"""Names under which servers give reasoning."""


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """A request as a chat request."""

    body: dict[str, Any]
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the record of the call keeps of the request beside the chat request."""


@dataclass(kw_only=True)
class Block:
    """A part of an answer, so far."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    """Text, or the arguments of a call as JSON."""
    name: str = ""
    identifier: str = ""
    """Name and id of a call."""


class AnswerStream(ABC):
    """Turns the events of a chat answer with one choice into the events of a dialect."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """`request` is the agent's, in its own dialect."""
        self.request = request
        self.head: Mapping[str, Any] = {}
        """First event of the chat answer, which names its id and model."""
        self.blocks: list[Block] = []
        self.usage: Mapping[str, Any] = {}
        self.policy_version: Any = None
        """Policy that sampled the answer, which a stream says at its end."""
        self.finish_reason = ""
        self.stop: Any = None
        """Stop string or token id that ended the answer, if the server names one."""
        self._call: Any = None
        """Index of the call that is growing."""

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events before the first block."""

    @abstractmethod
    def begin_block(self, block: Block) -> Iterator[Event]:
        """Yield the events that begin a block, which is still empty."""

    @abstractmethod
    def grow_block(self, block: Block, text: str) -> Iterator[Event]:
        """Yield the events for new text of a block."""

    @abstractmethod
    def end_block(self, block: Block) -> Iterator[Event]:
        """Yield the events that end a block."""

    @abstractmethod
    def end(self) -> Iterator[Event]:
        """Yield the events after the last block."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the whole answer once it has ended."""

    def whole(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole chat answer in this dialect."""
        for part in events_of(answer, chat=True, usage=True):
            for _event in self.add(part):
                pass
        return self.answer()

    def add(self, part: Mapping[str, Any] | str) -> Iterator[Event]:
        """Yield the dialect's events for the next event of the chat answer."""
        if isinstance(part, str):
            yield from self._switch(None)
            yield from self.end()
            return
        if not self.head:
            self.head = part
            yield from self.begin()
        self.usage = part.get("usage") or self.usage
        self.policy_version = part.get("policy_version", self.policy_version)
        for choice in part.get("choices") or ():
            yield from self._add_delta(choice.get("delta") or {})
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop = self.stop if choice.get("stop_reason") is None else choice["stop_reason"]

    def _add_delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        reasoning = next((delta[name] for name in _REASONING if delta.get(name)), "")
        for kind, text in (("reasoning", reasoning), ("text", delta.get("content"))):
            if text:
                if not self.blocks or self.blocks[-1].kind != kind:
                    yield from self._switch(Block(kind=kind, index=len(self.blocks)))  # type: ignore[arg-type]
                yield from self._grow(text)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", position), call.get("function") or {}
            if not self.blocks or self.blocks[-1].kind != "call" or index != self._call:
                name, identifier = function.get("name") or "", call.get("id") or ""
                block = Block(kind="call", index=len(self.blocks), name=name, identifier=identifier)
                self._call = index
                yield from self._switch(block)
            if arguments := function.get("arguments"):
                yield from self._grow(arguments)

    def _grow(self, text: str) -> Iterator[Event]:
        self.blocks[-1].text += text
        yield from self.grow_block(self.blocks[-1], text)

    def _switch(self, block: Block | None) -> Iterator[Event]:
        """End the last block, and begin the next one if there is one."""
        if self.blocks:
            yield from self.end_block(self.blocks[-1])
        if block is not None:
            self.blocks.append(block)
            yield from self.begin_block(block)


def text_of(content: Any, place: str, kinds: Sequence[str]) -> str:
    """Return a content of text, or of parts of text of these kinds. Raises BadRequest, which names any other part."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = objects({place: content}, place)
    return "\n".join(part_text(part, f"{place}[{number}]", kinds) for number, part in enumerate(parts))


def part_text(part: Mapping[str, Any], place: str, kinds: Sequence[str]) -> str:
    """Return the text of a part of one of these kinds. Raises BadRequest."""
    if part.get("type") not in kinds:
        raise unsupported(place, part.get("type"), kinds)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{place}.text must be a string", f"{place}.text")
    return str(part["text"])


def unsupported(place: str, kind: Any, kinds: Sequence[str]) -> BadRequest:
    """Return the refusal of an object whose type is not one of these."""
    return BadRequest(f"{place}.type={shown(kind)} is not supported here; use {' or '.join(kinds)}", place)


def objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return a list of objects, empty where it is absent or null. Raises BadRequest."""
    value = body.get(name)
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise BadRequest(f"{name} must be a list of objects", name)
    return value or []


def function_tool(tool: Mapping[str, Any], schema: str, place: str) -> dict[str, Any]:
    """Return a function in OpenAI's form for chats; `schema` is the field of its parameters. Raises BadRequest."""
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"{place}.name must be a string", f"{place}.name")
    named = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(schema)}
    return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}


def call_of(name: Any, arguments: Any, identifier: Any, place: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's form for chats. Raises BadRequest."""
    if not all(isinstance(text, str) for text in (name, arguments, identifier)):
        raise BadRequest(f"{place} must have a name, arguments and an id", place)
    return call_object(name, arguments, identifier)

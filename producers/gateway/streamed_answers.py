"""Streams of OpenAI's events: assembles an answer from its events, and splits a whole answer into events. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from rollstream.producers.inference.errors import InferenceRefused
from rollstream.producers.json_text import decode, encodable, encode

DONE = "[DONE]"
_MOST_CALLS = 1024
"""Maximum number of tool calls in one answer: a server may send any index, and empty calls are added up to it."""
_QUOTED = 500
"""Most characters of a server's error that a message quotes."""
_SUMMED = ("token_ids", "response_token_ids")


class StreamedAnswer:
    """Assembles the events of one stream into the answer that the server would give without streaming."""

    def __init__(self, *, chat: bool, source: str = "the server") -> None:
        """`source` names the server in errors."""
        self._chat = chat
        self._source = source
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event. Raises InferenceRefused if it is not in OpenAI's format; add no events after that."""
        try:
            for key, value in event.items():
                if key != "choices" and value is not None:
                    self._body[key] = value
            for part in event.get("choices") or ():
                self._add_part(part)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InferenceRefused(f"{self._source} streamed an event not in OpenAI's format: {error!r}") from error

    def _add_part(self, part: Mapping[str, Any]) -> None:
        index = int(part.get("index", 0))
        choice = self._choices.setdefault(index, {"index": index, "finish_reason": None})
        for key, value in part.items():
            if value is None or key in ("index", "delta"):
                continue
            if key == "text":
                choice["text"] = choice.get("text", "") + value
            elif key == "logprobs":
                _extend(choice.setdefault("logprobs", {}), value)
            elif key in _SUMMED:
                choice.setdefault(key, []).extend(value)
            else:
                choice[key] = value
        if self._chat:
            _add_delta(choice.setdefault("message", {"role": "assistant", "content": None}), part.get("delta") or {})

    @property
    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return bool(self._choices) and all(choice["finish_reason"] for choice in self._choices.values())

    def body(self) -> dict[str, Any]:
        """Return the answer so far."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._body, "object": kind, "choices": choices}


def _extend(logprobs: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, list):
            logprobs.setdefault(key, []).extend(value)
        elif value is not None or key not in logprobs:
            logprobs[key] = value


def _add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for key, value in delta.items():
        if value is None:
            continue
        if key == "tool_calls":
            _add_tool_calls(message.setdefault("tool_calls", []), value)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        else:
            message[key] = value


def _add_tool_calls(calls: list[dict[str, Any]], parts: list[Mapping[str, Any]]) -> None:
    for position, part in enumerate(parts):
        index = int(part.get("index", position))
        if not 0 <= index < _MOST_CALLS:
            raise ValueError(f"tool call index {index} is not in range")
        while len(calls) <= index:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call.update({key: part[key] for key in ("id", "type") if part.get(key)})
        for key, value in (part.get("function") or {}).items():
            if value:
                call["function"][key] = call["function"].get(key, "") + value


def events_of(answer: Mapping[str, Any], *, chat: bool, usage: bool) -> Iterator[dict[str, Any]]:
    """Yield a whole answer as the events of a stream: one for each choice, and the usage if requested."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {**{key: value for key, value in answer.items() if key not in ("choices", "usage")}, "object": kind}
    for choice in answer.get("choices", ()):
        part = dict(choice)
        if chat:
            message = dict(part.pop("message", None) or {})
            if message.get("tool_calls"):
                message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
            part["delta"] = message
        yield {**head, "choices": [part]}
    if usage and "usage" in answer:
        yield {**head, "choices": [], "usage": answer["usage"]}


def event_of(data: str, source: str) -> dict[str, Any]:
    """Return the event in the data of a stream. Raises InferenceRefused if the data is not a JSON object."""
    try:
        event = decode(data)
    except (ValueError, RecursionError) as error:
        raise InferenceRefused(f"{source} streamed invalid JSON: {error}") from error
    if not isinstance(event, dict):
        raise InferenceRefused(f"{source} streamed a JSON {type(event).__name__} instead of an object")
    return event


def error_in(event: Mapping[str, Any]) -> str:
    """Return the message of the error that an event reports; empty if it reports none."""
    error = event.get("error")
    message = (error.get("message") if isinstance(error, dict) else error) or error
    return " ".join(encodable(str(message)).split())[:_QUOTED] if message else ""


def framed(event: Mapping[str, Any] | str) -> bytes:
    """Return an event as bytes of a stream, with its name if it has one: events of chats have no type."""
    if isinstance(event, str):
        return b"data: " + event.encode() + b"\n\n"
    name = b"event: " + event["type"].encode() + b"\n" if "type" in event else b""
    return name + b"data: " + encode(event) + b"\n\n"


class EventLines:
    """Splits the bytes of a stream into the data of its events, wherever the bytes are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the data of each complete event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", "replace")

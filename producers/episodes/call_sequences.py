"""Token sequences of a session's model calls; records store prompts as differences from earlier calls. Pure.

A writer asks for the earlier answer that a prompt continues; a reader rebuilds every prompt and checks its digest.
Sampled tokens are therefore never rendered or tokenized again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from rollstream.producers.json_text import readable
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Int32, ModelCall

ChatMessage = Mapping[str, Any]
PROMPT_ROLE = "prompt"
"""Role of the single message that represents a text prompt."""
TOOLS = "tools"
"""Name under which a call's recorded parameters hold the digest of its tools."""
CONSTRAINED = "constrained"
"""Name under which a call's recorded parameters name what constrained the form of its answers."""
_DIGEST_BYTES = 16
_HEAD = 64


def token_digest(tokens: Int32) -> str:
    """Return the BLAKE3 digest of token ids, as little-endian int32."""
    return blake3(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest(length=_DIGEST_BYTES)


def common_length(a: Int32, b: Int32) -> int:
    """Return the number of tokens that two sequences have in common at their beginning."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


@dataclass(frozen=True, eq=False)
class CallSequence:
    """A call and the calls that its prompt continues.

    Prompts are built when they are asked for: together, the prompts of a session have a size that grows with the square
    of the number of its calls.
    """

    call: ModelCall
    parent: "CallSequence | None"
    """The call that `call.parent` names."""
    messages: tuple[ChatMessage, ...]
    """All messages of the request."""
    shared: int
    """Number of tokens that the prompt takes from the parent's prompt and answer."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self.shared + len(self.call.prompt)

    @property
    def prompt(self) -> Int32:
        """All token ids of the prompt, in a new array."""
        return self._tokens(0, self.prompt_length)

    def with_answer(self, index: int) -> Int32:
        """Return the prompt followed by one answer, in a new array."""
        return self._tokens(index, self.prompt_length + len(self.call.answers[index].tokens))

    def _tokens(self, answer: int, length: int) -> Int32:
        """Return the first tokens of the prompt followed by an answer."""
        parts: list[Int32] = []
        sequence: CallSequence | None = self
        while sequence is not None and length:
            call = sequence.call
            if length > sequence.prompt_length:
                parts.append(call.answers[answer].tokens[: length - sequence.prompt_length])
                length = sequence.prompt_length
            if length > sequence.shared:
                parts.append(call.prompt[: length - sequence.shared])
                length = sequence.shared
            sequence, answer = sequence.parent, call.parent_answer
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class PromptDelta:
    """A prompt as its record stores it: what differs from an earlier call."""

    parent: str
    parent_answer: int
    shared: int
    prompt: Int32
    messages_shared: int
    messages: str
    digest: str


class CallSequences:
    """Sequences of the calls of one session, added in the order of the log."""

    def __init__(self, calls: Iterable[ModelCall] = ()) -> None:
        self.by_uid: dict[str, CallSequence] = {}
        self._by_length: dict[int, dict[bytes, tuple[str, int]]] = {}
        """Calls and answers by length and digest of prompt and answer together."""
        for call in calls:
            self.add(call)

    def add(self, call: ModelCall) -> CallSequence:
        """Rebuild a call. Raises RecordError if its parent is missing, its prompt does not match the digest, or an
        answer has not one log-probability for each token."""
        if call.uid in self.by_uid:
            return self.by_uid[call.uid]
        for index, answer in enumerate(call.answers):
            if len(answer.tokens) != len(answer.logprobs):
                raise RecordError(
                    f"answer {index} of call {call.uid} of session {call.session} has {len(answer.tokens)} tokens but "
                    f"{len(answer.logprobs)} log-probabilities"
                )
        parent = self.by_uid.get(call.parent)
        if call.parent and (parent is None or not 0 <= call.parent_answer < len(parent.call.answers)):
            raise RecordError(
                f"call {call.uid} continues call {call.parent}, which session {call.session} does not have"
            )
        shared, messages = 0, _messages(call)
        if parent is not None:
            available = parent.prompt_length + len(parent.call.answers[call.parent_answer].tokens)
            shared = max(0, min(call.shared, available))
            messages = (*parent.messages[: call.messages_shared], *messages)
        sequence = CallSequence(call, parent, messages, shared)
        if token_digest(sequence.prompt) != call.prompt_digest:
            raise RecordError(f"the prompt of call {call.uid} of session {call.session} does not match its digest")
        self.index(sequence)
        return sequence

    def index(self, sequence: CallSequence) -> None:
        """Add a call that is already rebuilt."""
        call = sequence.call
        self.by_uid[call.uid] = sequence
        for index, answer in enumerate(call.answers):
            if len(answer.tokens):
                whole = sequence.with_answer(index)
                self._by_length.setdefault(len(whole), {}).setdefault(_key(whole), (call.uid, index))

    def continued_by(self, prompt: Int32) -> tuple[str, int] | None:
        """Return the call and answer whose whole sequence is the longest prefix of a prompt; None if there is none."""
        lengths = sorted(length for length in self._by_length if length <= len(prompt))
        digest, done = blake3(), 0
        longest = None
        for length in lengths:
            digest.update(np.ascontiguousarray(prompt[done:length], "<i4").tobytes())
            done = length
            longest = self._by_length[length].get(digest.copy().digest(length=_DIGEST_BYTES), longest)
        return longest

    def delta_of(self, prompt: Int32, messages: Sequence[ChatMessage]) -> PromptDelta:
        """Return how a prompt differs from the answer that it continues, or else from the newest call."""
        place = self.continued_by(prompt)
        if place is None and self.by_uid:
            place = (next(reversed(self.by_uid)), 0)
        uid, index, shared, messages_shared = "", 0, 0, 0
        if place is not None:
            parent = self.by_uid[place[0]]
            if parent.call.answers:
                uid, index = place
                shared = common_length(parent.with_answer(index), prompt)
                messages_shared = _common_messages(parent.messages, messages)
        return PromptDelta(
            parent=uid,
            parent_answer=index,
            shared=shared,
            prompt=np.ascontiguousarray(prompt[shared:], "<i4"),
            messages_shared=messages_shared,
            messages=readable(list(messages[messages_shared:]), separators=(",", ":")),
            digest=token_digest(prompt),
        )


def _key(tokens: Int32) -> bytes:
    return bytes.fromhex(token_digest(tokens))


def _messages(call: ModelCall) -> tuple[ChatMessage, ...]:
    try:
        messages = json.loads(call.messages)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"messages of call {call.uid} are not JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RecordError(f"messages of call {call.uid} are {call.messages[:_HEAD]!r}, not an array of objects")
    return tuple(messages)


def same_messages(before: Sequence[ChatMessage], now: Sequence[ChatMessage]) -> bool:
    """Whether messages are the same in all their fields, as an agent repeats them: see `same_words`."""
    return len(before) == len(now) and all(
        earlier == later or (same_words(earlier, later) and _others(earlier) == _others(later))
        for earlier, later in zip(before, now, strict=True)
    )


def same_words(before: ChatMessage, now: ChatMessage) -> bool:
    """Whether content and tool calls are the same: arguments in any spacing of JSON, content as text or as parts, null
    or missing if empty, and that of an answer with or without white space at its end."""
    return _words(before) == _words(now)


def _words(message: ChatMessage) -> tuple[Any, list[tuple[Any, Any]]]:
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if message.get("role", "assistant") == "assistant" and isinstance(content, str):
        content = content.rstrip()
    calls = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    return content, [(function.get("name"), _arguments(function.get("arguments"))) for function in calls]


def _others(message: ChatMessage) -> dict[str, Any]:
    return {name: x for name, x in message.items() if name not in ("content", "tool_calls") and x is not None}


def _arguments(text: Any) -> Any:
    """Return arguments in one spelling; JavaScript writes 1.0 as 1. What is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return text


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


def _common_messages(a: Sequence[ChatMessage], b: Sequence[ChatMessage]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def new_messages(before: Sequence[ChatMessage], now: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages that a request adds to an earlier request, apart from the answer to the earlier request."""
    added = now[_common_messages(before, now) :]
    return added[1:] if before and added and added[0].get("role") == "assistant" else added

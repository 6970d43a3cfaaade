"""Chat answers in parts, as servers stream them, with the blocks that a dialect makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollstream.producers.gateway.dialects.answer_blocks import AnswerStream
from rollstream.producers.gateway.streamed_answers import DONE, StreamedAnswer

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@dataclass(frozen=True)
class Answer:
    """The deltas of an answer, why it ended, and its blocks: kind (with id and name of a call) and text."""

    name: str
    deltas: list[dict[str, Any]]
    finish_reason: str
    blocks: list[tuple[str, str]]
    stop_reason: Any = None

    def parts(self, uid: str) -> Iterator[dict[str, Any]]:
        """The events of the chat answer."""
        head = {"id": uid, "object": "chat.completion.chunk", "created": 7, "model": "m"}
        for delta in self.deltas:
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        end = {"index": 0, "delta": {}, "finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
        yield {**head, "choices": [end], "policy_version": 3}
        yield {**head, "choices": [], "usage": USAGE}


def _call(index: int, arguments: str, identifier: str = "", name: str = "") -> dict[str, Any]:
    begun = {"id": identifier, "type": "function"} if identifier else {}
    function = {**({"name": name} if name else {}), "arguments": arguments}
    return {"tool_calls": [{"index": index, **begun, "function": function}]}


ROLE = {"role": "assistant", "content": ""}
ANSWERS = [
    Answer("a text", [ROLE, {"content": "1"}, {"content": "7"}], "stop", [("text", "17")]),
    Answer("reasoning by its other name", [{"reasoning": "So"}], "stop", [("reasoning", "So")]),
    Answer("an empty answer", [ROLE], "stop", []),
    Answer("a text that a limit cuts", [{"content": "1"}], "length", [("text", "1")]),
    Answer("a text with a stop string", [{"content": "1"}], "stop", [("text", "1")], "END"),
    Answer("a text with a stop token", [{"content": "1"}], "stop", [("text", "1")], 9),
    Answer(
        "reasoning, text and a call in pieces",
        [
            {"reasoning_content": "So "},
            {"reasoning_content": "so"},
            {"content": "I add."},
            _call(0, "", "c1", "add"),
            _call(0, '{"a":'),
            _call(0, " 1}"),
        ],
        "tool_calls",
        [("reasoning", "So so"), ("text", "I add."), ("call c1 add", '{"a": 1}')],
    ),
    Answer(
        "two calls at once",
        [{"tool_calls": [*_call(0, "{}", "c1", "f")["tool_calls"], *_call(1, '{"b": []}', "c2", "g")["tool_calls"]]}],
        "tool_calls",
        [("call c1 f", "{}"), ("call c2 g", '{"b": []}')],
    ),
    Answer(
        "two calls one after the other",
        [_call(0, "{", "c1", "f"), _call(0, "}"), _call(1, "{}", "c2", "f")],
        "tool_calls",
        [("call c1 f", "{}"), ("call c2 f", "{}")],
    ),
]


def ids(answer: Answer) -> str:
    return answer.name


def events_and_whole(
    kind: type[AnswerStream], request: dict[str, Any], uid: str, answer: Answer
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of an answer as it is streamed, and the whole answer as it is repeated from its record."""
    stream, recorded = kind(request), StreamedAnswer(chat=True)
    for part in answer.parts(uid):
        recorded.add(part)
    events = [event for part in (*answer.parts(uid), DONE) for event in stream.add(part)]
    return events, kind(request).whole(recorded.body())

"""Streams put together give the whole answer; whole answers taken apart give it again."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.gateway.call_forms import parse_request
from rollstream.producers.gateway.streamed_answers import EventLines, StreamedAnswer, event_of, events_of, framed
from rollstream.producers.inference.errors import InferenceRefused
from rollstream.topics.errors import RecordError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": "hm", "tool_calls": [CALL]},
            "token_ids": [3, 4],
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        }
    ],
    "usage": {"prompt_tokens": 2},
}


def test_parts_of_text_tools_tokens_and_logprobs_add_up() -> None:
    whole = StreamedAnswer(chat=True)
    head = {"id": "x", "object": "chat.completion.chunk", "model": "m"}
    opening = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}}
    parts = [
        {
            "delta": {"role": "assistant", "content": "h"},
            "token_ids": [3],
            "logprobs": {"content": [{"logprob": -1.0}]},
        },
        {"delta": {"content": "m", "tool_calls": [opening]}, "token_ids": [4], "logprobs": None},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}, "finish_reason": None},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]}},
        {"delta": {}, "finish_reason": "tool_calls", "logprobs": {"content": [{"logprob": -2.0}]}},
    ]
    for number, part in enumerate(parts):
        assert not whole.complete
        prompt = {"prompt_token_ids": [1, 2]} if number == 0 else {}
        whole.add({**head, **prompt, "choices": [{"index": 0, **part}]})
    assert whole.complete
    whole.add({**head, "choices": [], "usage": {"prompt_tokens": 2}})
    assert whole.body() == ANSWER


def test_a_whole_answer_as_events_is_the_answer_again() -> None:
    whole = StreamedAnswer(chat=True)
    for event in events_of(ANSWER, chat=True, usage=True):
        whole.add(event)
    again = json.loads(json.dumps(whole.body()))
    assert again["choices"][0]["message"]["tool_calls"][0]["function"] == CALL["function"]
    assert {key: again[key] for key in ("id", "usage", "prompt_token_ids")} == {
        key: ANSWER[key] for key in ("id", "usage", "prompt_token_ids")
    }


TEXTS = st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2)


@given(st.lists(TEXTS, max_size=4), st.integers(1, 40))
def test_events_come_whole_however_their_bytes_are_cut(events: list[dict[str, str]], size: int) -> None:
    stream, lines = b"".join(map(framed, events)), EventLines()
    read = [text for at in range(0, len(stream), size) for text in lines.feed(stream[at : at + size])]
    assert [json.loads(text) for text in read] == events


@pytest.mark.parametrize(
    "part",
    [
        {"delta": {"tool_calls": [{"index": 2**40}]}},
        {"delta": {"tool_calls": [{"index": -5}]}},
        {"delta": {"tool_calls": 7}},
        {"delta": {"content": "a"}, "logprobs": "x"},
        {"text": 5},
        {"index": "x"},
        7,
    ],
)
def test_an_event_that_is_none_of_openais_is_refused_by_name(part: Any) -> None:
    whole = StreamedAnswer(chat=True, source="http://server")
    with pytest.raises(InferenceRefused, match="http://server streamed an event not in OpenAI's format"):
        whole.add({"choices": [part]})


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, "7"])
def test_what_is_no_object_is_no_event(text: str) -> None:
    with pytest.raises(InferenceRefused, match="http://server streamed"):
        event_of(text, "http://server")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream_options": [1]}),
        ("completions", {"prompt": "x", "logprobs": "many"}),
        ("completions", {"prompt": "x", "logprobs": float("nan")}),
    ],
)
def test_a_request_whose_own_fields_cannot_be_read_is_the_agents_fault(route: str, body: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="must be"):
        parse_request(route, body)

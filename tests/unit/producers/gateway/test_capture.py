"""A retry gets the answer of the newest equal request, and a stream never goes on with another call's answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import pytest

from rollstream.producers.episodes.branches import branches_of
from rollstream.producers.episodes.call_sequences import CallSequences
from rollstream.producers.gateway.call_forms import AgentRequest, parse_request, previous_turn
from rollstream.producers.gateway.capture import CallCapture, CaptureRules
from rollstream.producers.gateway.upstream import UpstreamAnswer, UpstreamEvent
from rollstream.producers.inference.errors import InferenceUnavailable
from rollstream.topics.records import ModelCall, SessionEvent
from rollstream.topics.wire.codec import decode_as, encode
from tests.support.memory_session_log import log_of

START = SessionEvent(session="g.0", kind="start", author="a", environment="e", example_id="t", group_id="g")
REQUEST = parse_request("completions", {"prompt": "21>"})
STREAMED = parse_request("completions", {"prompt": "21>", "stream": True})


def answer(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    logprobs = {"token_logprobs": [-1.0], "tokens": [text]}
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "token_ids": [2], "logprobs": logprobs}
    return {"id": "x", "prompt_token_ids": [1], "choices": [choice]}


class NumberedUpstream:
    """Answers each call with its number, once `go_on` is set; a stream has a first part before that."""

    model = "policy"

    def __init__(self) -> None:
        self.calls = 0
        self.finish_reason = "stop"
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def call(self, *_request: Any) -> UpstreamAnswer:
        self.calls += 1
        number = self.calls
        await self.go_on.wait()
        return UpstreamAnswer("server", answer(str(number)))

    async def stream(self, *_request: Any) -> AsyncIterator[UpstreamEvent]:
        self.calls += 1
        number = self.calls
        begun = {"id": "x", "prompt_token_ids": [1], "choices": [{"index": 0, "text": "begun"}]}
        yield UpstreamEvent("server", "", json.dumps(begun))
        await self.go_on.wait()
        yield UpstreamEvent("server", "", json.dumps(answer(str(number), self.finish_reason)))

    async def versions_of(self, labels: Collection[str]) -> Mapping[str, int]:
        return dict.fromkeys(labels, -1)

    def note_version(self, url: str, version: int) -> None:
        pass


class Agent:
    """Makes the calls of one session."""

    def __init__(self) -> None:
        self.upstream = NumberedUpstream()
        rules = CaptureRules(temperature=1.0, sampling="run", max_calls=9, author="a")
        self.log, self.session = log_of(START)
        self.capture = CallCapture(self.upstream, self.log, rules)  # type: ignore[arg-type]

    async def ask(self, *, retry: bool = False, delivered: bool = True) -> str:
        """The text of the answer; without `delivered` the connection breaks before the agent has it."""
        call, body = await self.capture.answer(self.session, REQUEST, first_attempt=not retry)
        if delivered:
            self.capture.delivered(self.session, call)
        return str(body["choices"][0]["text"])

    async def texts(self, request: AgentRequest) -> AsyncIterator[str]:
        """The texts of a streamed answer."""
        async for event in self.capture.stream(self.session, request, first_attempt=True):
            if isinstance(event, Mapping):
                yield event["choices"][0]["text"]


def test_a_retry_of_the_second_of_two_equal_requests_gets_the_second_answer() -> None:
    async def scenario() -> None:
        agent = Agent()
        assert await agent.ask() == "1"
        assert await agent.ask(delivered=False) == "2"
        assert await agent.ask(retry=True) == "2"
        assert await agent.ask(retry=True) == "2", "the newest of those delivered"
        assert agent.upstream.calls == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_retry_waits_for_the_equal_request_in_flight_and_gets_no_earlier_answer(leaves: bool) -> None:
    async def scenario() -> None:
        agent = Agent()
        assert await agent.ask() == "1"
        agent.upstream.go_on.clear()
        second = asyncio.ensure_future(agent.ask())
        while agent.upstream.calls < 2:
            await asyncio.sleep(0)
        retry = asyncio.ensure_future(agent.ask(retry=True))
        await asyncio.sleep(0)
        if leaves:
            second.cancel()
        agent.upstream.go_on.set()
        assert await retry == ("3" if leaves else "2")
        assert leaves or await second == "2"

    asyncio.run(scenario())


def test_a_streamed_answer_that_the_server_aborts_is_not_recorded() -> None:
    async def scenario() -> None:
        agent = Agent()
        agent.upstream.finish_reason = "abort"
        stream = agent.texts(STREAMED)
        assert await anext(stream) == "begun"
        with pytest.raises(InferenceUnavailable, match=r"^server aborted the request before its answer was complete"):
            await anext(stream)
        assert not agent.session.calls

    asyncio.run(scenario())


def test_a_stream_that_has_begun_breaks_if_another_answer_to_its_request_is_recorded() -> None:
    async def scenario() -> None:
        agent = Agent()
        agent.upstream.go_on.clear()
        stream = agent.texts(STREAMED)
        assert await anext(stream) == "begun"
        agent.upstream.go_on.set()
        assert await agent.ask(delivered=False) == "2"
        with pytest.raises(ConnectionResetError, match="another answer to this request is recorded"):
            await anext(stream)
        assert [text async for text in agent.texts(STREAMED)] == ["2"]

    asyncio.run(scenario())


FUNCTION = {"name": "f", "arguments": '{"a": "\u00e9 \ud83d"}'}
CALLS = [{"id": "1", "type": "function", "function": FUNCTION}]
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": CALLS}


class CallingUpstream(NumberedUpstream):
    """Answers every request with a tool call whose arguments hold half of a surrogate pair."""

    async def call(self, *_request: Any) -> UpstreamAnswer:
        self.calls += 1
        logprobs = {"content": [{"token": "token_id:2", "logprob": -1.0}]}
        choice = {"index": 0, "message": TOOL_CALL, "finish_reason": "tool_calls", "logprobs": logprobs}
        prompt = [1, 2, 3][: 2 * self.calls - 1]
        return UpstreamAnswer("server", {"id": "x", "prompt_token_ids": prompt, "choices": [choice]})


def test_a_call_with_half_of_a_surrogate_pair_is_recorded_and_continued() -> None:
    async def scenario() -> list[ModelCall]:
        agent = Agent()
        agent.capture = CallCapture(
            CallingUpstream(),  # type: ignore[arg-type]
            agent.log,
            CaptureRules(temperature=1.0, sampling="run", max_calls=9, author="a"),
        )
        return [(await agent.capture.answer(agent.session, request))[0] for request in (first, second)]

    question = {"role": "user", "content": "8+9?"}
    history = [question, TOOL_CALL, {"role": "tool", "tool_call_id": "1", "content": "no \ud83d"}]
    first = parse_request("chat/completions", {"messages": [question]})
    second = parse_request("chat/completions", {"messages": history})
    calls = [decode_as(ModelCall, encode(call)) for call in asyncio.run(scenario())]
    assert r"\u00e9" not in calls[0].answers[0].text + calls[1].messages
    known = CallSequences(calls)
    assert [*known.by_uid[calls[1].uid].messages] == history
    assert previous_turn(second, known) == {"prompt_token_ids": [1], "token_ids": [2]}
    (branch,) = branches_of(calls)
    assert branch.turns[2].text == r"no \ud83d"
    assert [turn.text.encode() for turn in branch.turns]

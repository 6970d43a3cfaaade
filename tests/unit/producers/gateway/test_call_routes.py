"""Over real connections, streams of calls: how they end, and how a repetition waits for the call in flight."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from rollstream.producers.gateway.call_routes import CallRoutes, Listener
from rollstream.producers.gateway.capture import CallCapture, CaptureRules
from rollstream.producers.gateway.memory_log import MemoryLog
from rollstream.producers.gateway.sessions import CapturedSession, PartitionSessions
from rollstream.producers.gateway.upstream import UpstreamAnswer, UpstreamEvent
from rollstream.topics.errors import RecordTooLarge, RollstreamError
from rollstream.topics.records import ModelCall, SessionEvent
from tests.support.log_lines import log_lines
from tests.support.memory_session_log import log_of

PATIENCE_S = 60
START = SessionEvent(session="g.0", kind="start", author="a", environment="e", example_id="t", group_id="g")
BODY = json.dumps({"prompt": "21>", "stream": True}).encode()
REQUEST = (
    b"POST /completions HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def event(text: str, **fields: Any) -> str:
    return json.dumps({"id": "x", "prompt_token_ids": [1], "choices": [{"index": 0, "text": text, **fields}]})


class EndlessUpstream:
    """Streams the answer of its first call without an end once `go_on` is set, and short answers to later calls."""

    model = "policy"

    def __init__(self) -> None:
        self.go_on, self.began = asyncio.Event(), asyncio.Event()
        self.calls = 0
        self.calls_at_the_end_of_the_first = 0

    async def stream(self, *_request: Any) -> AsyncIterator[UpstreamEvent]:
        self.calls += 1
        if self.calls == 1:
            self.began.set()
            await self.go_on.wait()
            try:
                while True:
                    yield UpstreamEvent("server", "", event("x" * 2**20))
            finally:
                self.calls_at_the_end_of_the_first = self.calls
        logprobs = {"token_logprobs": [-1.0], "tokens": ["12"]}
        yield UpstreamEvent("server", "", event("12", finish_reason="stop", token_ids=[2], logprobs=logprobs))

    async def versions_of(self, labels: Collection[str]) -> Mapping[str, int]:
        return dict.fromkeys(labels, -1)

    def note_version(self, url: str, version: int) -> None:
        pass


class BrokenUpstream(EndlessUpstream):
    """Streams the beginning of an answer, then the error of its server, or nothing."""

    def __init__(self, *last: str) -> None:
        super().__init__()
        self.last = last

    async def stream(self, *_request: Any) -> AsyncIterator[UpstreamEvent]:
        for data in (event("1"), *self.last):
            yield UpstreamEvent("server", "", data)


class Recording(MemoryLog):
    """Records another answer to the request at the moment at which a call is recorded."""

    async def append(self, record: ModelCall | SessionEvent) -> None:
        if isinstance(record, ModelCall):
            await super().append(replace(record, uid="earlier"))
        await super().append(record)


@asynccontextmanager
async def listening(upstream: Any, log: MemoryLog | None = None) -> AsyncIterator[tuple[str, Listener, list[Any]]]:
    """URL and server of the calls of one session, and the errors that failed them."""
    (log, session), failures = log_of(START, log), list[Any]()

    async def session_of(_http: web.Request) -> CapturedSession:
        return session

    async def fail(_session: CapturedSession, error: RollstreamError, _request: object) -> None:
        failures.append(error)

    rules = CaptureRules(temperature=1.0, sampling="run", max_calls=9, author="a")
    capture = CallCapture(upstream, log, rules)
    listener = Listener("gateway", 2**20)
    routes = CallRoutes(capture, session_of, fail)
    url = await listener.listen([*routes.routes(""), *routes.routes("/v1")], "127.0.0.1", 0)
    try:
        yield url, listener, failures
    finally:
        await listener.close()


async def raw_answer(url: str) -> bytes:
    """All bytes of the answer to a streamed request, until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    answer = bytearray()
    try:
        writer.write(REQUEST)
        while part := await asyncio.wait_for(reader.read(2**16), PATIENCE_S):
            answer += part
    except ConnectionError:
        pass
    finally:
        writer.close()
    return bytes(answer)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (
            (json.dumps({"error": {"message": "CUDA out of memory"}}),),
            "server ended a stream with an error: CUDA",
        ),
        ((json.dumps({"error": "no memory"}), "[DONE]"), "server ended a stream with an error: no memory"),
        ((), "server ended a stream before the answer was complete"),
        (("{",), "server streamed invalid JSON"),
    ],
)
def test_an_error_after_the_first_event_is_the_last_event_of_the_stream(last: tuple[str, ...], message: str) -> None:
    async def scenario() -> None:
        async with listening(BrokenUpstream(*last)) as (url, listener, failures):
            answer = await raw_answer(url)
            assert answer.count(b"HTTP/1.1") == 1
            assert answer.endswith(b"\r\n0\r\n\r\n"), "the stream has an end"
            events = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith(b"data:")]
            assert [part["choices"][0]["text"] for part in events[:-1]] == ["1"]
            assert message in events[-1]["error"]["message"]
            assert events[-1]["error"]["type"] == "server_error"
            assert [message in str(error) for error in failures] == [True], "the episode is cancelled for that reason"
            assert listener.errors == 1
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                with pytest.raises(openai.APIError, match=message):
                    async for _part in await client.completions.create(model="m", prompt="21>", stream=True):
                        pass

    asyncio.run(scenario())


def test_an_error_after_the_first_event_reaches_clients_of_responses_and_messages() -> None:
    """Clients raise it, and the stream of a client that is told has an end."""

    async def scenario() -> None:
        last = json.dumps({"error": {"message": "CUDA out of memory"}})
        async with listening(BrokenUpstream(last)) as (url, listener, failures):
            names: Any = {"base_url": url, "api_key": "none", "max_retries": 0}
            async with openai.AsyncOpenAI(**names) as client, anthropic.AsyncAnthropic(**names) as other:
                stream = await client.responses.create(model="m", input="21>", stream=True)
                begun = [(await anext(stream)).type for _ in range(2)]
                assert begun == ["response.created", "response.in_progress"]
                with pytest.raises(openai.APIError, match="CUDA out of memory"):
                    await anext(stream)
                messages: Any = [{"role": "user", "content": "21>"}]
                with pytest.raises(anthropic.APIError, match="CUDA out of memory") as broken:
                    async for _ in await other.messages.create(model="m", messages=messages, max_tokens=9, stream=True):
                        pass
                assert broken.value.body["error"]["type"] == "api_error"  # type: ignore[index]
            assert (listener.errors, len(failures)) == (2, 2)

    asyncio.run(scenario())


class LaggingLog(MemoryLog):
    """The log of a gateway that believes to be alone: it reads what others appended only when it asks for all."""

    def __init__(self, records: list[ModelCall | SessionEvent]) -> None:
        super().__init__()
        self.records = records

    async def append(self, record: ModelCall | SessionEvent) -> None:
        self.records.append(record)
        await self.current(0)

    async def current(self, partition: int) -> PartitionSessions:
        fold = self.folds[partition]
        for record in self.records[fold.position - 1 :]:
            fold.apply(fold.position, 0, record)
        return fold


class AddingUpstream(EndlessUpstream):
    """Answers each chat with the number of its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[Any] = []

    async def call(self, _session: str, _path: str, body: Any, _turn: Any) -> UpstreamAnswer:
        self.bodies.append(body)
        message = {"role": "assistant", "content": str(len(body["messages"]))}
        logprobs = {"content": [{"token": "token_id:2", "logprob": -1.0}]}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}
        prompt = [1, 2, 3, 2, 3][: 2 * len(self.bodies) - 1]
        return UpstreamAnswer("server", {"id": "x", "prompt_token_ids": prompt, "choices": [choice]})


def test_a_gateway_continues_a_response_that_another_has_just_recorded() -> None:
    async def scenario() -> None:
        upstream, records = AddingUpstream(), list[ModelCall | SessionEvent]()
        async with (
            listening(upstream, LaggingLog(records)) as (first, _, _),
            listening(upstream, LaggingLog(records)) as (second, _, _),
        ):
            previous: Any = openai.omit
            for url in (first, second, first):
                async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                    response = await client.responses.create(model="m", input="1+1?", previous_response_id=previous)
                previous = response.id
            assert response.output_text == "5"
            user, answers = {"role": "user", "content": "1+1?"}, [{"role": "assistant", "content": n} for n in "13"]
            assert upstream.bodies[-1]["messages"] == [user, answers[0], user, answers[1], user]
            assert [record.uid for record in records if isinstance(record, ModelCall)][-1] == previous

    asyncio.run(scenario())


class Full(MemoryLog):
    """Takes no record, because each one is too large."""

    async def append(self, _record: ModelCall | SessionEvent) -> None:
        raise RecordTooLarge("a record has 9 bytes; raise kafka.max_record_bytes")


def test_a_sampled_answer_that_is_too_large_to_record_fails_its_episode() -> None:
    """Otherwise an agent that goes on would get a reward for an episode without its longest answers."""

    async def scenario() -> None:
        upstream = EndlessUpstream()
        upstream.calls = 1
        async with listening(upstream, Full()) as (url, _listener, failures):
            answer = await raw_answer(url)
            assert b"kafka.max_record_bytes" in answer
            assert b"server_error" in answer, "it is not the agent's fault"
            assert [type(failure) for failure in failures] == [RecordTooLarge]

    asyncio.run(scenario())


def test_a_stream_whose_answer_is_not_the_recorded_one_breaks_and_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logprobs = {"token_logprobs": [-1.0], "tokens": ["2"]}
    last = event("2", finish_reason="stop", token_ids=[2], logprobs=logprobs)

    async def scenario() -> None:
        async with listening(BrokenUpstream(last), Recording()) as (url, listener, failures):
            answer = await raw_answer(url)
            assert answer.count(b"HTTP/1.1") <= 1
            assert not answer.endswith(b"\r\n0\r\n\r\n"), "a client that is still there asks again"
            assert (listener.errors, failures) == (0, [])
            assert b'"text":"12"' in await raw_answer(url), "the recorded one"

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert [record.message for record in caplog.records if record.name.endswith("call_routes")] == ["client_left"]


async def answer_to_the_repetition(upstream: EndlessUpstream, stalled_client_s: float) -> bytes:
    """The whole answer of a request that repeats one whose client sends it and then reads nothing."""
    log, session = log_of(START)
    repeated = asyncio.Event()

    async def session_of(_http: web.Request) -> CapturedSession:
        if upstream.calls:
            repeated.set()
        return session

    async def fail(_session: CapturedSession, error: RollstreamError, _request: object) -> None:
        raise AssertionError(error)

    rules = CaptureRules(temperature=1.0, sampling="run", max_calls=9, author="a")
    capture = CallCapture(upstream, log, rules)  # type: ignore[arg-type]
    routes = CallRoutes(capture, session_of, fail, stalled_client_s=stalled_client_s)
    listener = Listener("gateway", 2**20)
    url = await listener.listen(routes.routes(""), "127.0.0.1", 0)
    port = int(url.rpartition(":")[2])
    writers = []
    try:
        _unread, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(REQUEST)
        await asyncio.wait_for(upstream.began.wait(), PATIENCE_S)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(REQUEST)
        await asyncio.wait_for(repeated.wait(), PATIENCE_S)
        upstream.go_on.set()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        for writer in writers:
            writer.transport.abort()
        await listener.close()


def test_a_stream_that_repeats_one_in_flight_does_not_wait_for_ever_for_a_client_that_reads_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        upstream = EndlessUpstream()
        answer = await answer_to_the_repetition(upstream, 0.2)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"text":"12"' in answer
        assert b"data: [DONE]" in answer
        assert (upstream.calls_at_the_end_of_the_first, upstream.calls) == (1, 2), "it waited, and was sampled then"

    asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "to leave is no error"


def test_a_mistake_of_ours_is_logged_with_its_traceback_and_a_broken_body_is_the_clients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        raise NameError("name 'labeled' is not defined")

    monkeypatch.setattr(CallCapture, "answer", mistaken)

    async def statuses() -> list[int]:
        async with listening(BrokenUpstream()) as (url, _, _), aiohttp.ClientSession() as http:
            requests: list[dict[str, Any]] = [
                {"json": {"prompt": "21>"}},
                {"data": b"{}", "headers": {"Content-Encoding": "gzip"}},
            ]
            return [(await http.post(f"{url}/completions", **request)).status for request in requests]

    assert asyncio.run(statuses()) == [500, 400]
    assert log_lines(caplog).count("Traceback") == 1
    assert ", in mistaken" in log_lines(caplog)

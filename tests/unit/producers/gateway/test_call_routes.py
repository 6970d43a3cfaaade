"""Over real connections, a streamed call that repeats one in flight waits for it, and not for a client that stalls."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

from aiohttp import web

from rollstream.producers.gateway.call_routes import CallRoutes, Listener
from rollstream.producers.gateway.capture import CallCapture, CaptureRules
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.gateway.upstream import UpstreamEvent
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import SessionEvent
from tests.support.memory_session_log import MemoryLog

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

    def note_version(self, version: int) -> None:
        pass


async def answer_to_the_repetition(upstream: EndlessUpstream, stalled_client_s: float) -> bytes:
    """The whole answer of a request that repeats one whose client sends it and then reads nothing."""
    session = CapturedSession(START, 0, -1, 0)
    repeated = asyncio.Event()

    async def session_of(_http: web.Request) -> CapturedSession:
        if upstream.calls:
            repeated.set()
        return session

    async def fail(_session: CapturedSession, error: RollstreamError) -> None:
        raise AssertionError(error)

    rules = CaptureRules(temperature=1.0, sampling="run", max_calls=9, author="a")
    capture = CallCapture(upstream, MemoryLog(), rules)  # type: ignore[arg-type]
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


def test_a_stream_that_repeats_one_in_flight_does_not_wait_for_ever_for_a_client_that_reads_nothing() -> None:
    async def scenario() -> None:
        upstream = EndlessUpstream()
        answer = await answer_to_the_repetition(upstream, 0.2)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"text":"12"' in answer
        assert b"data: [DONE]" in answer
        assert (upstream.calls_at_the_end_of_the_first, upstream.calls) == (1, 2), "it waited, and was sampled then"

    asyncio.run(scenario())

"""Bounds of HTTP servers on real sockets: what a client may hold without asking for anything, and for how long."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import ClientSession, web

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.http_server import BoundServer, ConnectionLimits, listen

HALF = b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENT_S = 60.0


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def never(_request: web.Request) -> web.Response:
    await asyncio.sleep(PATIENT_S)
    return web.Response()


def against(limits: ConnectionLimits, client: Callable[[BoundServer], Awaitable[None]], most: int = 1000) -> None:
    """Run a client against a server on a free port."""

    async def run() -> None:
        routes = [web.get("/", echo), web.post("/", echo), web.get("/never", never)]
        server = await listen(
            routes,
            "127.0.0.1",
            0,
            name="server",
            setting="x.port",
            max_body_bytes=most,
            max_body_setting="x.most",
            limits=limits,
            shutdown_timeout=0.1,
        )
        try:
            await asyncio.wait_for(client(server), PATIENT_S)
        finally:
            while WRITERS:
                WRITERS.pop().close()
            await server.close()

    asyncio.run(run())


WRITERS: list[asyncio.StreamWriter] = []
"""Ends of connections of this file's clients, to be closed after each test."""


async def connected(server: BoundServer, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    WRITERS.append(writer)
    writer.write(sent)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("sent", [b"", b"G", HALF])
def test_a_request_that_is_never_finished_is_given_up(sent: bytes) -> None:
    async def client(server: BoundServer) -> None:
        reader, _writer = await connected(server, sent)
        assert await reader.read() == b""

    against(ConnectionLimits(head_s=0.2, idle_s=PATIENT_S), client)


def test_bytes_that_trickle_in_do_not_keep_a_request_open() -> None:
    async def client(server: BoundServer) -> None:
        reader, writer = await connected(server, HALF)
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            writer.write(b"x")
            await asyncio.wait([ended], timeout=0.02)
        # A byte that was sent when the server had closed is answered with a reset, which may overtake the end.
        if not isinstance(ended.exception(), ConnectionResetError):
            assert ended.result() == b""

    against(ConnectionLimits(head_s=0.3, idle_s=PATIENT_S), client)


def test_many_half_sent_requests_keep_nobody_else_out_for_long() -> None:
    async def client(server: BoundServer) -> None:
        held = [await connected(server, HALF) for _ in range(50)]
        reader, _writer = await connected(server, WHOLE)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in await reader.read()
        for other, _ in held:
            assert await other.read() == b""
        async with ClientSession() as session, session.get(server.url) as answer:
            assert answer.status == 200

    against(ConnectionLimits(connections=50, head_s=3.0), client)


def test_a_connection_is_kept_for_further_requests_and_closed_when_none_comes() -> None:
    async def client(server: BoundServer) -> None:
        reader, writer = await connected(server, WHOLE)
        for _ in range(3):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(WHOLE)
        assert (await reader.read()).count(b"HTTP/1.1 200") == 1

    against(ConnectionLimits(idle_s=0.5), client)


def test_an_answer_may_take_longer_than_its_request() -> None:
    async def client(server: BoundServer) -> None:
        reader, _writer = await connected(server, WHOLE.replace(b"/ ", b"/never ", 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 1.0)

    against(ConnectionLimits(head_s=0.1, body_s=0.1, idle_s=0.1), client)


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def client(server: BoundServer) -> None:
        sent = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc"
        reader, _writer = await connected(server, sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 the body did not arrive within 0.2 s")

    against(ConnectionLimits(body_s=0.2), client)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01 no HTTP\r\n\r\n",
    ],
)
def test_clients_that_hang_up_or_speak_something_else_are_no_failures_of_the_server(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def client(server: BoundServer) -> None:
        _reader, writer = await connected(server, sent)
        writer.transport.abort()
        reader, _writer = await connected(server, WHOLE)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"

    against(ConnectionLimits(), client)
    assert [record.getMessage() for record in caplog.records] == []


def test_a_body_beyond_the_bound_is_refused_with_the_setting() -> None:
    async def client(server: BoundServer) -> None:
        async with ClientSession() as session:
            async with session.post(server.url, data=b"x" * 1000) as answer:
                assert (answer.status, len(await answer.read())) == (200, 1000)
            async with session.post(server.url, data=b"x" * 1001) as answer:
                assert (answer.status, answer.reason) == (413, "the body has more than 1000 bytes; raise x.most")

    against(ConnectionLimits(), client)


def test_a_port_in_use_is_an_error_with_the_setting() -> None:
    async def client(server: BoundServer) -> None:
        with pytest.raises(ConfigurationError, match=r"the other cannot listen on .* or set y\.port"):
            await listen([], "127.0.0.1", server.port, name="other", setting="y.port", max_body_bytes=1)

    against(ConnectionLimits(), client)

"""HTTP servers of the project: one function to listen, with limits on the resources that an idle client can occupy.

aiohttp waits forever for the remainder of a request after its first bytes, and accepts any number of connections. A few
thousand half-sent requests could therefore use up a server's memory and file descriptors.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollstream.topics.errors import ConfigurationError

logger = logging.getLogger(__name__)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 21\r\n\r\ntoo many connections\n"
)
_BACKLOG = 1024
"""Connections that the system holds until this process accepts them."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ConnectionLimits(NamedTuple):
    """Limits on a server's connections."""

    connections: int = 4096
    """Simultaneous connections; further connections are answered with 503 and closed."""
    head_s: float = 20.0
    """Longest time from the first byte of a request, or from connecting, to the end of its headers."""
    body_s: float = 60.0
    """Longest time in which the body of a request must arrive."""
    idle_s: float = 75.0
    """Time for which a connection is kept open after an answer, for the next request."""


DEFAULT_LIMITS = ConnectionLimits()


class BoundServer:
    """A server that listens; `url` is its address."""

    def __init__(self, runner: web.AppRunner, host: str) -> None:
        self._runner = runner
        self.port: int = runner.addresses[0][1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def close(self) -> None:
        """Stop listening, and finish the requests in progress."""
        await self._runner.cleanup()


async def listen(
    routes: Sequence[web.AbstractRouteDef],
    host: str,
    port: int,
    *,
    name: str,
    setting: str,
    max_body_bytes: int,
    max_body_setting: str = "",
    middlewares: Sequence[Any] = (),
    prepare: Callable[[web.Application], None] = lambda _app: None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    listener: socket.socket | None = None,
    **options: Any,
) -> BoundServer:
    """Listen on an address, or on `listener`, a socket that listens there; port 0 stands for any free port.

    Errors mention `name`, the server's name, and the settings `setting` for its port and `max_body_setting` for the
    limit of bodies. `options` are passed to AppRunner. Raises ConfigurationError if it cannot listen on the address.
    """
    remedy = f"; raise {max_body_setting}" if max_body_setting else ""
    too_large = f"the body has more than {max_body_bytes} bytes{remedy}"
    connections: dict[Any, _Connection] = {}
    bounded = _bounded(connections, limits, too_large)
    app = web.Application(client_max_size=max_body_bytes, middlewares=[*middlewares, bounded])
    app.add_routes(routes)
    prepare(app)
    runner = web.AppRunner(app, access_log=None, logger=logger, **options)
    await runner.setup()
    try:
        await _Site(runner, host, port, connections, limits, listener).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigurationError(
            f"the {name} cannot listen on {host}:{port} ({error.strerror}); stop the program that uses the port, or "
            f"set {setting} (0 selects a free port)"
        ) from error
    return BoundServer(runner, host)


class _FailuresOfServer(logging.Filter):
    """Passes only failures of the server; aiohttp also logs each malformed request as an error with a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or not issubclass(kind, HttpProcessingError | web.RequestPayloadError)


logger.addFilter(_FailuresOfServer())


class _Connection(asyncio.Protocol):
    """Passes a connection on to aiohttp, and closes it if no request arrives in time."""

    def __init__(self, handler: Any, connections: "dict[Any, _Connection]", limits: ConnectionLimits) -> None:
        self._handler, self._connections, self._limits = handler, connections, limits
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._admitted = self._idle = self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._connections) >= self._limits.connections:
            transport.write(_FULL)
            transport.close()
            return
        self._admitted = True
        self._connections[self._handler] = self
        self._handler.connection_made(transport)
        self._close_after(self._limits.head_s)

    def data_received(self, data: bytes) -> None:
        if not self._admitted:
            return
        if self._idle and not self._busy:
            self._idle = False
            self._close_after(self._limits.head_s)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return bool(self._handler.eof_received()) if self._admitted else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._admitted:
            self._connections.pop(self._handler, None)
            self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._admitted:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._admitted:
            self._handler.resume_writing()

    def begin(self) -> None:
        """Note that the headers of a request have arrived."""
        self._busy = True
        self._stop_timer()

    def end(self) -> None:
        """Note that a request has been answered."""
        self._busy, self._idle = False, True
        self._close_after(self._limits.idle_s)

    def _close_after(self, seconds: float) -> None:
        self._stop_timer()
        if self._transport is not None and not self._transport.is_closing():
            self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Site(web.BaseSite):
    """An address at which a runner's server accepts connections, within limits."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        connections: dict[Any, _Connection],
        limits: ConnectionLimits,
        listener: socket.socket | None,
    ) -> None:
        super().__init__(runner)
        self._host, self._port, self._socket = host, port, listener
        self._connections, self._limits = connections, limits

    @property
    def name(self) -> str:
        """The address, for aiohttp's messages."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()

        def connection() -> _Connection:
            return _Connection(server(), self._connections, self._limits)

        if self._socket is None:
            self._server = await loop.create_server(connection, self._host, self._port, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(connection, sock=self._socket, backlog=_BACKLOG)


def _bounded(connections: dict[Any, _Connection], limits: ConnectionLimits, too_large: str) -> Any:
    """Return the middleware that reads bodies and notifies connections when a request begins and ends."""

    @web.middleware
    async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = connections.get(request.protocol)
        if connection is not None:
            connection.begin()
        try:
            if request.can_read_body:
                try:
                    async with asyncio.timeout(limits.body_s):  # cheaper than wait_for, which creates a task
                        await request.read()
                except TimeoutError:
                    raise web.HTTPRequestTimeout(
                        reason=f"the body did not arrive within {limits.body_s:g} s", headers={"Connection": "close"}
                    ) from None
                except ConnectionError:
                    # Nobody reads this answer; it keeps the server from logging a failure.
                    raise web.HTTPBadRequest(reason="the client disconnected before the end of the body") from None
                except web.RequestPayloadError as error:
                    reason = f"the body cannot be decoded: {' '.join(str(error).split())}"
                    raise web.HTTPBadRequest(reason=reason, headers={"Connection": "close"}) from error
                except web.HTTPRequestEntityTooLarge:
                    most = request.client_max_size
                    raise web.HTTPRequestEntityTooLarge(most, most + 1, reason=too_large) from None
            return await handler(request)
        finally:
            if connection is not None:
                connection.end()

    return bounded


__all__ = ["BoundServer", "ConnectionLimits", "listen"]

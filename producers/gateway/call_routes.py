"""HTTP routes, events and errors of model calls, for the gateway's server and for the endpoint in a worker."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from rollstream.producers.gateway.call_forms import ROUTES, parse_request
from rollstream.producers.gateway.capture import CallCapture
from rollstream.producers.gateway.errors import NoCapacity, NoSuchSession, NoVersion, SessionClosed, UpstreamRefused
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.gateway.streamed_answers import framed
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused, InferenceUnavailable
from rollstream.producers.json_text import decode, encode
from rollstream.topics.errors import DeadlineExceeded, DeliveryError, RecordError, RollstreamError
from rollstream.topics.http_server import BoundServer, listen
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_RETRIABLE = (429, 503)
_STATUS: tuple[tuple[type[RollstreamError], int, str], ...] = (
    (NoSuchSession, 404, "session_not_found"),
    (SessionClosed, 410, "session_closed"),
    (NoCapacity, 429, "no_capacity"),
    (NoVersion, 503, "not_ready"),
    (InferenceUnavailable, 502, "inference_unavailable"),
    (InferenceRefused, 502, "inference_refused"),
    (DeliveryError, 503, "log_unavailable"),
    (DeadlineExceeded, 503, "log_unavailable"),
    (RecordError, 400, "invalid_request"),
)
"""Status and code of each error type; the first match applies."""
Events = AsyncGenerator[Mapping[str, Any] | str, None]


class CallRoutes:
    """Handlers of the captured routes."""

    def __init__(
        self,
        capture: CallCapture,
        session_of: Callable[[web.Request], Awaitable[CapturedSession]],
        on_failure: Callable[[CapturedSession, RollstreamError], Awaitable[None]],
        *,
        stalled_client_s: float = 60.0,
    ) -> None:
        """`on_failure` is called with the error of a call that failed or was too long, but not if a server refused the
        agent's request for another reason. A client that takes nothing of a stream for `stalled_client_s` is given
        up."""
        self._capture, self._session_of, self._on_failure = capture, session_of, on_failure
        self._stalled_client_s = stalled_client_s
        self.requests = 0
        """Number of requests, whatever their outcome."""

    def routes(self, prefix: str) -> list[web.RouteDef]:
        """Return the routes below a path."""
        return [web.post(f"{prefix}/{route}", self._handler(route)) for route in ROUTES]

    def _handler(self, route: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            self.requests += 1
            session = await self._session_of(http)
            request = parse_request(route, await json_body(http), http.headers.get("Idempotency-Key", ""))
            # OpenAI's own clients send the number of their retries.
            first_attempt = http.headers.get("x-stainless-retry-count") == "0"
            try:
                if request.streamed:
                    events = self._capture.stream(session, request, first_attempt=first_attempt)
                    return await _write_events(http, events, self._stalled_client_s)
                call, answer = await self._capture.answer(session, request, first_attempt=first_attempt)
            except UpstreamRefused as error:
                if isinstance(error.cause, ContextTooLong):
                    await self._on_failure(session, error.cause)
                raise
            except (InferenceUnavailable, InferenceRefused) as error:
                await self._on_failure(session, error)
                raise
            except SessionClosed as error:
                if session.closed is None and not session.ended:
                    await self._on_failure(session, error)
                raise
            response = web.Response(body=encode(answer), content_type="application/json", charset="utf-8")
            await response.prepare(http)
            await response.write_eof()
            self._capture.delivered(session, call)
            return response

        return handle


async def _write_events(http: web.Request, events: Events, stalled_client_s: float) -> web.StreamResponse:
    """Write a stream. Errors before the first event fail the request; later errors end the stream.

    A client that takes nothing for `stalled_client_s` is given up, because its retry waits for the answer of this call.
    """
    response: web.StreamResponse | None = None
    async with aclosing(events):
        async for part in events:
            try:
                async with asyncio.timeout(stalled_client_s):
                    if response is None:
                        response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
                        response.content_type = "text/event-stream"
                        await response.prepare(http)
                    await response.write(framed(part))
            except TimeoutError as error:
                raise ConnectionResetError(f"the client took nothing for {stalled_client_s:g} s") from error
    assert response is not None, "a stream has a last event"
    await response.write_eof()
    return response


class Listener:
    """An HTTP server whose errors are in OpenAI's format."""

    def __init__(self, name: str, max_body_bytes: int, *, max_body_setting: str = "") -> None:
        """`name` names the server in errors, and `max_body_setting` the setting of `max_body_bytes`."""
        self._name = name
        self._max_body_bytes, self._max_body_setting = max_body_bytes, max_body_setting
        self._server: BoundServer | None = None
        self.errors = 0
        """Requests answered with an error."""

    async def listen(self, routes: Sequence[web.RouteDef], host: str, port: int) -> str:
        """Listen, and return the URL. Raises ConfigurationError if the address cannot be bound."""
        self._server = await listen(
            routes,
            host,
            port,
            name=self._name,
            setting=f"{self._name}.port",
            max_body_bytes=self._max_body_bytes,
            max_body_setting=self._max_body_setting,
            middlewares=[self._openai_errors],
            shutdown_timeout=10.0,
        )
        return self._server.url

    async def close(self) -> None:
        """Stop listening, and finish the requests in flight."""
        if self._server:
            await self._server.close()

    @web.middleware
    async def _openai_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except UpstreamRefused as error:
            # The agent's request is at fault, so the agent receives the server's own error.
            self.errors += 1
            return web.Response(text=error.text, status=error.status, content_type="application/json")
        except RollstreamError as error:
            self.errors += 1
            known = ((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
            return _error(str(error), *next(known, (503, "unavailable")))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            self.errors += 1
            return _error(error.reason, error.status, "invalid_request")
        except Exception as error:  # only this request fails; the server continues
            self.errors += 1
            event(logger, "request_failed", level=logging.ERROR, path=request.path, error=repr(error))
            return _error(repr(error), 500, "internal")


def _error(message: str, status: int, code: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in _RETRIABLE else {}
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers=headers)


async def json_body(http: web.Request) -> Any:
    """Return the JSON of a request, an empty object if it has no body. Raises RecordError."""
    try:
        return decode(await http.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the body is not JSON: {error}") from error

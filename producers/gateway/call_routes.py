"""HTTP routes, events and errors of model calls, for the gateway's server and for the endpoint in a worker."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from rollstream.producers.gateway.call_forms import AgentRequest
from rollstream.producers.gateway.capture import CallCapture
from rollstream.producers.gateway.dialects.selection import (
    CALL_ROUTES,
    COUNT_ROUTE,
    DIALECTS,
    agent_request,
    error_in_form,
)
from rollstream.producers.gateway.errors import NoCapacity, NoSuchSession, NoVersion, SessionClosed, UpstreamRefused
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.producers.gateway.streamed_answers import framed
from rollstream.producers.inference.dialects.fields import BadRequest
from rollstream.producers.inference.errors import ContextTooLong, InferenceRefused, InferenceUnavailable
from rollstream.producers.json_text import decode, encode
from rollstream.topics.errors import DeadlineExceeded, DeliveryError, RecordError, RecordTooLarge, RollstreamError
from rollstream.topics.http_server import BoundServer, listen
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_RETRIABLE = (429, 503)
_WRONG_SETTINGS = (401, 403, 404)
"""Statuses with which a server refuses any request: its key, its model and its URL are settings, not the agent's."""
_STATUS: tuple[tuple[type[RollstreamError], int, str], ...] = (
    (NoSuchSession, 404, "session_not_found"),
    (SessionClosed, 410, "session_closed"),
    (NoCapacity, 429, "no_capacity"),
    (NoVersion, 503, "not_ready"),
    (InferenceUnavailable, 502, "inference_unavailable"),
    (InferenceRefused, 502, "inference_refused"),
    (DeliveryError, 503, "log_unavailable"),
    (DeadlineExceeded, 503, "log_unavailable"),
    (RecordTooLarge, 500, "record_too_large"),
    (RecordError, 400, "invalid_request"),
)
"""Status and code of each error type; the first match applies."""


class CallRoutes:
    """Handlers of the captured routes."""

    def __init__(
        self,
        capture: CallCapture,
        session_of: Callable[[web.Request], Awaitable[CapturedSession]],
        on_failure: Callable[[CapturedSession, RollstreamError, AgentRequest], Awaitable[None]],
        *,
        stalled_client_s: float = 60.0,
    ) -> None:
        """`on_failure` is called with the error and the request of a call that failed or was too long, but not if a
        server refused the request because of its content. A client that takes nothing of a stream for
        `stalled_client_s` is given up."""
        self._capture, self._session_of, self._on_failure = capture, session_of, on_failure
        self._stalled_client_s = stalled_client_s
        self.requests = 0
        """Number of requests, whatever their outcome."""

    def routes(self, prefix: str) -> list[web.RouteDef]:
        """Return the routes below a path. Anthropic's clients add v1 to any base URL."""
        paths = [(f"{prefix}/{route}", route) for route in CALL_ROUTES]
        paths += [(f"{prefix}/v1/{route}", route) for route in CALL_ROUTES if "messages" in route and "v1" in prefix]
        return [web.post(path, self._handler(route)) for path, route in paths]

    def _handler(self, route: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            self.requests += 1
            stream = _EventResponse(http, self._stalled_client_s)
            try:
                if route == COUNT_ROUTE:
                    return await self._count(http)
                return await self._answer(http, route, stream)
            except ConnectionError:
                raise
            except Exception as error:
                if stream.begun:
                    raise _BrokenStream(stream, error) from error
                raise

        return handle

    async def _answer(self, http: web.Request, route: str, stream: "_EventResponse") -> web.StreamResponse:
        """Answer a request, in `stream` if it asks for one."""
        session, body = await self._session_of(http), await json_body(http)
        request = await self._request(session, route, body, http.headers.get("Idempotency-Key", ""))
        dialect = DIALECTS[route].stream(body) if route in DIALECTS else None
        # The clients of OpenAI and Anthropic send the number of their retries.
        first_attempt = http.headers.get("x-stainless-retry-count") == "0"
        try:
            if request.streamed:
                async with aclosing(self._capture.stream(session, request, first_attempt=first_attempt)) as parts:
                    async for part in parts:
                        for translated in (part,) if dialect is None else dialect.add(part):
                            await stream.write(translated)
                return await stream.end()
            call, answer = await self._capture.answer(session, request, first_attempt=first_attempt)
        except UpstreamRefused as error:
            if isinstance(error.cause, ContextTooLong) or error.status in _WRONG_SETTINGS:
                await self._on_failure(session, error.cause, request)
            raise
        except (InferenceUnavailable, InferenceRefused, RecordTooLarge) as error:
            # An answer that was sampled and cannot be recorded may not be missing from the episode.
            await self._on_failure(session, error, request)
            raise
        except SessionClosed as error:
            if session.closed is None and not session.ended:
                await self._on_failure(session, error, request)
            raise
        answer = answer if dialect is None else dialect.whole(answer)
        response = web.Response(body=encode(answer), content_type="application/json", charset="utf-8")
        await response.prepare(http)
        await response.write_eof()
        self._capture.delivered(session, call)
        return response

    async def _request(self, session: CapturedSession, route: str, body: Any, key: str = "") -> AgentRequest:
        """Return a request, which may continue a call that another gateway has just recorded."""
        if isinstance(body, dict) and isinstance(previous := body.get("previous_response_id"), str):
            await self._capture.know(session, previous)
        return agent_request(route, body, key, session.sequences)

    async def _count(self, http: web.Request) -> web.Response:
        session, body = await self._session_of(http), await json_body(http)
        counted = {"max_tokens": 1, **body} if isinstance(body, dict) else body
        request = await self._request(session, "messages", counted)
        return web.json_response({"input_tokens": await self._capture.prompt_tokens(session, request)})


class _EventResponse:
    """The stream that answers one request; it begins with its first event.

    A client that takes nothing for `stalled_client_s` is given up, because its retry waits for the answer of this call.
    """

    def __init__(self, http: web.Request, stalled_client_s: float) -> None:
        self._http, self._stalled_client_s = http, stalled_client_s
        self._response: web.StreamResponse | None = None
        self.events = 0
        """Number of events written."""

    @property
    def begun(self) -> bool:
        """Whether the client may have an event, so that no other answer can be given."""
        return self._response is not None

    async def write(self, part: Mapping[str, Any] | str) -> None:
        """Write an event. Raises ConnectionError if the client is gone or given up."""
        try:
            async with asyncio.timeout(self._stalled_client_s):
                if self._response is None:
                    self._response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
                    self._response.content_type = "text/event-stream"
                    await self._response.prepare(self._http)
                await self._response.write(framed(part))
                self.events += 1
        except TimeoutError as error:
            raise ConnectionResetError(f"the client took nothing for {self._stalled_client_s:g} s") from error

    async def end(self) -> web.StreamResponse:
        """End the stream."""
        assert self._response is not None, "a stream has a last event"
        await self._response.write_eof()
        return self._response


class _BrokenStream(Exception):
    """An error after the first event of a stream, which can only be told in the stream."""

    def __init__(self, stream: _EventResponse, error: Exception) -> None:
        super().__init__(str(error))
        self.stream, self.error = stream, error


class Listener:
    """An HTTP server whose errors are in the form of the dialect that the path belongs to, else in OpenAI's."""

    def __init__(
        self,
        name: str,
        max_body_bytes: int,
        *,
        max_body_setting: str = "",
        on_mistake: Callable[[Exception], object] = lambda _error: None,
    ) -> None:
        """`name` names the server in errors, and `max_body_setting` the setting of `max_body_bytes`. `on_mistake`
        receives errors that neither a request, a server nor the log can cause."""
        self._name, self._on_mistake = name, on_mistake
        self._max_body_bytes, self._max_body_setting = max_body_bytes, max_body_setting
        self._server: BoundServer | None = None
        self.errors = 0
        """Requests answered with an error."""

    async def listen(
        self, routes: Sequence[web.RouteDef], host: str, port: int, listener: socket.socket | None = None
    ) -> str:
        """Listen, on `listener` if it is given, and return the URL. Raises ConfigurationError if the address cannot be
        bound."""
        self._server = await listen(
            routes,
            host,
            port,
            name=self._name,
            setting=f"{self._name}.port",
            max_body_bytes=self._max_body_bytes,
            max_body_setting=self._max_body_setting,
            listener=listener,
            middlewares=[self._errors_in_form],
            shutdown_timeout=10.0,
        )
        return self._server.url

    async def close(self) -> None:
        """Stop listening, and finish the requests in flight."""
        if self._server:
            await self._server.close()

    @web.middleware
    async def _errors_in_form(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            try:
                return await handler(request)
            except Exception as error:
                if isinstance(error, ConnectionError) or (isinstance(error, web.HTTPException) and error.status < 400):
                    raise
                if not isinstance(error, _BrokenStream):
                    body, status = self._refusal(request, error)
                    return _json(error_in_form(request.path, body, status), status)
                body, status = self._refusal(request, error.error)
                await error.stream.write(error_in_form(request.path, body, status, events=error.stream.events))
                return await error.stream.end()
        except ConnectionError as error:
            # Without the end of its stream, a client that is still there sees that the answer is incomplete.
            event(logger, "client_left", path=request.path, reason=str(error))
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    def _refusal(self, request: web.Request, error: Exception) -> tuple[Mapping[str, Any] | str, int]:
        """Count an error, and return OpenAI's error object, or a server's own text, and the status of the answer."""
        self.errors += 1
        if isinstance(error, UpstreamRefused):
            # The agent's request or the settings are at fault, so the agent receives the server's own error.
            return error.text, error.status
        if isinstance(error, RollstreamError):
            known = ((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
            status, code = next(known, (503, "unavailable"))
            return _error(str(error), status, code), status
        if isinstance(error, BadRequest):
            return error.body, error.status
        if isinstance(error, web.HTTPNotFound | web.HTTPMethodNotAllowed):
            reason = (
                f"{request.method} {request.path[:200]} is not spoken here; below a session's base_url, calls are POST "
                f"{', '.join(CALL_ROUTES)}"
            )
            return _error(reason, error.status, "not_spoken"), error.status
        if isinstance(error, web.HTTPException):
            return _error(error.reason, error.status, "invalid_request"), error.status
        # Only this request fails; the server continues.
        event(logger, "request_failed", level=logging.ERROR, exc_info=error, path=request.path, error=repr(error))
        self._on_mistake(error)
        return _error(repr(error), 500, "internal"), 500


def _error(message: str, status: int, code: str) -> dict[str, Any]:
    """Return OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _json(body: Mapping[str, Any] | str, status: int) -> web.Response:
    """Return an answer with an object, or with the JSON text of a server."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status in _RETRIABLE else {}
    text = body if isinstance(body, str) else json.dumps(body)
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def key_of(http: web.Request) -> str:
    """Return the key of a request: its Bearer token, or x-api-key as Anthropic's clients send it."""
    header = http.headers.get("Authorization", "") or http.headers.get("x-api-key", "")
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else header.strip()


async def json_body(http: web.Request) -> Any:
    """Return the JSON of a request, an empty object if it has no body. Raises RecordError."""
    try:
        return decode(await http.read() or b"{}")
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the body is not JSON: {error}") from error

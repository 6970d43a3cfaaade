"""The gateway's HTTP side: sessions, rewards, and the calls of agents at `/sessions/ID/v1`.

Clients of AReaL (session key as Bearer token) and of rllm (session in the URL) work once their URL points here.
"""

import asyncio
import json
import logging
import math
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from rollstream.producers.gateway.call_routes import CallRoutes, Listener, json_body, key_of
from rollstream.producers.gateway.capture import CallCapture
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.service import SessionRequest, SessionService
from rollstream.producers.gateway.sessions import CapturedSession, session_key, session_of_key
from rollstream.producers.gateway.upstream import Upstream
from rollstream.producers.inference.admission import authorised
from rollstream.topics.errors import RecordError
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import CONTENT_TYPE, text_of
from rollstream.topics.secrets import resolve

logger = logging.getLogger(__name__)


class GatewayServer:
    """Serves a gateway; use it as an async context manager. `url` is its address once it listens."""

    def __init__(
        self,
        service: SessionService,
        capture: CallCapture,
        upstream: Upstream,
        config: GatewayConfig,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener` is a socket that listens already, in place of the address in `config`.

        Raises ConfigurationError if gateway.api_key cannot be resolved."""
        self._service, self._capture, self._upstream = service, capture, upstream
        self._config, self._socket = config, listener
        self._secret = resolve("gateway.api_key", config.api_key)
        self._calls = CallRoutes(capture, self._session_of_call, service.fail_call)
        self._listener = Listener("gateway", config.max_body_bytes, max_body_setting="gateway.max_body_bytes")
        self.url = ""

    async def __aenter__(self) -> Self:
        """Listen. Raises ConfigurationError if the address cannot be bound."""
        routes = [
            web.post("/rl/start_session", self._start),
            web.post("/rl/set_reward", self._reward),
            web.post("/rl/end_session", self._end),
            web.get("/sessions/{session}", self._show),
            web.get("/livez", self._livez),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics),
        ]
        # Below the base_url of a session, and at the paths that clients of AReaL expect.
        for prefix in ("/sessions/{session}/v1", "/sessions/{session}", "/v1", ""):
            routes += self._calls.routes(prefix)
            routes.append(web.get(f"{prefix}/models", self._models))
        self.url = await self._listener.listen(routes, self._config.host, self._config.port, self._socket)
        event(logger, "gateway_listening", url=self.url, replica_id=self._config.replica_id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop listening, and finish the requests in flight."""
        await self._listener.close()

    # ------------------------------------------------------------------ sessions

    async def _start(self, http: web.Request) -> web.Response:
        self._check_admin(http)
        body = await _json_object(http)
        grouped = body.get("group_size") is not None
        sessions = await self._service.start(
            SessionRequest(
                task_id=_text(body, "task_id", _text(body, "task", "")),
                environment=_text(body, "environment", self._config.environment),
                group_id=_text(body, "group_id", ""),
                group_size=_integer(body, "group_size", 1),
                member=_integer(body, "member", -1) if body.get("member") is not None else None,
            )
        )
        shown = [self._session_fields(http, session) for session in sessions]
        answer = {**shown[0], "group_id": sessions[0].start.group_id, "sessions": shown}
        # AReaL answers 200 with one session, and 201 with a group.
        return web.json_response(answer, status=201 if grouped else 200)

    def _session_fields(self, http: web.Request, session: CapturedSession) -> dict[str, Any]:
        key = session_key(session.name, self._secret)
        # A proxy terminates TLS, may rewrite the host, and may have a path of its own.
        address = self._config.public_url.rstrip("/") or http.url.origin()
        return {
            "session_id": session.name,
            "api_key": key,
            "session_api_key": key,
            "base_url": f"{address}/sessions/{session.name}/v1",
        }

    async def _reward(self, http: web.Request) -> web.Response:
        body = await _json_object(http)
        session = await self._session_of(http, body)
        problems: list[str] = []
        turn_rewards = _rewards(body, "turn_rewards", problems)
        reward = None if body.get("reward") is None else _number("reward", body["reward"], problems)
        if body.get("interaction_id") is not None and reward is not None:
            turn_rewards, reward = {**turn_rewards, _text(body, "interaction_id", ""): reward}, None
        if reward is None and not turn_rewards:
            raise RecordError('give "reward", or "turn_rewards": {call: reward}')
        written = await self._service.reward(
            session,
            reward,
            components=_rewards(body, "components", problems),
            turn_rewards=turn_rewards,
            problem=next(iter(problems), ""),
            request=http.headers.get("Idempotency-Key", "")[:200],
        )
        return self._state(session, written)

    async def _end(self, http: web.Request) -> web.Response:
        body = await _json_object(http)
        session = await self._session_of(http, body)
        status = _text(body, "status", "ok")
        if status == "ok":
            written = await self._service.end(session)
        elif status in ("failed", "abandoned"):
            reason = _text(body, "reason", "") or f"the agent ended it as {status}"
            written = await self._service.fail(session, reason)
        else:
            raise RecordError(f'status is {status[:64]!r}; it must be "ok", "failed" or "abandoned"')
        self._capture.forget(session.name)
        return self._state(session, written)

    async def _show(self, http: web.Request) -> web.Response:
        session = await self._session_of(http, {})
        return self._state(session, session.finished is not None)

    def _state(self, session: CapturedSession, written: bool) -> web.Response:
        closed = session.closed
        state = "open" if closed is None and not session.ended else "waits_for_reward" if closed is None else "closing"
        if written and closed is not None:
            state = "cancelled" if closed.cancelled else "finished"
        return web.json_response(
            {
                "session_id": session.name,
                "state": state,
                "reason": closed.reason if closed else "",
                "calls": session.counted_calls,
                "rollouts": list(session.finished.uids) if session.finished else [],
            }
        )

    async def _models(self, _http: web.Request) -> web.Response:
        model = {"id": self._upstream.model, "object": "model", "created": 0, "owned_by": "rollstream-gateway"}
        return web.json_response({"object": "list", "data": [model]})

    # ------------------------------------------------------------------ authorization

    async def _session_of_call(self, http: web.Request) -> CapturedSession:
        return await self._session_of(http, {})

    async def _session_of(self, http: web.Request, body: Mapping[str, Any]) -> CapturedSession:
        bearer = key_of(http)
        keyed = session_of_key(bearer, self._secret)
        named = http.match_info.get("session") or _text(body, "session_id", "") or keyed or ""
        if keyed != named and not authorised(f"Bearer {bearer}", self._secret):
            raise web.HTTPUnauthorized(reason="the key of the session or of the gateway is missing or wrong")
        if not named:
            raise RecordError("the request names no session; use its base_url, its key as Bearer token, or session_id")
        return await self._service.session(named)

    def _check_admin(self, http: web.Request) -> None:
        if not authorised(http.headers.get("Authorization"), self._secret):
            raise web.HTTPUnauthorized(reason="starting a session requires the gateway's key, gateway.api_key")

    # ------------------------------------------------------------------ probes and metrics

    async def _livez(self, _http: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _http: web.Request) -> web.Response:
        return web.Response(text=f"ok, {self._service.open_sessions} sessions open\n")

    def metrics(self) -> dict[str, float]:
        """Metrics by name: totals since the start, whose names end in _total, and the current state."""
        return {
            "requests_total": self._calls.requests,
            "calls_total": self._capture.calls,
            "errors_total": self._listener.errors,
            "records_skipped_total": self._service.records_skipped,
            "open_sessions": self._service.open_sessions,
            "policy_version": self._service.newest_version,
        }

    async def _metrics(self, _http: web.Request) -> web.Response:
        return web.Response(body=text_of("gateway", self.metrics()), headers={"Content-Type": CONTENT_TYPE})


async def _json_object(http: web.Request) -> dict[str, Any]:
    body = await json_body(http)
    if not isinstance(body, dict):
        raise RecordError("the body must be a JSON object")
    return body


def _text(body: Mapping[str, Any], name: str, default: str) -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise RecordError(f"{name} must be a string")
    return str(value)


def _integer(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecordError(f"{name} must be an integer")
    return value


def _number(name: str, value: Any, problems: list[str]) -> float:
    """Return a reward as a number, 1 or 0 for true or false. Another value becomes NaN and a problem, which fails the
    episode instead of counting as zero."""
    if not isinstance(value, int | float):
        problems.append(f"{name} is {json.dumps(value)[:100]}; it must be a number")
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _rewards(body: Mapping[str, Any], name: str, problems: list[str]) -> dict[str, float]:
    values = body.get(name)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise RecordError(f"{name} must be an object of numbers")
    return {str(key)[:512]: _number(f"{name}.{key}"[:100], value, problems) for key, value in values.items()}


async def serve_until(stop: asyncio.Event, failed: asyncio.Event) -> None:
    """Return when either event is set."""
    waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(failed.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()

"""The inference servers behind a gateway: forwards requests, and tries another server if one fails.

A session stays with one server while that server answers and is up to date, so that its prefixes stay cached. A failed
request is retried until its deadline, unless the first byte of an answer has already arrived.

The answers of vLLM's OpenAI routes do not name the weights that sampled them. So the label of the weights is requested
from vLLM before each request, once any replacement of them is complete. This label counts for all tokens of the answer,
even if the weights change while the answer is sampled.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from rollstream.producers.flow.policy_versions import UNKNOWN, PolicySource
from rollstream.producers.gateway.errors import UpstreamRefused
from rollstream.producers.gateway.streamed_answers import EventLines
from rollstream.producers.inference.answers import has_aborted_choice, refusal_of
from rollstream.producers.inference.errors import ContextTooLong, InferenceUnavailable
from rollstream.producers.inference.replicas import Replica, ReplicaSet
from rollstream.producers.inference.requests import ENGINE_NEUTRAL, LABEL_ROUTES, listed_models
from rollstream.producers.inference.retries import (
    MOST_FAULTS,
    RETRIED_STATUS,
    Busy,
    NoTurn,
    ServerTurns,
    is_fault,
    retry_after_s,
)
from rollstream.producers.json_text import decode, encode
from rollstream.topics.secrets import resolve
from rollstream.topics.watched_sockets import watched_socket

_LOOK_S = 5.0
_PAUSED_S = 5.0
"""Longest wait for a paused vLLM before another server is asked, if there is one."""
_PAUSED_ROUTE = "/is_paused"
_ASK_PAUSED_S = 0.05
_UNNAMED = "default"
"""Default label of weights in vLLM and SGLang."""
_NO_ANSWER = "no answer in time"
_FILLS = ("/chat/completions",)
"""Routes whose answers fill the context if a request sets none of _LIMITS."""
_LIMITS = {"max_tokens", "max_completion_tokens"}


PreviousTurn = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True)
class UpstreamAnswer:
    """A whole answer and the server that gave it."""

    url: str
    body: dict[str, Any]


class UpstreamEvent(NamedTuple):
    """The data of one event of a streamed answer."""

    url: str
    """Server that sent the event."""
    label: str
    """Label of the weights that sample the answer; empty if the answer itself names them."""
    data: str


class _Kind(NamedTuple):
    continues: bool
    """Whether the server accepts the tokens of a conversation's last turn."""
    label_route: str
    """Route to the server's label of its weights; empty if its answers contain the label."""
    neutral: Mapping[str, float]
    """Sampling parameters that a request to the server must set, each with its neutral value."""


def labelled(answer: dict[str, Any], label: str) -> dict[str, Any]:
    """Return an answer with `label` as its weight_version, placed as in SGLang; an existing weight_version stays."""
    if not label:
        return answer
    metadata = answer.get("metadata")
    return {**answer, "metadata": {"weight_version": label} | (metadata if isinstance(metadata, dict) else {})}


class Upstream:
    """Servers of one model; use it as an async context manager."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str,
        api_key: str,
        timeout_s: float,
        policies: PolicySource,
        max_version_skew: int = 2,
    ) -> None:
        """`urls` end in /v1; `timeout_s` bounds a call, retries included. `api_key` may be a reference; `policies` maps
        the labels of weights to policy versions. Servers more than `max_version_skew` versions behind the newest are
        avoided; a negative value means no limit."""
        key = resolve("worker.api_key", api_key)
        self.model = model
        self.newest_version = -1
        """Newest policy version in any answer; -1 before the first."""
        self._replicas = ReplicaSet(urls, max_version_skew=max_version_skew)
        self._turns = ServerTurns(self._replicas)
        self._looks: set[asyncio.Task[None]] = set()
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._kinds: dict[str, _Kind] = {}
        self._policies = policies
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, socket_factory=watched_socket),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        if self._http:
            await self._http.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """Servers in use."""
        return tuple(replica.url for replica in self._replicas.replicas)

    def use(self, urls: Sequence[str]) -> None:
        """Use these servers, at least one, from now on. Other servers may still answer calls in flight."""
        self._replicas.use(urls)

    async def version(self) -> int:
        """Ask the servers that are up, and return the newest policy version that any server has named; -1 if none
        has."""
        await asyncio.gather(*map(self._look, self._replicas.replicas))
        return self.newest_version

    async def _look(self, replica: Replica) -> None:
        """Note the kind and the policy version of a server that answers, and the failure of any other."""
        url = replica.url
        try:
            async with asyncio.timeout(_LOOK_S):
                engine, version = listed_models(await self._json(f"{url}/models"))
                route = LABEL_ROUTES.get(engine, "") if engine else ""
                if version < 0 and route:
                    label = await self._label(url, route)
                    version = (await self.versions_of([label]))[label]
        except Busy as error:
            self._replicas.failed(replica, time.monotonic(), error.retry_after_s)
            return
        except (aiohttp.ClientError, TimeoutError):
            self._replicas.failed(replica, time.monotonic())
            return
        self._kinds[url] = _Kind(
            continues=engine == "rollstream",
            label_route=route if engine == "vllm" else "",
            neutral=ENGINE_NEUTRAL if engine else {},
        )
        self._replicas.looked(replica, version, time.monotonic())
        self.newest_version = max(self.newest_version, version)

    def _look_around(self) -> None:
        """Probe servers that get no requests, so that they get requests again once they are up and up to date."""
        for replica in self._replicas.to_look_at(time.monotonic()):
            look = asyncio.create_task(self._look(replica))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def _json(self, url: str) -> dict[str, Any]:
        """Return the JSON object in a server's answer; empty for any other answer. Raises aiohttp's connection errors,
        and Busy for a server that is not ready."""
        assert self._http, "used outside its context manager"
        async with self._http.get(url) as response:
            if response.status in RETRIED_STATUS:
                raise Busy(f"{url} answered {response.status}", retry_after_s(response.headers.get("Retry-After")))
            try:
                body = decode(await response.read()) if response.status == 200 else None
            except (ValueError, RecursionError):
                body = None
        return body if isinstance(body, dict) else {}

    async def _label(self, url: str, route: str) -> str:
        """Return the label of a server's weights, empty if it names none. Raises as `_json` does."""
        label = (await self._json(url.removesuffix("/v1") + route)).get("weight_version")
        return label if isinstance(label, str) and label != _UNNAMED else ""

    async def _label_in_force(self, url: str, route: str) -> str:
        """Return the label of the weights that sample the next request; if they are being replaced, wait for the new
        weights. Raises TimeoutError if vLLM stays paused, and raises as `_json` does."""
        until = time.monotonic() + _PAUSED_S
        while (await self._json(url.removesuffix("/v1") + _PAUSED_ROUTE)).get("is_paused") is True:
            if time.monotonic() >= until:
                raise TimeoutError(f"{url} is paused")
            await asyncio.sleep(_ASK_PAUSED_S)
        return await self._label(url, route)

    async def versions_of(self, labels: Collection[str]) -> dict[str, int]:
        """Return the policy version of each label; -1 if no record names the label."""
        versions = self._policies.versions
        if any(label and versions.version_of(label) < 0 for label in labels):
            await asyncio.to_thread(self._policies.read, 0.0)
        return {label: versions.version_of(label) for label in labels}

    def note_version(self, url: str, version: int) -> None:
        """Note the policy version that sampled an answer of a server, -1 for none."""
        self.newest_version = max(self.newest_version, version)
        for replica in self._replicas.replicas:
            if replica.url == url:
                self._replicas.answered(replica, version, time.monotonic())

    async def call(
        self, session: str, path: str, body: dict[str, Any], turn: PreviousTurn = lambda: None
    ) -> UpstreamAnswer:
        """Return the answer to a request. A server that accepts the tokens of a conversation's last turn, as
        rollstream's does, receives the result of `turn`; an engine receives its own sampling parameters at their
        neutral values unless `body` sets them. A request that a server aborts is sent again. Raises UpstreamRefused,
        and InferenceUnavailable after the deadline or if an answer breaks off."""
        deadline = time.monotonic() + self._timeout_s
        cause = ""
        while True:
            async with self._response(session, path, body, turn, deadline, cause) as (replica, label, response):
                url = replica.url
                try:
                    answer = decode(await response.read())
                except (aiohttp.ClientError, ValueError, RecursionError) as error:
                    raise InferenceUnavailable(f"{url} broke off its answer: {error!r}") from error
            if not isinstance(answer, dict):
                raise InferenceUnavailable(f"{url} answered with a JSON {type(answer).__name__} instead of an object")
            if not has_aborted_choice(answer):
                self._replicas.answered(replica, UNKNOWN, time.monotonic())
                return UpstreamAnswer(url, labelled(answer, label))
            cause = f"{url} aborted the request"
            self._replicas.failed(replica, time.monotonic())

    async def stream(
        self, session: str, path: str, body: dict[str, Any], turn: PreviousTurn = lambda: None
    ) -> AsyncIterator[UpstreamEvent]:
        """Yield each event of a streamed answer. Raises as `call` does."""
        deadline = time.monotonic() + self._timeout_s
        async with self._response(session, path, body, turn, deadline) as (replica, label, response):
            self._replicas.answered(replica, UNKNOWN, time.monotonic())
            url, lines = replica.url, EventLines()
            try:
                async for data in response.content.iter_any():
                    for event in lines.feed(data):
                        yield UpstreamEvent(url, label, event)
            except aiohttp.ClientError as error:
                raise InferenceUnavailable(f"{url} broke off its answer: {error!r}") from error

    @asynccontextmanager
    async def _response(
        self,
        session: str,
        path: str,
        body: dict[str, Any],
        turn: PreviousTurn,
        deadline: float,
        cause: str = "",
    ) -> AsyncIterator[tuple[Replica, str, aiohttp.ClientResponse]]:
        """Send a request until a server answers; yield the server, the label in force (empty if answers name it), and
        the answer. `cause` is why the request failed before, empty if it was not sent. Raises InferenceUnavailable with
        the latest cause at `deadline` on the monotonic clock."""
        assert self._http, "used outside its context manager"
        headers = {"Content-Type": "application/json", **({"X-Session-ID": session} if session else {})}
        self._look_around()
        sent, faults = bool(cause), 0
        while True:
            replica = await self._turn(session, deadline, cause, again=sent)
            url, asked_s = replica.url, None
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    kind = await self._kind_of(replica)
                    label = await self._label_in_force(url, kind.label_route) if kind.label_route else ""
                previous = turn() if kind.continues else None
                turns = {} if previous is None else {"previous_turn": previous}
                data = encode({**kind.neutral, **body, **turns})
                timeout = aiohttp.ClientTimeout(total=max(0.001, deadline - time.monotonic()))
                # Until then, the request was no load: the engine may have been paused while its weights changed.
                sent = True
                async with self._http.post(url + path, data=data, headers=headers, timeout=timeout) as answer:
                    if answer.status == 200:
                        yield replica, label, answer
                        return
                    text = await answer.text()
                    faults += is_fault(answer.status)
                    again = answer.status in RETRIED_STATUS or (is_fault(answer.status) and faults < MOST_FAULTS)
                    if not again:
                        refusal = refusal_of(answer.status, text, source=url)
                        if isinstance(refusal, ContextTooLong) and path in _FILLS and _LIMITS & body.keys():
                            # The prompt alone may fit. Without a limit the answer gets the remaining room.
                            body = {name: value for name, value in body.items() if name not in _LIMITS}
                            sent = False  # nothing failed
                            continue
                        raise UpstreamRefused(answer.status, text, refusal)
                    cause = f"{answer.status} {' '.join(text.split())[:500]}"
                    asked_s = retry_after_s(answer.headers.get("Retry-After"))
            except Busy as error:
                cause, asked_s = str(error), error.retry_after_s
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                cause = str(error) or cause or _NO_ANSWER
            self._replicas.failed(replica, time.monotonic(), asked_s)

    async def _turn(self, session: str, deadline: float, cause: str, *, again: bool) -> Replica:
        """Return the server to ask, once it may be asked. Raises InferenceUnavailable at the deadline."""
        try:
            return await self._turns.next(session, deadline, again=again)
        except NoTurn as error:
            raise InferenceUnavailable(
                f"no answer from {', '.join(self.urls)} within {self._timeout_s:g} s "
                f"({', and '.join(filter(None, (cause, str(error))))}); is the inference server up, and are weights "
                "published?"
            ) from error

    async def _kind_of(self, replica: Replica) -> _Kind:
        """Return the kind of a server. Raises TimeoutError if the kind is unknown and the server does not answer:
        without its last turn, a conversation would be tokenised again and might split into two branches."""
        if replica.url not in self._kinds:
            await self._look(replica)
            if replica.url not in self._kinds:
                raise TimeoutError(f"{replica.url}/models gave no answer")
        return self._kinds[replica.url]

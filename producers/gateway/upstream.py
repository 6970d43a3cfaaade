"""The inference servers behind a gateway: passes requests on, whole or streamed, and tries the next if one fails.

A session stays with one server while that answers, so that its prefixes stay cached. Until the first byte of an answer
has come, a failed request is sent again within the time for it; after that it is not.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from rollstream.producers.gateway.errors import UpstreamRefused
from rollstream.producers.gateway.streamed_answers import EventLines
from rollstream.producers.inference.answers import refusal_of
from rollstream.producers.inference.errors import InferenceUnavailable
from rollstream.producers.json_text import decode, encode
from rollstream.topics.secrets import resolve

_RETRIED_STATUS = {429, 502, 503, 504}
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_LOOK_S = 5.0
_REST_S = 1.0
"""Time for which a server that failed is asked last."""


PreviousTurn = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True)
class UpstreamAnswer:
    """A whole answer and the server it came from."""

    url: str
    body: dict[str, Any]


class Upstream:
    """Servers of one model; use it as an async context manager."""

    def __init__(self, urls: Sequence[str], *, model: str, api_key: str, timeout_s: float) -> None:
        """`urls` end in /v1; `timeout_s` bounds a call, retries included. `api_key` may be a reference."""
        key = resolve("worker.api_key", api_key)
        self.model = model
        self.newest_version = -1
        """Newest policy version in any answer; -1 before the first."""
        self._urls = [url.rstrip("/") for url in urls]
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._rests: dict[str, float] = {}
        self._continues: dict[str, bool] = {}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=2**20,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._http:
            await self._http.close()

    async def version(self) -> int:
        """Return the newest policy version that any server has named, -1 if none has. A server that is down says
        nothing."""
        await asyncio.gather(*map(self._look, self._urls))
        return self.newest_version

    async def _look(self, url: str) -> None:
        assert self._http, "used outside its context manager"
        try:
            async with self._http.get(f"{url}/models", timeout=aiohttp.ClientTimeout(total=_LOOK_S)) as response:
                if response.status in _RETRIED_STATUS:
                    return
                body = await response.json(content_type=None)
        except (aiohttp.ClientConnectionError, TimeoutError):
            return
        except (aiohttp.ClientError, ValueError, RecursionError):
            body = None
        listed = body.get("data") if isinstance(body, dict) else None
        models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
        self._continues[url] = any(model.get("owned_by") == "rollstream" for model in models)
        self.note_version(max((_number(model.get("policy_version")) for model in models), default=-1))

    def note_version(self, version: int) -> None:
        """Note a policy version that sampled."""
        self.newest_version = max(self.newest_version, version)

    async def call(
        self, session: str, path: str, body: dict[str, Any], turn: PreviousTurn = lambda: None
    ) -> UpstreamAnswer:
        """Return the answer to a request; a server that takes the tokens of a conversation's last turn, as ours does,
        gets those that `turn` returns. Raises InferenceUnavailable after the deadline, UpstreamRefused."""
        async with self._response(session, path, body, turn) as (url, response):
            try:
                answer = decode(await response.read())
            except (aiohttp.ClientError, ValueError, RecursionError) as error:
                raise InferenceUnavailable(f"{url} broke off its answer: {error!r}") from error
        if not isinstance(answer, dict):
            raise InferenceUnavailable(f"{url} answered a JSON {type(answer).__name__} where an object belongs")
        return UpstreamAnswer(url, answer)

    async def stream(
        self, session: str, path: str, body: dict[str, Any], turn: PreviousTurn = lambda: None
    ) -> AsyncIterator[tuple[str, str]]:
        """Yield the server's URL and the data of each event of a streamed answer. Raises as `call` does."""
        async with self._response(session, path, body, turn) as (url, response):
            lines = EventLines()
            try:
                async for data in response.content.iter_any():
                    for event in lines.feed(data):
                        yield url, event
            except aiohttp.ClientError as error:
                raise InferenceUnavailable(f"{url} broke off its answer: {error!r}") from error

    @asynccontextmanager
    async def _response(
        self, session: str, path: str, body: dict[str, Any], turn: PreviousTurn
    ) -> AsyncIterator[tuple[str, aiohttp.ClientResponse]]:
        assert self._http, "used outside its context manager"
        headers = {"Content-Type": "application/json", **({"X-Session-ID": session} if session else {})}
        deadline = time.monotonic() + self._timeout_s
        pause_s, cause = _FIRST_PAUSE_S, "none was asked"
        while time.monotonic() < deadline:
            url = self._ranked(session)[0]
            try:
                data = encode(await self._body_for(url, body, turn))
                timeout = aiohttp.ClientTimeout(total=max(0.001, deadline - time.monotonic()))
                async with self._http.post(url + path, data=data, headers=headers, timeout=timeout) as answer:
                    if answer.status == 200:
                        yield url, answer
                        return
                    text = await answer.text()
                    if answer.status not in _RETRIED_STATUS:
                        raise UpstreamRefused(answer.status, text, refusal_of(answer.status, text, source=url))
                    cause = f"{answer.status} {' '.join(text.split())[:500]}"
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                cause = str(error) or type(error).__name__
            self._rests[url] = time.monotonic() + _REST_S
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        raise InferenceUnavailable(
            f"no answer from {', '.join(self._urls)} within {self._timeout_s:g} s ({cause}); is the inference server "
            "up, and are weights published?"
        )

    async def _body_for(self, url: str, body: dict[str, Any], turn: PreviousTurn) -> dict[str, Any]:
        """Return the body for a server. Raises TimeoutError if it is not known what the server takes and it does not
        say: without its last turn a conversation is tokenised anew, and may split in two."""
        if url not in self._continues:
            await self._look(url)
            if url not in self._continues:
                raise TimeoutError(f"{url}/models gave no answer")
        previous = turn() if self._continues[url] else None
        return body if previous is None else {**body, "previous_turn": previous}

    def _ranked(self, session: str) -> list[str]:
        """Return the servers, those that rest last, each session's in an order of its own (rendezvous hashing)."""
        now = time.monotonic()
        return sorted(self._urls, key=lambda url: (self._rests.get(url, 0.0) > now, _weight(session, url)))


def _weight(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1

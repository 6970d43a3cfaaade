"""An environment that `rollstream env serve` runs in another process, virtual environment, container or machine.

An episode is one WebSocket. The server asks for the policy's replies on it, or passes on the HTTP calls of its agent,
so it needs no way to the worker. A connection that breaks is a failed attempt, and the worker plays the episode again.
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlencode

import aiohttp

from rollstream.producers.environments.environment import (
    Conversation,
    Endpoint,
    Episode,
    Generate,
    Message,
    Prompt,
    Reply,
    Score,
    Split,
)
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.watched_sockets import watch

PROTOCOL = 1
PLACE = "place"
"""Entry of a prompt's `extra`: its split and its index, e.g. train/17. Answers stay with the server."""
PAGE = 10_000
"""Prompts in one answer."""
MOST_BYTES = 64 * 1024 * 1024
"""Largest message."""
NUMBER_BYTES = 4
"""Length of the call's number at the beginning of a binary message, which is a part of the answer to the call."""
_NOT_PASSED_ON = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "authorization"}
_NOT_PASSED_ON |= {"x-api-key", "content-encoding"}
_AGAIN_S = 0.2
_REQUEST_S = 30.0


class EpisodeFailedThere(RollstreamError):
    """The environment, or its verifier, failed in the server."""


class EnvironmentServerLost(RollstreamError):
    """The server of an environment does not answer, or ended in mid-episode."""


def remote_environment(url: str, *, api_key: str = "", wait_s: float = 60.0) -> "RemoteEnvironment | RemoteAgent":
    """Return the environment that is served at `url`; wait up to `wait_s` for its server, now and in each attempt at an
    episode.

    Raises ConfigurationError if it does not answer, or speaks another version of the protocol.
    """
    server = _Server(url.rstrip("/"), api_key, wait_s)
    about = server.read("environment")
    if about.get("protocol") != PROTOCOL:
        raise ConfigurationError(
            f"the environment at {url} speaks protocol {about.get('protocol')!r} and this rollstream {PROTOCOL}; run "
            "`rollstream env serve` of the same release there"
        )
    return (RemoteAgent if about["calls_policy"] else RemoteEnvironment)(server, about)


class _Server:
    """What is at an address."""

    def __init__(self, url: str, key: str, wait_s: float) -> None:
        self.url, self._wait_s = url, wait_s
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def read(self, path: str, **query: object) -> Any:
        """Return the JSON at a path. Raises ConfigurationError."""
        request = urllib.request.Request(f"{self.url}/{path}?{urlencode(query)}", headers=self.headers)
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                with urllib.request.urlopen(request, timeout=_REQUEST_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                raise ConfigurationError(
                    f"the environment at {self.url} refuses {path}: {error.read(500).decode(errors='replace')} "
                    f"({error.code}); its entry's options may need api_key"
                ) from error
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise ConfigurationError(
                        f"no environment answers at {self.url}: {error}; start `rollstream env serve` there"
                    ) from error
            time.sleep(_AGAIN_S)

    @asynccontextmanager
    async def episode(self, start: Mapping[str, Any]) -> AsyncIterator["_EpisodeSocket"]:
        """Begin an episode; leaving the context ends it in the server. Raises EnvironmentServerLost."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as http:
            deadline = asyncio.get_running_loop().time() + self._wait_s
            while True:
                try:
                    stream = await http.ws_connect(f"{self.url}/episode", max_msg_size=MOST_BYTES)
                    break
                except (aiohttp.ClientError, OSError) as error:
                    if asyncio.get_running_loop().time() > deadline:
                        raise EnvironmentServerLost(f"the environment at {self.url} does not answer: {error}") from None
                await asyncio.sleep(_AGAIN_S)
            async with stream:
                # Pings of the WebSocket would not do: an environment may compute for minutes.
                watch(stream.get_extra_info("socket"))
                episode = _EpisodeSocket(self.url, stream)
                await episode.send(start)
                yield episode


class _EpisodeSocket:
    def __init__(self, url: str, stream: aiohttp.ClientWebSocketResponse) -> None:
        self._url, self._stream = url, stream

    async def send(self, message: Mapping[str, Any]) -> None:
        try:
            await self._stream.send_json(message)
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentServerLost(f"the environment at {self._url} is gone: {error}") from error

    async def send_part(self, number: int, part: bytes) -> None:
        """Send a part of the answer to a call."""
        await self._stream.send_bytes(number.to_bytes(NUMBER_BYTES, "big") + part)

    async def receive(self) -> dict[str, Any]:
        """Return the next message. Raises EpisodeFailedThere or EnvironmentServerLost."""
        frame = await self._stream.receive()
        if frame.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentServerLost(f"the environment at {self._url} ended in mid-episode")
        message: dict[str, Any] = json.loads(frame.data)
        if "failed" in message:
            raise EpisodeFailedThere(message["failed"])
        return message


class _Remote:
    """What both kinds have in common."""

    def __init__(self, server: _Server, about: Mapping[str, Any]) -> None:
        self._server, self._about = server, about
        self._prompts: dict[Split, Sequence[Prompt]] = {}
        self.name: str = about["name"]
        self.max_tokens: int = about["max_tokens"]
        self.stop: tuple[str, ...] = tuple(about["stop"])
        self.demonstrated: float | None = about["demonstrated"]

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of a split, without answers. Raises ConfigurationError."""
        if split not in self._prompts:
            count = self._about["prompts"][split]
            pages = (self._server.read(f"prompts/{split}", start=start) for start in range(0, count, PAGE))
            self._prompts[split] = [
                Prompt(example_id=name, text=text, extra={PLACE: f"{split}/{index}"})
                for index, (name, text) in enumerate(prompt for page in pages for prompt in page)
            ]
        return self._prompts[split]

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return the environment's pairs of prompt and answer. Raises ConfigurationError."""
        return [(text, answer) for text, answer in self._warm_start(seed, n)["examples"]]

    def warm_start_conversations(self, seed: int, n: int) -> list[Conversation]:
        """Return the environment's conversations. Raises ConfigurationError."""
        return [Conversation(**fields) for fields in self._warm_start(seed, n)["conversations"]]

    def _warm_start(self, seed: int, n: int) -> Any:
        return self._server.read("warm_start", seed=seed, n=n)

    @staticmethod
    def _start_of(prompt: Prompt) -> dict[str, Any]:
        return {"place": prompt.extra[PLACE], "example_id": prompt.example_id}


class RemoteEnvironment(_Remote):
    """An environment that exchanges texts with the policy."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play one episode. Raises EpisodeFailedThere, EnvironmentServerLost, and errors of `generate`."""
        replies: list[Reply] = []
        async with self._server.episode(self._start_of(prompt)) as episode:
            while True:
                message = await episode.receive()
                if "generate" in message:
                    replies.append(await generate(message["generate"]))
                    await episode.send({"reply": {"text": replies[-1].text, "truncated": replies[-1].truncated}})
                elif "turns" in message:
                    return Episode(
                        turns=tuple(
                            replies[turn["reply"]] if "reply" in turn else Message(**turn) for turn in message["turns"]
                        ),
                        score=Score(**message["score"]),
                        truncated=message["truncated"],
                    )


class RemoteAgent(_Remote):
    """An environment that calls the policy itself, at an address of its server's machine."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Play one episode, and pass its calls on to `endpoint`. Raises EpisodeFailedThere, EnvironmentServerLost."""
        calls: dict[int, asyncio.Task[None]] = {}
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http,
            self._server.episode({**self._start_of(prompt), "model": endpoint.model}) as episode,
        ):
            try:
                while True:
                    message = await episode.receive()
                    if "call" in message:
                        call = _pass_on(http, endpoint, episode, message)
                        calls[message["call"]] = asyncio.ensure_future(call)
                    elif "left" in message and message["left"] in calls:
                        calls[message["left"]].cancel()
                    elif "score" in message:
                        return Score(**message["score"])
            finally:
                for task in calls.values():
                    task.cancel()
                await asyncio.gather(*calls.values(), return_exceptions=True)


async def _pass_on(
    http: aiohttp.ClientSession, endpoint: Endpoint, episode: _EpisodeSocket, call: Mapping[str, Any]
) -> None:
    """Make a call of the agent, and send the answer as it comes. A server that is gone is seen by who receives."""
    number = call["call"]
    headers = passed_on(call["headers"]) | {"Authorization": f"Bearer {endpoint.api_key}"}
    with suppress(EnvironmentServerLost, ConnectionError):
        try:
            url = f"{endpoint.base_url}{call['path']}"
            async with http.request(call["method"], url, data=call["body"].encode(), headers=headers) as answer:
                await episode.send(
                    {"answer": number, "status": answer.status, "headers": passed_on(dict(answer.headers))}
                )
                async for part in answer.content.iter_any():
                    await episode.send_part(number, part)
        except aiohttp.ClientError as error:
            await episode.send({"broken": number, "error": repr(error)})
        else:
            await episode.send({"end": number})


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that concern the other end of a call."""
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED_ON}

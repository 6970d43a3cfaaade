"""Serves one environment to any number of workers and evaluators, which play its episodes as if it were theirs.

It keeps nothing of an episode: when its connection breaks, the episode is cancelled, and the worker plays it again.
"""

import asyncio
import hmac
import itertools
import json
import logging
import secrets
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web

from rollstream.producers.environments.environment import SPLITS, Endpoint, Episode, Message, Prompt, Score, Split
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.tasks.remote_environment import (
    MOST_BYTES,
    NUMBER_BYTES,
    PAGE,
    PROTOCOL,
    passed_on,
)
from rollstream.topics.errors import RecordError
from rollstream.topics.http_server import BoundServer, listen
from rollstream.topics.logs import event
from rollstream.topics.watched_sockets import watch

logger = logging.getLogger(__name__)


class EnvironmentServer:
    """Serves an environment; use it as an async context manager. `url` is its address once it listens."""

    def __init__(
        self, environment: LoadedEnvironment, *, host: str = "127.0.0.1", port: int = 0, key: str = ""
    ) -> None:
        """Without `key`, everybody who reaches the address may play. Raises ConfigurationError for invalid prompts."""
        self._environment, self._host, self._port, self._key = environment, host, port, key
        self._prompts = {split: environment.prompts(split) for split in SPLITS}
        self._episodes: dict[str, _ServedEpisode] = {}
        self._servers: list[BoundServer] = []
        self._calls_at = self.url = ""

    async def __aenter__(self) -> Self:
        """Listen. Raises ConfigurationError if the address cannot be bound."""
        routes = [
            web.get("/environment", self._describe),
            web.get("/prompts/{split}", self._list),
            web.get("/warm_start", self._warm_start),
            web.get("/episode", self._episode),
        ]
        self.url = await self._listen(routes, self._host, self._port, middlewares=[self._authorised])
        # Agents make their calls on this machine, at an address that names their episode.
        calls = [web.route("*", "/{episode}/v1{path:.*}", self._call)]
        self._calls_at = await self._listen(calls, "127.0.0.1", 0)
        return self

    async def _listen(self, routes: Any, host: str, port: int, **options: Any) -> str:
        server = await listen(
            routes,
            host,
            port,
            name="environment server",
            setting="--port",
            max_body_bytes=MOST_BYTES,
            shutdown_timeout=0.1,
            **options,
        )
        self._servers.append(server)
        return server.url

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Stop listening; episodes are cancelled."""
        for episode in list(self._episodes.values()):
            await episode.stream.close()
        for server in self._servers:
            await server.close()

    @web.middleware
    async def _authorised(self, http: web.Request, handler: Any) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").encode(errors="replace")
        if self._key and not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise web.HTTPUnauthorized(text="the key is missing or wrong")
        answer: web.StreamResponse = await handler(http)
        return answer

    async def _describe(self, _http: web.Request) -> web.Response:
        environment = self._environment
        return web.json_response(
            {
                "protocol": PROTOCOL,
                "name": environment.name,
                "max_tokens": environment.max_tokens,
                "stop": environment.stop,
                "calls_policy": environment.agent is not None,
                "demonstrated": environment.demonstrated,
                "prompts": {split: len(prompts) for split, prompts in self._prompts.items()},
            }
        )

    async def _list(self, http: web.Request) -> web.Response:
        start = int(http.query.get("start", "0"))
        prompts = self._prompts[_split(http.match_info["split"])][start : start + PAGE]
        return web.json_response([[prompt.example_id, prompt.text] for prompt in prompts])

    async def _warm_start(self, http: web.Request) -> web.Response:
        seed, n = int(http.query["seed"]), int(http.query["n"])
        conversations = [asdict(each) for each in self._environment.warm_start_conversations(seed, n)]
        examples = self._environment.warm_start_examples(seed, n)
        return web.json_response({"examples": examples, "conversations": conversations})

    async def _episode(self, http: web.Request) -> web.WebSocketResponse:
        """Play one episode, for as long as the other end stays."""
        stream = web.WebSocketResponse(max_msg_size=MOST_BYTES)
        await stream.prepare(http)
        if http.transport is not None:
            watch(http.transport.get_extra_info("socket"))
        name = secrets.token_urlsafe(24)
        self._episodes[name] = episode = _ServedEpisode(stream)
        playing: asyncio.Task[None] | None = None
        try:
            async for frame in stream:
                if playing is None:
                    playing = asyncio.ensure_future(self._play(name, episode, json.loads(frame.data)))
                elif frame.type is aiohttp.WSMsgType.BINARY:
                    episode.add_part(frame.data)
                else:
                    episode.add(json.loads(frame.data))
        finally:
            del self._episodes[name]
            if playing is not None:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
            episode.leave()
        return stream

    async def _play(self, name: str, episode: "_ServedEpisode", start: Mapping[str, Any]) -> None:
        """Play an episode, and send its result or why it failed."""
        try:
            prompt = self._prompt_at(start)
            agent = self._environment.agent
            if agent is None:
                result = _turns(await self._environment.run(prompt, episode.generate))
            else:
                endpoint = Endpoint(base_url=f"{self._calls_at}/{name}/v1", api_key=name, model=start["model"])
                result = {"score": _score(await agent.play(prompt, endpoint))}
        except BaseException as error:
            task = asyncio.current_task()
            ended = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
            if ended or isinstance(error, KeyboardInterrupt | GeneratorExit):
                raise
            # An environment may also raise SystemExit, which must not end the server.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            result = {"failed": f"{error!r} at {frame.filename}:{frame.lineno}"}
            event(logger, "episode_failed", level=logging.WARNING, example_id=start.get("example_id"), **result)
        await episode.stream.send_json(result)

    def _prompt_at(self, start: Mapping[str, Any]) -> Prompt:
        """Return the prompt of an episode. Raises RecordError if the prompts have changed since the other end read
        them."""
        split, _, index = start["place"].partition("/")
        prompts = self._prompts[_split(split)]
        if int(index) < len(prompts) and prompts[int(index)].example_id == start["example_id"]:
            return prompts[int(index)]
        raise RecordError(
            f"prompt {start['place']} of {self._environment.name} is no longer {start['example_id']!r}; serve the same "
            "prompts in the same order after each start, or start the workers again"
        )

    async def _call(self, http: web.Request) -> web.StreamResponse:
        """Pass a call of an agent on to the other end of its episode, and the answer back as it comes."""
        episode = self._episodes.get(http.match_info["episode"])
        if episode is None:
            return web.json_response({"error": {"message": "the episode has ended"}}, status=410)
        body = await http.read()
        query = f"?{http.query_string}" if http.query_string else ""
        number = await episode.call(
            method=http.method,
            path=http.match_info["path"] + query,
            headers=passed_on(http.headers),
            body=body.decode(errors="replace"),
        )
        response: web.StreamResponse | None = None
        parts = episode.calls[number]
        try:
            while (part := await parts.get()) is not _END:
                if isinstance(part, _Head):
                    response = web.StreamResponse(status=part.status, headers=part.headers)
                    await response.prepare(http)
                elif response is not None and isinstance(part, bytes):
                    await response.write(part)
                else:
                    break
            if part is _END and response is not None:
                await response.write_eof()
                return response
        finally:
            await episode.hang_up(number)
        # Without the end of its answer, an agent sees that it is incomplete.
        if response is None:
            return web.json_response({"error": {"message": "the policy's server is gone"}}, status=502)
        if http.transport is not None:
            http.transport.abort()
        return response


@dataclass(frozen=True)
class _Head:
    status: int
    headers: Mapping[str, str]


_END, _BROKEN = object(), object()


@dataclass(frozen=True)
class _ServedReply:
    text: str
    truncated: bool
    number: int


class _ServedEpisode:
    """One episode: the replies and answers that the other end sends for it."""

    def __init__(self, stream: web.WebSocketResponse) -> None:
        self.stream = stream
        self.calls: dict[int, asyncio.Queue[object]] = {}
        self._numbers = itertools.count()
        self._replies: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._turns = 0
        self._one_by_one = asyncio.Lock()

    async def generate(self, text: str) -> _ServedReply:
        """Return the policy's reply to a text."""
        async with self._one_by_one:
            await self.stream.send_json({"generate": text})
            reply = await self._replies.get()
            self._turns += 1
            return _ServedReply(reply["text"], reply["truncated"], self._turns - 1)

    async def call(self, **request: Any) -> int:
        """Send a call; return its number, under which its answer arrives in `calls`."""
        number = next(self._numbers)
        self.calls[number] = asyncio.Queue()
        await self.stream.send_json({"call": number, **request})
        return number

    async def hang_up(self, number: int) -> None:
        """Forget a call, and tell the other end, which may still be answering it."""
        del self.calls[number]
        with suppress(ConnectionError):
            await self.stream.send_json({"left": number})

    def add(self, message: Mapping[str, Any]) -> None:
        """Take a message of the other end."""
        if "reply" in message:
            self._replies.put_nowait(message["reply"])
        elif "answer" in message:
            self._put(message["answer"], _Head(message["status"], message["headers"]))
        else:
            self._put(message.get("end", message.get("broken")), _END if "end" in message else _BROKEN)

    def add_part(self, part: bytes) -> None:
        """Take a part of the answer to a call."""
        self._put(int.from_bytes(part[:NUMBER_BYTES], "big"), part[NUMBER_BYTES:])

    def leave(self) -> None:
        """Note that the other end is gone."""
        for number in list(self.calls):
            self._put(number, _BROKEN)

    def _put(self, number: Any, part: object) -> None:
        if number in self.calls:
            self.calls[number].put_nowait(part)


def _split(name: str) -> Split:
    for split in SPLITS:
        if name == split:
            return split
    raise web.HTTPNotFound(text=f"there is no split {name[:50]!r}; there are {', '.join(SPLITS)}")


def _turns(episode: Any) -> dict[str, Any]:
    """Return an episode as a message. Raises RecordError for what is no episode."""
    if not isinstance(episode, Episode) or not isinstance(episode.turns, tuple | list):
        raise RecordError(f"run returned {type(episode).__name__} instead of an Episode with a tuple of turns")
    turns: list[dict[str, Any]] = []
    for turn in episode.turns:
        if isinstance(turn, _ServedReply):
            turns.append({"reply": turn.number})
        elif isinstance(turn, Message):
            turns.append({"role": turn.role, "text": turn.text})
        else:
            raise RecordError(f"a turn is a {type(turn).__name__}; use a Message, or what generate returned")
    return {"turns": turns, "score": _score(episode.score), "truncated": bool(episode.truncated)}


def _score(score: Any) -> dict[str, Any]:
    """Return a score as a message. Raises RecordError for what is no score of numbers."""
    if not isinstance(score, Score) or not isinstance(score.components, Mapping):
        raise RecordError(f"the score is a {type(score).__name__}; return a Score of numbers")
    try:
        components = {str(name): float(value) for name, value in score.components.items()}
        return {"reward": float(score.reward), "components": components}
    except (TypeError, ValueError) as error:
        raise RecordError(f"the score has what is no number: {error}") from error

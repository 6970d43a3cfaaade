"""An environment that is served plays as in the worker itself, and what breaks costs one attempt at one episode."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web

from rollstream.infra.broker.ports import free_port
from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Episode, Generate, Message, Prompt, Score, Split
from rollstream.producers.environments.scripted_policy import ScriptedPolicy
from rollstream.producers.tasks.environment_loading import LoadedEnvironment, load_environments, with_settings
from rollstream.producers.tasks.environment_server import EnvironmentServer
from rollstream.producers.tasks.remote_environment import EnvironmentServerLost, EpisodeFailedThere
from rollstream.topics.errors import ConfigurationError

PROMPTS = [Prompt(example_id=f"p{n}", text=f"{n}+{n}=", answer=str(2 * n)) for n in range(5)]


class Echo:
    """Asks twice, and scores the second answer."""

    name, max_tokens, stop, demonstrated = "echo", 7, ("!",), 0.5

    def __init__(self, **behaviour: Any) -> None:
        self._score: Any = behaviour.get("score", Score(reward=np.float32(0.5), components={"exact": True}))
        self._error: BaseException | None = behaviour.get("error")
        self._prompts = behaviour.get("prompts", PROMPTS)
        self.waits = asyncio.Event()
        self.cancelled = asyncio.Event()

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._prompts[:4] if split == "train" else self._prompts[4:]

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        return [(f"{seed}", str(n))]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        assert prompt.answer, "the server has its own prompts"
        if self._error:
            raise self._error
        first = await generate(prompt.text)
        if first.text == "wait":
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        second = await generate(f"{first.text}?")
        turns = (Message(role="user", text=prompt.text), first, Message(role="tool", text="?"), second)
        return Episode(turns=turns, score=self._score, truncated=second.truncated)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@asynccontextmanager
async def served(
    environment: Any, *, port: int = 0, key: str = "", options: dict[str, Any] | None = None
) -> AsyncIterator[tuple[LoadedEnvironment, EnvironmentServer]]:
    """An environment as a worker loads it, and its server."""
    entry = EnvironmentConfig(use="here")
    async with EnvironmentServer(with_settings(environment, WorkerConfig(), entry), port=port, key=key) as server:
        use = EnvironmentConfig(use=server.url, options=options or {})
        [loaded] = await asyncio.to_thread(load_environments, [use], WorkerConfig())
        yield loaded, server


@in_a_loop
async def test_it_plays_as_the_environment_itself() -> None:
    async with served(Echo()) as (remote, _server):
        assert (remote.name, remote.max_tokens, remote.stop, remote.demonstrated) == ("echo", 7, ("!",), 0.5)
        prompts = await asyncio.to_thread(remote.prompts, "train")
        assert [(p.example_id, p.text) for p in prompts] == [(p.example_id, p.text) for p in PROMPTS[:4]]
        assert len(await asyncio.to_thread(remote.prompts, "heldout")) == 1
        assert await asyncio.to_thread(remote.warm_start_examples, 3, 2) == [("3", "2")]
        assert await asyncio.to_thread(remote.warm_start_conversations, 3, 2) == []
        policy, same = ScriptedPolicy("a", "b"), ScriptedPolicy("a", "b")
        assert await remote.run(prompts[2], policy) == await Echo().run(PROMPTS[2], same)


@in_a_loop
async def test_a_worker_that_leaves_cancels_its_episode() -> None:
    echo = Echo()
    async with served(echo) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
        episode = asyncio.ensure_future(remote.run(prompts[0], ScriptedPolicy("wait")))
        await asyncio.wait_for(echo.waits.wait(), 60)
        episode.cancel()
        await asyncio.wait_for(echo.cancelled.wait(), 60)


@in_a_loop
async def test_a_server_that_ends_in_mid_episode_fails_it_and_the_next_attempt_waits_for_its_successor() -> None:
    port, echo = free_port("127.0.0.1"), Echo()
    async with served(echo, port=port) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
        episode = asyncio.ensure_future(remote.run(prompts[0], ScriptedPolicy("wait")))
        await asyncio.wait_for(echo.waits.wait(), 60)
    with pytest.raises(EnvironmentServerLost, match="in mid-episode"):
        await asyncio.wait_for(episode, 60)
    again = asyncio.ensure_future(remote.run(prompts[0], ScriptedPolicy("a", "b")))
    await asyncio.sleep(0)
    async with served(Echo(), port=port):
        assert (await asyncio.wait_for(again, 60)).score.reward == 0.5


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ({"error": ValueError("no such sum")}, "ValueError('no such sum') at "),
        ({"error": SystemExit(3)}, "SystemExit(3)"),
        ({"error": asyncio.CancelledError()}, "CancelledError()"),
        ({"score": 1.0}, "the score is a float"),
        ({"score": Score(reward="much")}, "no number"),  # type: ignore[arg-type]
    ],
)
@in_a_loop
async def test_a_failure_there_is_a_failed_attempt_here(behaviour: dict[str, Any], says: str) -> None:
    async with served(Echo(**behaviour)) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
        for _ in range(2):  # the server goes on
            with pytest.raises(EpisodeFailedThere) as failed:
                await remote.run(prompts[0], ScriptedPolicy("a", "b"))
            assert says in str(failed.value)


@in_a_loop
async def test_prompts_that_changed_since_they_were_read_are_not_played() -> None:
    port = free_port("127.0.0.1")
    async with served(Echo(), port=port) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
    async with served(Echo(prompts=PROMPTS[::-1]), port=port):
        with pytest.raises(EpisodeFailedThere, match="train/0 of echo is no longer 'p0'"):
            await remote.run(prompts[0], ScriptedPolicy("a", "b"))


@in_a_loop
async def test_a_key_is_required_if_the_server_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVIRONMENT_KEY", "s3cret")
    with pytest.raises(ConfigurationError, match="the key is missing or wrong"):
        async with served(Echo(), key="s3cret"):
            pass
    async with served(Echo(), key="s3cret", options={"api_key": "env:ENVIRONMENT_KEY"}) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
        assert (await remote.run(prompts[0], ScriptedPolicy("a", "b"))).score.components == {"exact": 1.0}


def test_an_address_where_nothing_is_served_is_named() -> None:
    entry = EnvironmentConfig(use=f"http://127.0.0.1:{free_port('127.0.0.1')}", options={"wait_s": 0})
    with pytest.raises(ConfigurationError, match=r"no environment answers at http://.*rollstream env serve"):
        load_environments([entry], WorkerConfig())


# ---------------------------------------------------------------------- agents


class Asking:
    """An agent that streams one chat, and scores its length."""

    name, max_tokens = "asking", 9

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return PROMPTS

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": prompt.text}]
            stream = await client.chat.completions.create(model=endpoint.model, messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            if text == "refuse":
                await client.completions.create(model=endpoint.model, prompt="")
        return Score(reward=len(text))


def events(*texts: str) -> list[bytes]:
    choice = b'{"index":0,"delta":{"content":"%s"}}'
    chunk = b'data: {"id":"c","object":"chat.completion.chunk","created":0,"model":"m","choices":[' + choice + b"]}\n\n"
    return [*(chunk % text.encode() for text in texts), b"data: [DONE]\n\n"]


@asynccontextmanager
async def policy(parts: Sequence[bytes], *, breaks: bool = False) -> AsyncIterator[tuple[Endpoint, list[web.Request]]]:
    """A server of the policy that sends these parts, and the requests it got."""
    requests: list[web.Request] = []

    async def chat(http: web.Request) -> web.StreamResponse:
        requests.append(http)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for part in parts:
            await response.write(part)
        if breaks and http.transport:
            http.transport.abort()
        return response

    async def refuse(http: web.Request) -> web.Response:
        requests.append(http)
        return web.json_response({"error": {"message": "no more calls"}}, status=410, headers={"Retry-After": "1"})

    app = web.Application()
    app.add_routes([web.post("/s/v1/chat/completions", chat), web.post("/s/v1/completions", refuse)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Endpoint(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/s/v1", api_key="k", model="m"), requests
    finally:
        await runner.cleanup()


async def play(agent: Any, endpoint: Endpoint) -> Score:
    async with served(agent) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
        assert remote.agent is not None
        return await remote.agent.play(prompts[0], endpoint)


@in_a_loop
async def test_calls_of_an_agent_reach_the_policy_with_its_key() -> None:
    async with policy(events("ab", "cd")) as (endpoint, requests):
        assert await play(Asking(), endpoint) == Score(reward=4.0)
    [request] = requests
    assert request.headers["Authorization"] == "Bearer k"
    assert request.headers["x-stainless-retry-count"] == "0", "the gateway tells attempts apart by it"


@in_a_loop
async def test_a_refusal_of_the_policy_reaches_the_agent() -> None:
    async with policy(events("refuse")) as (endpoint, _requests):
        with pytest.raises(EpisodeFailedThere, match=r"410.*no more calls"):
            await play(Asking(), endpoint)


@in_a_loop
async def test_a_stream_that_breaks_is_incomplete_for_the_agent() -> None:
    async with policy(events("ab")[:1], breaks=True) as (endpoint, _requests):
        with pytest.raises(EpisodeFailedThere, match=r"incomplete|closed|Connection"):
            await play(Asking(), endpoint)


@in_a_loop
async def test_a_policy_that_is_gone_is_an_error_for_the_agent() -> None:
    gone = Endpoint(base_url=f"http://127.0.0.1:{free_port('127.0.0.1')}/v1", api_key="k", model="m")
    with pytest.raises(EpisodeFailedThere, match="502"):
        await play(Asking(), gone)


@in_a_loop
async def test_calls_after_the_end_of_an_episode_are_refused() -> None:
    kept: list[Endpoint] = []

    class Keeping(Asking):
        async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
            kept.append(endpoint)
            return Score(reward=0.0)

    async with policy(events("ab")) as (endpoint, requests), served(Keeping()) as (remote, _server):
        prompts = await asyncio.to_thread(remote.prompts, "train")
        assert remote.agent is not None
        await remote.agent.play(prompts[0], endpoint)
        with pytest.raises(openai.APIStatusError, match="the episode has ended"):
            await Asking().play(PROMPTS[0], kept[0])
    assert requests == []

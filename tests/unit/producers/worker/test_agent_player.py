"""Why the calls of an agent failed decides how a worker goes on, and its calls follow the operators' servers."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from aiohttp import web

from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Prompt, Score, Split
from rollstream.producers.episodes.branches import branches_of
from rollstream.producers.flow.mixture import Mixture
from rollstream.producers.flow.policy_versions import NoPolicies
from rollstream.producers.gateway.capture import CallCapture
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.service import EpisodeStamp
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.agent_player import play_agent
from rollstream.producers.worker.group_player import EpisodeFailed, EpisodeLimits
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.worker_steering import WorkerSteering
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import DesiredState
from rollstream.topics.errors import RecordError
from rollstream.topics.records import DesiredProcesses
from tests.support.producing import nobody_listening, serving_http

PROMPT = Prompt(example_id="t", text="8+9?")
STAMP = EpisodeStamp(environment="sums", example_id="t", group_id="g", group_size=1, member=0, policy_version=3)


class Sums:
    """An agent that makes one call."""

    name, max_tokens = "sums", 4

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as agent:
            await agent.completions.create(model=endpoint.model, prompt=prompt.text)
        return Score(reward=1.0)


class SwallowingSums(Sums):
    """An agent that scores an episode whose call failed."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        try:
            return await super().play(prompt, endpoint)
        except openai.APIStatusError:
            return Score(reward=0.0)


class CancelledSums(Sums):
    """An agent whose library cancelled a task that the agent awaits."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task
        return Score(reward=0.0)


class ExitingSums(Sums):
    """An agent whose library ends the process."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        sys.exit()


class InterruptedSums(Sums):
    """An agent during which the user presses Ctrl-C."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        raise KeyboardInterrupt


class UnscoredSums(Sums):
    """An agent whose score has no reward."""

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        await super().play(prompt, endpoint)
        return Score(reward=None)  # type: ignore[arg-type]


class WaitingSums(Sums):
    """An agent that waits without end."""

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        self.endpoint = endpoint
        self.began.set()
        await asyncio.Event().wait()
        return Score(reward=0.0)


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "17", "finish_reason": "stop", **fields}]}


def sampled() -> dict[str, Any]:
    """An answer with one sampled token."""
    logprobs = {"token_logprobs": [-1.0], "tokens": ["17"]}
    return {**choice(token_ids=[2], logprobs=logprobs), "prompt_token_ids": [1]}


def answering(body: dict[str, Any], status: int = 200) -> Callable[[web.Request], Coroutine[Any, Any, web.Response]]:
    async def handle(http: web.Request) -> web.Response:
        return web.json_response(body, status=status) if http.method == "POST" else web.Response(status=404)

    return handle


def gateway_of(url: str) -> LocalGateway:
    worker = WorkerConfig(inference_urls=(url,), request_timeout_s=1.0)
    return LocalGateway(
        KafkaConfig(),
        "run",
        worker,
        GatewayConfig(),
        name="w",
        policies=NoPolicies(),
        temperatures={},
        recorded=False,
    )


async def error_of(agent: Sums, url: str) -> BaseException | None:
    """The error of an episode."""
    async with gateway_of(url) as gateway:
        return (await play_agent(agent, gateway, PROMPT, STAMP, EpisodeLimits(timeout_s=60, attempts=2))).error


@pytest.mark.parametrize("agent", [Sums(), SwallowingSums()])
def test_a_server_whose_answers_lack_tokens_refuses_and_one_that_is_down_is_unavailable(agent: Sums) -> None:
    with serving_http(answering(choice())) as url:
        refused = asyncio.run(error_of(agent, url))
    assert type(refused) is InferenceRefused
    assert "a model call failed" in str(refused)
    with nobody_listening() as url:
        assert type(asyncio.run(error_of(agent, url))) is InferenceUnavailable


@pytest.mark.parametrize("agent", [Sums(), SwallowingSums()])
def test_only_a_server_that_would_refuse_any_request_fails_the_episode_of_an_agent_that_goes_on(agent: Sums) -> None:
    for status in (401, 403, 404):
        with serving_http(answering({"error": {"message": "no such model"}}, status)) as url:
            refused = asyncio.run(error_of(agent, url))
        assert type(refused) is InferenceRefused
        assert f"a model call failed: {url} refused the request: {status} " in str(refused)
    with serving_http(answering({"error": {"message": "no such field"}}, 400)) as url:
        error = asyncio.run(error_of(agent, url))
    assert type(error) is (RecordError if isinstance(agent, SwallowingSums) else EpisodeFailed), "no call was made"


def test_a_task_that_a_library_cancelled_fails_the_episode() -> None:
    with nobody_listening() as url:
        error = asyncio.run(error_of(CancelledSums(), url))
    assert type(error) is EpisodeFailed
    assert "sums failed on t: CancelledError()" in str(error)


def test_an_agent_that_ends_the_process_fails_the_episode_and_the_keyboard_ends_the_player() -> None:
    with nobody_listening() as url:
        error = asyncio.run(error_of(ExitingSums(), url))
        assert type(error) is EpisodeFailed
        assert "sums failed on t: SystemExit() at " in str(error)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(error_of(InterruptedSums(), url))


def test_a_request_to_stop_cancels_an_agent_and_leaves_no_session_in_memory() -> None:
    async def scenario(url: str) -> None:
        agent = WaitingSums()
        async with gateway_of(url) as gateway:
            limits = EpisodeLimits(timeout_s=60, attempts=2)
            playing = asyncio.ensure_future(play_agent(agent, gateway, PROMPT, STAMP, limits))
            await agent.began.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            with pytest.raises(openai.NotFoundError, match="it may have ended"):
                await Sums().play(PROMPT, agent.endpoint)

    with nobody_listening() as url:
        asyncio.run(scenario(url))


def test_a_score_without_a_reward_fails_the_episode_and_is_no_reward_of_zero() -> None:
    with serving_http(answering(sampled())) as url:
        error = asyncio.run(error_of(UnscoredSums(), url))
    assert type(error) is EpisodeFailed
    assert "environment sums returned a Score whose reward is not a number" in str(error)


def test_calls_of_agents_go_to_the_servers_that_operators_want() -> None:
    body = sampled()

    async def scenario(before: str, after: str) -> None:
        async with gateway_of(before) as gateway, CompletionsClient([before]) as client:
            follower, seen = SimpleNamespace(state=DesiredState()), list[object]()
            environment = with_settings(Sums(), WorkerConfig(), EnvironmentConfig(use="x:Y"))
            steering = WorkerSteering(
                follower,  # type: ignore[arg-type]
                Mixture([environment]),
                client,
                None,
                workers=1,
                gateway=gateway,
                servers=lambda _count: [after],
                follow=seen.append,
            )
            follower.state = DesiredState(processes={"infer": DesiredProcesses(role="infer", processes=2)})
            steering.follow()
            assert client.urls == (after,)
            assert seen == [{"infer": 2}]
            session = await gateway.open(STAMP)
            await Sums().play(PROMPT, gateway.endpoint_of(session))
            assert [branch.tokens.tolist() for branch in branches_of(session.calls)] == [[1, 2]]

    with nobody_listening() as before, serving_http(answering(body)) as after:
        asyncio.run(scenario(before, after))


@pytest.mark.parametrize("agent", [Sums(), SwallowingSums()])
def test_a_mistake_of_the_capture_is_no_failure_of_the_agent(monkeypatch: pytest.MonkeyPatch, agent: Sums) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        raise NameError("name 'labeled' is not defined")

    monkeypatch.setattr(CallCapture, "answer", mistaken)
    with serving_http(answering(sampled())) as url, pytest.raises(NameError, match="labeled"):
        asyncio.run(error_of(agent, url))

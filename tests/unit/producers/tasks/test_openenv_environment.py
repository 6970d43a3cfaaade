"""An OpenEnv server, one that a test plays, is asked in sessions that end, and a policy's mistake is no failure."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from rollstream.producers.environments.environment import Episode
from rollstream.producers.environments.scripted_policy import ScriptedPolicy
from rollstream.producers.tasks.openenv_environment import OpenEnvEnvironment, OpenEnvFailed
from rollstream.topics.errors import ConfigurationError


class Counter:
    """Counts what it is told, up to ten; it has room for one session."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._sessions = 0

    async def session(self, http: web.Request) -> web.WebSocketResponse:
        stream = web.WebSocketResponse()
        await stream.prepare(http)
        self._sessions += 1
        try:
            if self._sessions > 1:
                await stream.send_json(_error("CAPACITY_REACHED", "full"))
                return stream
            count = 0
            async for frame in stream:
                message = json.loads(frame.data)
                self.messages.append(message)
                if message["type"] == "close":
                    break
                if message["type"] == "reset":
                    count = message["data"]["seed"] % 2
                elif not isinstance(message["data"].get("add"), int | str):
                    await stream.send_json(_error("VALIDATION_ERROR", "no number"))
                    continue
                elif message["data"]["add"] == "crash":
                    await stream.send_json(_error("EXECUTION_ERROR", "it crashed"))
                    continue
                elif message["data"]["add"] == "leave":
                    break
                else:
                    count += int(message["data"]["add"])
                data = {"observation": {"count": count}, "reward": count / 10, "done": count >= 10}
                await stream.send_json({"type": "observation", "data": data})
        finally:
            self._sessions -= 1
        return stream


def _error(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


def play(policies: Sequence[ScriptedPolicy], **options: Any) -> tuple[list[Episode | BaseException], Counter]:
    """An episode for each policy, all at once, of the first tasks."""

    async def run() -> tuple[list[Episode | BaseException], Counter]:
        counter, app = Counter(), web.Application()
        app.add_routes([web.get("/ws", counter.session)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            environment = OpenEnvEnvironment(f"http://127.0.0.1:{runner.addresses[0][1]}/", **options)
            episodes = [environment.run(*each) for each in zip(environment.prompts("train"), policies, strict=False)]
            return await asyncio.gather(*episodes, return_exceptions=True), counter
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_replies_are_actions_until_the_episode_is_done() -> None:
    policies = [ScriptedPolicy('{"add": 4}', '{"add": 6}', "never") for _ in range(3)]
    episodes, counter = play(policies, instructions="Reach ten. ", reset={"level": 2}, turns=5)
    for episode, policy in zip(episodes, policies, strict=True):
        assert isinstance(episode, Episode)
        assert policy.texts in ([f'Reach ten. {{"count": {odd}}}', f'{{"count": {4 + odd}}}'] for odd in (0, 1))
        assert (len(episode.turns), episode.score.components) == (4, {"actions": 2.0, "invalid_action": 0.0})
        assert episode.score.reward in (pytest.approx(1.4), pytest.approx(1.6)), "the sum, without that of the reset"
    sent = [message["type"] for message in counter.messages]
    assert sent == ["reset", "step", "step", "close"] * 3, "one session after the other"
    assert all(m["data"]["level"] == 2 for m in counter.messages if m["type"] == "reset")


def test_one_field_of_the_action_and_of_the_observation_may_be_named() -> None:
    policy = ScriptedPolicy("3", "3")
    [episode], counter = play([policy], action="add", observation="count", turns=2)
    assert isinstance(episode, Episode)
    assert int(policy.texts[1]) == int(policy.texts[0]) + 3
    assert [m["data"] for m in counter.messages if m["type"] == "step"] == [{"add": "3"}] * 2


@pytest.mark.parametrize("mistake", ["seven", "[7]", '{"add": null}'])
def test_an_invalid_action_ends_the_episode_with_its_reward(mistake: str) -> None:
    [episode], _counter = play([ScriptedPolicy('{"add": 1}', mistake)])
    assert isinstance(episode, Episode)
    assert episode.score.components == {"actions": 2.0, "invalid_action": 1.0}
    assert episode.score.reward in (0.1, 0.2)


@pytest.mark.parametrize(("action", "says"), [("crash", "it crashed"), ("leave", "ended in mid-episode")])
def test_a_server_that_fails_is_a_failed_attempt(action: str, says: str) -> None:
    [failure], _counter = play([ScriptedPolicy(action)], action="add")
    assert isinstance(failure, OpenEnvFailed)
    assert says in str(failure)


def test_a_field_that_is_not_there_is_named() -> None:
    [failure], _counter = play([ScriptedPolicy("1")], action="add", observation="total")
    assert isinstance(failure, OpenEnvFailed)
    assert "has no field 'total'; it has count" in str(failure)


def test_a_server_that_is_not_there_is_named() -> None:
    environment = OpenEnvEnvironment("http://127.0.0.1:1", wait_s=0)
    with pytest.raises(OpenEnvFailed, match=r"http://127.0.0.1:1 has no session"):
        asyncio.run(environment.run(environment.prompts("train")[0], ScriptedPolicy("1")))
    with pytest.raises(ConfigurationError, match="must begin with http"):
        OpenEnvEnvironment("ws://127.0.0.1:1")

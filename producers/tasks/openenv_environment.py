"""Environments of OpenEnv, run by their own servers: a reply of the policy is an action, its observation the next text.

An episode is one session of the server, and its tasks are seeds. It needs no library: it speaks OpenEnv's WebSocket.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rollstream.producers.environments.environment import Episode, Generate, Message, Prompt, Reply, Score, Split
from rollstream.producers.tasks.remote_environment import MOST_BYTES
from rollstream.producers.tasks.task import split_prompts
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.watched_sockets import watch

_AGAIN_S = 0.2
_INVALID_ACTION = "VALIDATION_ERROR"
_FULL = "CAPACITY_REACHED"


class OpenEnvFailed(RollstreamError):
    """An OpenEnv server cannot be reached, or failed in an episode, so the episode has no reward."""


class OpenEnvEnvironment:
    """One environment of OpenEnv at the URL of its server."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "openenv",
        instructions: str = "",
        action: str = "",
        observation: str = "",
        reset: Mapping[str, Any] | None = None,
        tasks: int = 1000,
        turns: int = 16,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        wait_s: float = 60.0,
    ) -> None:
        """`instructions` precede the first observation. A reply is the field `action` of the action, or without
        `action` a JSON object, the whole action. The policy sees the field `observation`, or without `observation` the
        whole observation as JSON. `reset` are arguments of reset in addition to the seed.

        The first `tasks` seeds are the tasks, of which every fifth is held out. An episode ends after `turns` actions
        at the latest, and its reward is the sum of theirs. A server that is gone or full is asked again for `wait_s`.
        """
        if not url.startswith(("http://", "https://")) or tasks < 1 or turns < 1:
            raise ConfigurationError(
                f"openenv has url {url!r}, tasks {tasks} and turns {turns}; url must begin with http:// or https://, "
                "and the numbers must be at least 1"
            )
        self.name, self.max_tokens, self.stop = name, max_tokens, tuple(stop)
        self._url, self._reset, self._turns, self._wait_s = url.rstrip("/"), dict(reset or {}), turns, wait_s
        self._action, self._observation = action, observation
        self._splits = split_prompts(
            name, (Prompt(example_id=f"seed-{n}", text=instructions, answer=str(n)) for n in range(tasks))
        )

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the seeds of a split."""
        return self._splits[split]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play one episode. An action that the server finds invalid ends it with the reward so far, because a failure
        would take the policy's mistakes out of training. Raises OpenEnvFailed."""
        turns: list[Message | Reply] = []
        total, invalid, truncated = 0.0, False, False
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            session, data = await self._begin(http, int(prompt.answer))
            async with session:
                text = prompt.text + self._shown(data)
                while not data.get("done") and len(turns) < 2 * self._turns:
                    reply = await generate(text)
                    turns += [Message(role="user", text=text), reply]
                    truncated = reply.truncated
                    action = self._action_of(reply.text)
                    answer = {} if action is None else await _ask(session, {"type": "step", "data": action})
                    if invalid := action is None or answer["data"].get("code") == _INVALID_ACTION:
                        break
                    data = _observed(answer)
                    total += float(data.get("reward") or 0.0)
                    text = self._shown(data)
                await session.send_json({"type": "close"})
        components = {"actions": float(len(turns) // 2), "invalid_action": float(invalid)}
        return Episode(turns=tuple(turns), score=Score(reward=total, components=components), truncated=truncated)

    async def _begin(
        self, http: aiohttp.ClientSession, seed: int
    ) -> tuple[aiohttp.ClientWebSocketResponse, dict[str, Any]]:
        """Return a session and its first observation, as soon as the server has room for one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while True:
            session = None
            try:
                session = await http.ws_connect(f"{self._url}/ws", max_msg_size=MOST_BYTES)
                watch(session.get_extra_info("socket"))
                answer = await _ask(session, {"type": "reset", "data": {"seed": seed, **self._reset}})
                problem = answer["data"].get("message", "") if answer["data"].get("code") == _FULL else ""
            except (aiohttp.ClientError, OSError, OpenEnvFailed) as error:
                problem = str(error) or repr(error)
            if session is not None and not problem:
                return session, _observed(answer)
            if session is not None:
                await session.close()
            if loop.time() > deadline:
                raise OpenEnvFailed(f"the OpenEnv server at {self._url} has no session for an episode: {problem}")
            await asyncio.sleep(_AGAIN_S)

    def _shown(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation") or {}
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise OpenEnvFailed(
                f"the observation of {self._url} has no field {self._observation!r}; it has {', '.join(observation)}: "
                "set the option observation to one of them"
            )
        return str(observation[self._observation])

    def _action_of(self, text: str) -> dict[str, Any] | None:
        if self._action:
            return {self._action: text}
        try:
            action = json.loads(text)
        except ValueError:
            return None
        return action if isinstance(action, dict) else None


async def _ask(session: aiohttp.ClientWebSocketResponse, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a message: an observation, or an error with a code. Raises OpenEnvFailed."""
    try:
        await session.send_json(message)
        frame = await session.receive()
    except (aiohttp.ClientError, OSError) as error:
        raise OpenEnvFailed(f"the OpenEnv server is gone: {error}") from error
    if frame.type is not aiohttp.WSMsgType.TEXT:
        raise OpenEnvFailed("the OpenEnv server ended in mid-episode")
    answer: dict[str, Any] = json.loads(frame.data)
    return answer


def _observed(answer: Mapping[str, Any]) -> dict[str, Any]:
    if answer.get("type") != "observation":
        raise OpenEnvFailed(f"the OpenEnv server answers {json.dumps(answer)[:500]}")
    data: dict[str, Any] = answer["data"]
    return data

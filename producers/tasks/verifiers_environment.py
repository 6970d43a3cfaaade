"""Environments of verifiers 0.4 (tasksets, harnesses, tools, sandboxes), whose agents call the policy themselves.

The worker records the calls of an episode as the engine sampled them, so tokens and logprobs never pass through the
library's files, which round them. A failed episode raises an error, so its member fails and never gets a reward of 0.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rollstream.producers.environments.environment import Endpoint, Prompt, Score, Split
from rollstream.producers.tasks.task import split_prompts
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.secrets import error_text

_ID_LENGTH = 32
"""Number of hexadecimal digits, from the beginning of a task's key, that are the id of its prompt."""


class VerifiersEpisodeFailed(RollstreamError):
    """An episode of verifiers ended with an error, so it has no reward."""


class VerifiersEnvironment:
    """One environment of verifiers, defined by the settings that verifiers' own configuration files hold in `[env]`."""

    def __init__(
        self,
        env: Mapping[str, Any],
        *,
        name: str = "",
        max_tokens: int = 512,
        temperature: float = 1.0,
        tasks: int = 1000,
    ) -> None:
        """Load the environment `env`, e.g. {"taskset": {"id": "my_taskset"}}, and at most `tasks` of its tasks.

        Every fifth task is held out. All calls without their own client go to the policy and are trained on, so give a
        judge or a simulated user its own client in `env`. Raises ConfigurationError if verifiers is not installed or
        refuses the settings.
        """
        self._verifiers = _import_verifiers()
        self._env = _load(env)
        self.name = name or self._env.config.env_id
        self.max_tokens = max_tokens
        self._temperature = temperature
        self._tasks = {task.key[:_ID_LENGTH]: task for task in islice(iter(self._env.taskset), tasks)}
        self._splits = split_prompts(
            self.name, (Prompt(example_id=key, text=_text(task)) for key, task in self._tasks.items())
        )
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Event | None = None

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the tasks of a split; an id is the beginning of the task's key, the hash of its content."""
        return self._splits[split]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Run one episode of the task. Raises VerifiersEpisodeFailed if the episode or its scoring failed."""
        await self._serve()
        vf = self._verifiers
        # The library reads keys only from the process's environment variables.
        variable = f"ROLLSTREAM_EPISODE_{id(endpoint):x}"
        os.environ[variable] = endpoint.api_key
        try:
            context = vf.ModelContext(
                model=endpoint.model,
                client=vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable),
                sampling=vf.SamplingConfig(temperature=self._temperature, max_tokens=self.max_tokens),
            )
            episode = await self._env.run_episode(self._tasks[prompt.example_id], context)
        finally:
            del os.environ[variable]
        return score_of(episode)

    async def _serve(self) -> None:
        """Keep the environment's own servers running for as long as the event loop does."""
        if self._serving is None or self._serving.done():
            self._ready = asyncio.Event()
            self._serving = asyncio.create_task(self._hold(self._ready))
        assert self._ready is not None
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            raise VerifiersEpisodeFailed(f"the servers of {self.name} did not start: {self._serving.exception()!r}")

    async def _hold(self, ready: asyncio.Event) -> None:
        async with self._env.serving():
            ready.set()
            await asyncio.Event().wait()


def score_of(episode: Any) -> Score:
    """Return the rewards of an episode's trainable agents.

    Raises VerifiersEpisodeFailed if the episode is not ok or was not scored.
    """
    errors = [error.message for error in (*episode.errors, *(e for trace in episode.traces for e in trace.errors))]
    if not episode.ok or episode.is_timeout:
        raise VerifiersEpisodeFailed(
            f"the episode of {episode.env.id} failed: {'; '.join(errors) or 'no reason is given'}"
        )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    rewards = {name: reward for trace in traces for name, reward in trace.rewards.items()}
    metrics = {name: metric for trace in traces for name, metric in trace.metrics.items()}
    if not rewards or None in rewards.values():
        unscored = [name for name, reward in rewards.items() if reward is None]
        raise VerifiersEpisodeFailed(f"the episode of {episode.env.id} has no reward {', '.join(unscored)}".rstrip())
    components = {name: float(value) for name, value in metrics.items() if value is not None}
    components |= {name: float(reward.score) for name, reward in rewards.items() if reward is not None}
    return Score(reward=float(sum(trace.reward for trace in traces)), components=components)


def _text(task: Any) -> str:
    prompt = task.data.prompt
    return prompt if isinstance(prompt, str) else ""


def _import_verifiers() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise ConfigurationError(
            "environments of verifiers need the library: pip install 'rollstream[verifiers]'"
        ) from error
    return verifiers.v1


def _load(env: Mapping[str, Any]) -> Any:
    from verifiers.v1 import load_environment
    from verifiers.v1.utils.loaders import resolve_env_config

    try:
        return load_environment(resolve_env_config(dict(env)))
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"verifiers refuses the environment with the settings {', '.join(env)}: {error_text(error, env)}"
        ) from None

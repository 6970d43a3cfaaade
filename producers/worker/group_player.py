"""Plays the episodes of one group, each within a time limit; an episode whose environment fails is tried again.

A failed member never counts as a reward of zero; the worker cancels it on the log.
"""

import asyncio
import logging
import math
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollstream.producers.environments.environment import Episode, Prompt, Score
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.worker.sampling import GroupSampler, GroupSampling, SamplingClient
from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class EpisodeFailed(RollstreamError):
    """An environment or its verifier failed or took too long."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of one episode."""

    timeout_s: float
    attempts: int


async def play_group(
    environment: LoadedEnvironment,
    client: SamplingClient,
    prompt: Prompt,
    sampling: GroupSampling,
    limits: EpisodeLimits,
) -> Sequence[Episode | BaseException]:
    """Return the episode of each member, or the error that ended it.

    Errors are EpisodeFailed, InferenceUnavailable and InferenceRefused (ContextTooLong for a prompt that is too long),
    and mistakes of the sampler's own code, which are no failure of the environment.
    """
    sampler = GroupSampler(client, environment, sampling)
    try:
        return await asyncio.gather(
            *(_member(environment, sampler, prompt, index, limits) for index in range(sampling.group_size)),
            return_exceptions=True,
        )
    finally:
        sampler.close()


async def _member(
    environment: LoadedEnvironment, sampler: GroupSampler, prompt: Prompt, index: int, limits: EpisodeLimits
) -> Episode:
    """Play one member. Each attempt uses the same seeds, so that a retry samples the same answers again."""
    deadline = asyncio.get_running_loop().time() + limits.timeout_s
    for attempt in range(1, limits.attempts + 1):
        generate = sampler.member(index)
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                episode = await environment.run(prompt, generate)
        except (InferenceUnavailable, InferenceRefused):
            # The client has already retried.
            raise
        except BaseException as error:
            if ends_the_player(error):
                raise
            generate.check()
            if timeout.expired():
                raise EpisodeFailed(
                    f"an episode of {environment.name} took longer than worker.episode_timeout_s {limits.timeout_s:g}"
                ) from error
            failure = failure_of(environment.name, prompt, error)
        else:
            generate.check()
            problem = episode_problem(episode)
            if not problem:
                return episode
            failure = EpisodeFailed(f"environment {environment.name} returned {problem}")
        note_failure(environment.name, prompt, attempt, failure)
    raise failure


def episode_problem(value: object) -> str:
    """Return what an environment returned in place of an episode with turns and a score; empty if it returned one."""
    if not isinstance(value, Episode):
        return f"{type(value).__name__} instead of an Episode"
    if not isinstance(value.turns, Sequence):
        return f"an Episode whose turns are of type {type(value.turns).__name__} instead of a tuple"
    return score_problem(value.score)


def score_problem(value: object) -> str:
    """Return what an environment returned in place of a score made of numbers; empty if it returned one.

    NaN and infinity pass, because the checks of rollouts name them.
    """
    if not isinstance(value, Score):
        return f"{type(value).__name__} instead of a Score"
    if not isinstance(value.components, Mapping):
        return f"a Score whose components are of type {type(value.components).__name__}"
    for name, number in (("reward", value.reward), *value.components.items()):
        try:
            # Like a record, this accepts every type that converts to float, such as bool and NumPy's, but no text.
            math.isnan(number)
        except Exception as error:
            return f"a Score whose {name} is not a number: {error}"
    return ""


def note_failure(environment: str, prompt: Prompt, attempt: int, failure: EpisodeFailed) -> None:
    """Log a failed attempt at an episode."""
    event(
        logger,
        "episode_failed",
        level=logging.WARNING,
        environment=environment,
        example_id=prompt.example_id,
        attempt=attempt,
        error=str(failure),
    )


def ends_the_player(error: BaseException) -> bool:
    """Whether an error of an environment stops the current task, and is not only a failure of the environment.

    A CancelledError stops it only if the current task itself is being cancelled: the environment may have awaited
    another task, which its own library cancelled. A SystemExit counts as a failure of the environment, because
    otherwise the process would end as if all its work were done.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def failure_of(environment: str, prompt: Prompt, error: BaseException) -> EpisodeFailed:
    """Return the failure of an environment that raised an error, with the file and the line where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    failure = EpisodeFailed(
        f"environment {environment} failed on {prompt.example_id}: {error!r} at {frame.filename}:{frame.lineno}"
    )
    failure.__cause__ = error
    return failure


T = TypeVar("T")


async def finish_or_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event, *, grace_s: float) -> T:
    """Return the result of `work`. Cancel it and raise TimeoutError if it runs for `grace_s` after `stop` is set."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.wait_for(task, grace_s)
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)

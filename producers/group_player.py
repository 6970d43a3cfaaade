"""Plays the episodes of one group, each within a time limit; an episode whose environment fails is tried again.

A failed member never counts as a reward of zero; the worker cancels it on the log.
"""

import asyncio
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.producers.environment import Episode, Prompt
from rollstream.producers.environment_loading import LoadedEnvironment
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.sampling import GroupSampler, GroupSampling, SamplingClient
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

    Errors are EpisodeFailed, InferenceUnavailable and InferenceRefused (ContextTooLong for a prompt that is too long).
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
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                episode = await environment.run(prompt, sampler.member(index))
        except (InferenceUnavailable, InferenceRefused):
            # The client has already retried.
            raise
        except (Exception, asyncio.CancelledError) as error:
            if being_cancelled(error):
                raise
            if timeout.expired():
                raise EpisodeFailed(
                    f"an episode of {environment.name} took longer than worker.episode_timeout_s {limits.timeout_s:g}"
                ) from error
            failure = failure_of(environment.name, prompt, error)
        else:
            if isinstance(episode, Episode):
                return episode
            failure = EpisodeFailed(
                f"environment {environment.name} returned {type(episode).__name__} instead of an Episode"
            )
        note_failure(environment.name, prompt, attempt, failure)
    raise failure


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


def being_cancelled(error: BaseException) -> bool:
    """Whether an error stops the current task.

    A CancelledError does not if the environment awaited another task, which its own library cancelled.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def failure_of(environment: str, prompt: Prompt, error: BaseException) -> EpisodeFailed:
    """Return the failure of an environment that raised an error, with the file and the line where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    failure = EpisodeFailed(
        f"environment {environment} failed on {prompt.example_id}: {error!r} at {frame.filename}:{frame.lineno}"
    )
    failure.__cause__ = error
    return failure

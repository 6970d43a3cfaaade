"""Plays episodes of environments that call the policy themselves, each at an address of its own.

An episode is one attempt: the calls of a failed one are on the log, and another attempt would add to them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.producers.environment import AgentEnvironment, Prompt, Score
from rollstream.producers.gateway.worker_capture import EpisodeCapture, EpisodeStamp, WorkerCapture
from rollstream.producers.group_player import EpisodeFailed, failure_of
from rollstream.producers.inference.errors import InferenceUnavailable
from rollstream.producers.rollout_assembly import GroupStamp
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """One member of a group: its rollouts, or the error that it ended with."""

    rollouts: tuple[Rollout, ...] = ()
    """One for each branch."""
    error: BaseException | None = None
    capture: EpisodeCapture | None = None
    """Session that must be told whether the rollouts are on the log; None for an environment of texts."""


async def play_agents(
    environment: AgentEnvironment,
    capture: WorkerCapture,
    prompt: Prompt,
    stamp: GroupStamp,
    timeout_s: float,
) -> Sequence[PlayedEpisode]:
    """Play all members side by side. Raises the errors of the log."""
    stamps = [
        EpisodeStamp(
            environment=stamp.environment,
            example_id=prompt.example_id,
            group_id=stamp.group_id,
            group_size=stamp.group_size,
            member=member,
            policy_version=stamp.policy_version,
        )
        for member in range(stamp.group_size)
    ]
    return await asyncio.gather(*(play_agent(environment, capture, prompt, each, timeout_s) for each in stamps))


async def play_agent(
    environment: AgentEnvironment, capture: WorkerCapture, prompt: Prompt, stamp: EpisodeStamp, timeout_s: float
) -> PlayedEpisode:
    """Play one episode. Raises the errors of the log."""
    episode = await capture.open(stamp)
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            score = await environment.play(prompt, episode.endpoint)
    except Exception as error:
        if timeout.expired():
            failure = EpisodeFailed(
                f"an episode of {stamp.environment} took longer than worker.episode_timeout_s {timeout_s:g}"
            )
        else:
            failure = failure_of(stamp.environment, prompt, error)
        return PlayedEpisode(error=failure, capture=episode)
    if not isinstance(score, Score):
        name = type(score).__name__
        failure = EpisodeFailed(f"environment {stamp.environment} returned {name} where a Score belongs")
        return PlayedEpisode(error=failure, capture=episode)
    try:
        return PlayedEpisode(rollouts=tuple(await episode.finish(score)), capture=episode)
    except (InferenceUnavailable, RecordError) as error:
        return PlayedEpisode(error=error, capture=episode)

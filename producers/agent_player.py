"""Plays episodes of environments that call the policy themselves, each through its own endpoint.

An episode whose environment fails is tried again. Each attempt has its own session, because the calls of a failed
attempt stay on the log and must not become rollouts.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollstream.producers.environment import AgentEnvironment, Prompt, Score
from rollstream.producers.gateway.worker_capture import EpisodeCapture, EpisodeStamp, WorkerCapture
from rollstream.producers.group_player import (
    EpisodeFailed,
    EpisodeLimits,
    ends_the_player,
    failure_of,
    note_failure,
    score_problem,
)
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.rollout_assembly import GroupStamp
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """One member of a group: its rollouts, or the error that ended it."""

    rollouts: tuple[Rollout, ...] = ()
    """One for each branch."""
    error: BaseException | None = None
    capture: EpisodeCapture | None = None
    """Session of the last attempt, to which the caller must report whether the rollouts are on the log; None for an
    environment that exchanges texts."""


async def play_agents(
    environment: AgentEnvironment,
    capture: WorkerCapture,
    prompt: Prompt,
    stamp: GroupStamp,
    limits: EpisodeLimits,
) -> Sequence[PlayedEpisode]:
    """Play all members concurrently. Raises errors of writes to the log."""
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
    return await asyncio.gather(*(play_agent(environment, capture, prompt, each, limits) for each in stamps))


async def play_agent(
    environment: AgentEnvironment, capture: WorkerCapture, prompt: Prompt, stamp: EpisodeStamp, limits: EpisodeLimits
) -> PlayedEpisode:
    """Play one episode. Raises errors of writes to the log."""
    deadline = asyncio.get_running_loop().time() + limits.timeout_s
    attempt, episode = 1, await capture.open(stamp)
    while True:
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                score = await environment.play(prompt, episode.endpoint)
        except BaseException as error:
            if ends_the_player(error):
                # An evaluator that ends an evaluation goes on with others.
                episode.forget()
                raise
            if timeout.expired():
                failure = EpisodeFailed(
                    f"an episode of {stamp.environment} took longer than worker.episode_timeout_s {limits.timeout_s:g}"
                )
                return PlayedEpisode(error=failure, capture=episode)
            failure = failure_of(stamp.environment, prompt, error)
        else:
            problem = score_problem(score)
            if not problem:
                return await _finished(episode, score)
            failure = EpisodeFailed(f"environment {stamp.environment} returned {problem}")
        if episode.failure is not None:
            # The requests to the servers were already retried.
            return PlayedEpisode(error=episode.failure, capture=episode)
        note_failure(stamp.environment, prompt, attempt, failure)
        if attempt == limits.attempts:
            return PlayedEpisode(error=failure, capture=episode)
        attempt += 1
        # Open the new session before closing the failed one. Then a killed worker always leaves an open session, from
        # which its next process learns that it must cancel the member.
        again = await capture.open(stamp, attempt)
        await episode.cancelled(f"tried again: {failure}")
        episode = again


async def _finished(episode: EpisodeCapture, score: Score) -> PlayedEpisode:
    try:
        return PlayedEpisode(rollouts=tuple(await episode.finish(score)), capture=episode)
    except (InferenceUnavailable, InferenceRefused, EpisodeFailed, RecordError) as error:
        return PlayedEpisode(error=error, capture=episode)

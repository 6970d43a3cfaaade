"""Plays episodes of environments that call the policy themselves, each through its own address of a local gateway.

An episode whose environment fails is tried again. Each attempt has its own session, because the calls of a failed
attempt stay on the log and must not become rollouts.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollstream.producers.environments.environment import AgentEnvironment, Prompt
from rollstream.producers.gateway.service import EpisodeStamp, WrittenRollouts
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.worker.group_player import (
    EpisodeFailed,
    EpisodeLimits,
    ends_the_player,
    failure_of,
    note_failure,
    score_problem,
)
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.rollout_assembly import GroupStamp
from rollstream.topics.errors import RecordError, RollstreamError
from rollstream.topics.records import Rollout

_GIVE_UP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """One member of a group: its rollouts, or the error that ended it."""

    rollouts: Sequence[Rollout] = ()
    """One for each branch."""
    error: BaseException | None = None
    written: WrittenRollouts | None = None
    """Where the rollouts of an agent are on the log."""


async def play_agents(
    environment: AgentEnvironment,
    gateway: LocalGateway,
    prompt: Prompt,
    stamp: GroupStamp,
    limits: EpisodeLimits,
    *,
    labeled: bool = False,
) -> Sequence[PlayedEpisode]:
    """Play all members concurrently. When this returns, the rollouts of each, or its cancellation, are on the log of a
    recorded gateway. Raises errors of writes to the log."""
    stamps = [
        EpisodeStamp(
            environment=stamp.environment,
            example_id=prompt.example_id,
            group_id=stamp.group_id,
            group_size=stamp.group_size,
            member=member,
            policy_version=stamp.policy_version,
            labeled=labeled,
        )
        for member in range(stamp.group_size)
    ]
    members = [asyncio.ensure_future(play_agent(environment, gateway, prompt, each, limits)) for each in stamps]
    try:
        return await asyncio.gather(*members)
    finally:
        for member in members:
            member.cancel()
        await asyncio.gather(*members, return_exceptions=True)


async def play_agent(
    environment: AgentEnvironment, gateway: LocalGateway, prompt: Prompt, stamp: EpisodeStamp, limits: EpisodeLimits
) -> PlayedEpisode:
    """Play one episode. Raises errors of writes to the log, and any mistake of the gateway's own code."""
    deadline = asyncio.get_running_loop().time() + limits.timeout_s
    attempt, session = 1, await gateway.open(stamp)
    while True:
        endpoint = gateway.endpoint_of(session)
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                score = await environment.play(prompt, endpoint)
        except BaseException as error:
            if ends_the_player(error):
                if isinstance(error, asyncio.CancelledError):
                    # Best effort: another process ends a session that stays open on the log.
                    with suppress(RollstreamError, TimeoutError):
                        await asyncio.wait_for(gateway.cancel(session, "the worker is stopping"), _GIVE_UP_S)
                raise
            gateway.check()
            if timeout.expired():
                failure = EpisodeFailed(
                    f"an episode of {stamp.environment} took longer than worker.episode_timeout_s {limits.timeout_s:g}"
                )
                break
            failure = failure_of(stamp.environment, prompt, error)
        else:
            gateway.check()
            problem = score_problem(score)
            if not problem:
                try:
                    rollouts = await gateway.finish(session, score)
                except (InferenceUnavailable, InferenceRefused, EpisodeFailed, RecordError) as error:
                    return PlayedEpisode(error=error)
                return PlayedEpisode(rollouts=rollouts, written=gateway.written(session))
            failure = EpisodeFailed(f"environment {stamp.environment} returned {problem}")
        if gateway.failure_of(session) is not None:
            break  # The requests to the servers were already retried.
        note_failure(stamp.environment, prompt, attempt, failure)
        if attempt == limits.attempts:
            break
        attempt += 1
        # Open the new session before finishing the failed one. Then a killed worker always leaves an open session, with
        # which the member is cancelled.
        again = await gateway.open(stamp, attempt)
        await gateway.try_again(session, f"tried again: {failure}")
        session = again
    cause = gateway.failure_of(session) or failure
    await gateway.cancel(session, str(cause))
    return PlayedEpisode(error=cause)

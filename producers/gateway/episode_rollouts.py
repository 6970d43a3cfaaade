"""Rollouts of a captured session, one for each branch, with the same bytes from every gateway. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollstream.producers.episodes.branches import Branch, branches_of, distinct
from rollstream.producers.episodes.call_sequences import CONSTRAINED
from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.producers.gateway.call_forms import sampling_params
from rollstream.producers.gateway.sessions import CapturedSession
from rollstream.topics.errors import RecordError
from rollstream.topics.records import (
    NO_FLOATS,
    Float32,
    GroupCancelled,
    NamedArray,
    Rollout,
    RolloutMetadata,
    SamplingParams,
    Turn,
)
from rollstream.topics.wire.media import images_in, media_arrays
from rollstream.topics.wire.rl_examples import WEIGHT_VERSION


@dataclass(frozen=True, kw_only=True)
class RolloutForm:
    """Fields that all rollouts of a run share."""

    logprobs_mode: Literal["raw", "processed"]
    temperature: float
    """Temperature of calls that name none."""
    assume_version: int = -1
    """Policy version assumed for tokens whose server names none; -1 refuses them."""


def rollouts_of(session: CapturedSession, form: RolloutForm, policies: PolicyVersions) -> list[Rollout]:
    """Return the rollouts of a session with a reward; `policies` has the learner step of each version.

    Raises RecordError if they cannot be trained on.
    """
    branches = branches_of(session.calls)
    if not branches:
        constrained = any(CONSTRAINED in call.sampling for call in session.calls)
        raise RecordError(
            f"every answer of session {session.name} was constrained in its form, so no token is the policy's own"
            if constrained
            else f"no model call of session {session.name} sampled a token"
        )
    rewards = _rewards_by_call(session)
    reward = sum(rewards.values()) if session.reward is None else session.reward
    return [
        _rollout(session, branch, number, len(branches), rewards, reward, form, policies)
        for number, branch in enumerate(branches)
    ]


def episode_records(
    session: CapturedSession, form: RolloutForm, policies: PolicyVersions
) -> tuple[list[Rollout | GroupCancelled], str]:
    """Return the records to write for a closed session, and the reason if they cancel its episode."""
    assert session.closed is not None
    reason = session.closed.reason
    if not reason:
        try:
            return list(rollouts_of(session, form, policies)), ""
        except RecordError as error:
            reason = str(error)
    return [cancellation_of(session, reason)], reason


def cancellation_of(session: CapturedSession, reason: str) -> GroupCancelled:
    """Return the cancellation of a session's episode."""
    start = session.start
    return GroupCancelled(
        environment=start.environment,
        example_id=start.example_id,
        policy_version=session.policy_version,
        group_size=start.group_size,
        uids=(session.episode,),
        group_id=start.group_id,
        reason=reason,
        metadata=RolloutMetadata(worker_id=start.author, timestamp=start.wall_time),
    )


def rollout_uids(episode: str, branches: int) -> list[str]:
    """Return the uids of an episode's rollouts: its name, followed by the branch number if there are several."""
    return [episode] if branches == 1 else [f"{episode}.{branch}" for branch in range(branches)]


def _rewards_by_call(session: CapturedSession) -> dict[str, float]:
    """Rewards of single calls by uid; a number names the call at this index in the order of the log."""
    calls = distinct(session.calls)
    uids = {call.uid for call in calls}
    rewards: dict[str, float] = {}
    for name, value in session.turn_rewards.items():
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else -1
        uid = calls[number].uid if 0 <= number < len(calls) else name
        if uid not in uids:
            raise RecordError(f"a reward is for call {name[:64]}, which session {session.name} does not have")
        rewards[uid] = value
    return rewards


def _rollout(
    session: CapturedSession,
    branch: Branch,
    number: int,
    branches: int,
    rewards: Mapping[str, float],
    reward: float,
    form: RolloutForm,
    policies: PolicyVersions,
) -> Rollout:
    start = session.start
    versions = np.where(branch.loss_mask & (branch.versions < 0), form.assume_version, branch.versions).astype("<i8")
    sampled = versions[branch.loss_mask]
    if sampled.min() < 0:
        raise RecordError(
            f"{branch.replica_id} does not say which policy version sampled; for a model that never changes set "
            "worker.assume_version"
        )
    images = [image for message in branch.messages for image in images_in(message.get("content"))]
    return Rollout(
        uid=rollout_uids(session.episode, branches)[number],
        group_id=start.group_id,
        group_size=start.group_size,
        environment=start.environment,
        example_id=start.example_id,
        policy_version=session.policy_version,
        lowest_version=int(sampled.min()),
        highest_version=int(sampled.max()),
        episode_uid=session.episode,
        branch=number,
        branches=branches,
        turns=_turns(branch, rewards),
        tokens=branch.tokens,
        loss_mask=branch.loss_mask,
        logprobs=branch.logprobs,
        logprobs_mode=form.logprobs_mode,
        sampling=_sampling(session, branch, form),
        reward=reward,
        reward_components=dict(session.components),
        token_rewards=_token_rewards(branch, rewards),
        truncated=branch.truncated or branch.calls[-1].uid in session.cut_calls,
        token_arrays={WEIGHT_VERSION: NamedArray.of(versions), **media_arrays(images)},
        metadata=RolloutMetadata(
            worker_id=start.author,
            replica_id=branch.replica_id,
            timestamp=branch.turns[-1].timestamp,
            weight_step=policies.step_of(int(sampled.min())),
        ),
        extra={"session": session.name},
    )


def _turns(branch: Branch, rewards: Mapping[str, float]) -> tuple[Turn, ...]:
    by_start = {place.start: rewards.get(place.uid, 0.0) for place in branch.calls if place.trained}
    return tuple(
        replace(turn, reward=by_start.get(turn.start, 0.0)) if turn.role == "assistant" and turn.has_logprobs else turn
        for turn in branch.turns
    )


def _token_rewards(branch: Branch, rewards: Mapping[str, float]) -> Float32:
    """Rewards by token: a call's reward is on the last token of its first answer. Empty if no call has a reward."""
    if not rewards:
        return NO_FLOATS
    values = np.zeros(len(branch.tokens), "<f4")
    for place in branch.calls:
        if place.trained and place.answer == 0:
            values[place.stop - 1] = rewards.get(place.uid, 0.0)
    return values


def _sampling(session: CapturedSession, branch: Branch, form: RolloutForm) -> SamplingParams:
    calls = session.sequences.by_uid
    used = {
        sampling_params(calls[place.uid].call.sampling, form.temperature) for place in branch.calls if place.trained
    }
    if len(used) > 1:
        temperatures = sorted({sampling.temperature for sampling in used})
        raise RecordError(
            f"calls of one sequence were sampled with {len(used)} sets of parameters (temperatures {temperatures}); "
            "a rollout records one: send the same parameters with every call, or set gateway.sampling to run"
        )
    return used.pop()

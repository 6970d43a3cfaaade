"""An episode and its samples become one Rollout: tokens exactly as the servers returned them. Pure.

Nothing is tokenised here. What lies between two replies is known from the later reply's prompt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from producers.environment import Episode, Message, Prompt
from producers.inference.client import Completion
from topics.errors import RecordError
from topics.records import Bool, Float32, InferenceMetadata, Int32, Rollout, RolloutMetadata, SamplingParams, Turn


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a worker stamps on a group when its generation begins."""

    environment: str
    group_id: str
    group_size: int
    policy_version: int
    temperature: float
    logprobs_mode: Literal["raw", "processed"]
    worker_id: str


@dataclass(frozen=True, kw_only=True)
class Sequence1D:
    """The tokens of an episode, shape [T] each."""

    tokens: Int32
    loss_mask: Bool
    logprobs: Float32
    turns: tuple[Turn, ...]


def completions_of(episode: Episode) -> list[Completion]:
    """The replies of an episode. Raises RecordError when it has none, or one that `generate` did not return."""
    replies = [turn for turn in episode.turns if not isinstance(turn, Message)]
    found = [reply for reply in replies if isinstance(reply, Completion)]
    if not found or len(found) != len(replies):
        raise RecordError("an episode must hold at least one reply, each of them as generate returned it")
    return found


def join(episode: Episode) -> Sequence1D:
    """One sequence of all turns.

    The tokens a message covers are those that appear between one reply and the next one's prompt; of several messages
    in a row the last has them all. Raises RecordError when a reply's prompt does not begin with everything before it.
    """
    length = 0
    tokens: list[Int32] = []
    masks: list[Bool] = []
    logprobs: list[Float32] = []
    turns: list[Turn] = []
    for turn in episode.turns:
        if isinstance(turn, Message):
            turns.append(Turn(role=turn.role, text=turn.text, start=length, stop=length))
            continue
        if not isinstance(turn, Completion):
            raise RecordError("an episode holds a reply that generate did not return")
        before = np.concatenate(tokens) if tokens else np.empty(0, np.int32)
        if not np.array_equal(turn.prompt_tokens[:length], before):
            raise RecordError(
                "an episode's context was rewritten between two replies; one rollout holds what grows by appending only"
            )
        fresh = turn.prompt_tokens[length:]
        start = length + len(fresh)
        if turns and turns[-1].role != "assistant":
            said = turns.pop()
            turns.append(Turn(role=said.role, text=said.text, start=length, stop=start))
        length = start + len(turn.tokens)
        tokens += [fresh, turn.tokens]
        masks += [np.zeros(len(fresh), np.bool_), np.ones(len(turn.tokens), np.bool_)]
        logprobs += [np.zeros(len(fresh), np.float32), turn.logprobs]
        turns.append(
            Turn(
                role="assistant",
                text=turn.text,
                start=start,
                stop=length,
                has_logprobs=True,
                timestamp=turn.timestamp,
                inference=InferenceMetadata(
                    model_version=turn.highest_version,
                    sampling_params=turn.sampling_params,
                    inference_time_s=turn.inference_time_s,
                ),
            )
        )
    return Sequence1D(
        tokens=np.concatenate(tokens).astype("<i4"),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs).astype("<f4"),
        turns=tuple(turns),
    )


def rollout_of(
    episode: Episode, prompt: Prompt, stamp: Stamp, *, uid: str, timestamp: float, extra: dict[str, str] | None = None
) -> Rollout:
    """The record of one episode. Raises RecordError as `join` does."""
    completions = completions_of(episode)
    sequence = join(episode)
    return Rollout(
        uid=uid,
        group_id=stamp.group_id,
        group_size=stamp.group_size,
        environment=stamp.environment,
        example_id=prompt.example_id,
        policy_version=stamp.policy_version,
        lowest_version=min(c.lowest_version for c in completions),
        highest_version=max(c.highest_version for c in completions),
        episode_uid=uid,
        turns=sequence.turns,
        tokens=sequence.tokens,
        loss_mask=sequence.loss_mask,
        logprobs=sequence.logprobs,
        logprobs_mode=stamp.logprobs_mode,
        sampling=SamplingParams(temperature=stamp.temperature),
        reward=episode.score.reward,
        reward_components=dict(episode.score.components),
        truncated=episode.truncated,
        metadata=RolloutMetadata(worker_id=stamp.worker_id, replica_id=completions[-1].replica_id, timestamp=timestamp),
        extra=extra or {},
    )


def uids_of(group_id: str, group_size: int) -> Sequence[str]:
    """Names of a group's rollouts: the group's name and the member's index."""
    return [f"{group_id}.{member}" for member in range(group_size)]

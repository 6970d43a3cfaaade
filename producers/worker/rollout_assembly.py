"""Assembles an episode and its samples into one Rollout, with tokens exactly as the servers returned them. Pure.

Nothing is tokenized here, because the prompt tokens of a reply include all tokens since the previous reply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollstream.producers.environments.environment import Episode, Message, Prompt
from rollstream.producers.flow.policy_versions import UNKNOWN
from rollstream.producers.inference.client import Completion
from rollstream.producers.inference.replay_arrays import joined_experts, joined_masks
from rollstream.producers.inference.requests import Filters
from rollstream.producers.worker.sampling import ContextFull
from rollstream.topics.errors import RecordError
from rollstream.topics.records import (
    Bool,
    Float32,
    InferenceMetadata,
    Int32,
    Int64,
    NamedArray,
    Rollout,
    RolloutMetadata,
    SamplingParams,
    Turn,
)
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS, SAMPLING_MASK, SAMPLING_MASK_COUNTS, WEIGHT_VERSION


@dataclass(frozen=True, kw_only=True)
class GroupStamp:
    """Data that a worker stamps on a group when its generation begins."""

    environment: str
    group_id: str
    group_size: int
    policy_version: int
    temperature: float
    logprobs_mode: Literal["raw", "processed"]
    worker_id: str
    filters: Filters = Filters()  # noqa: RUF009
    origin: Mapping[str, str] = field(default_factory=dict)
    """The worker's process, recorded in `extra` of its rollouts under the keys `host` and `process`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeTokens:
    """The tokens of an episode; arrays have shape [T]."""

    tokens: Int32
    loss_mask: Bool
    logprobs: Float32
    versions: Int64
    """Policy version that sampled each token, -1 for tokens that were not sampled."""
    turns: tuple[Turn, ...]


def completions_of(episode: Episode) -> list[Completion]:
    """Return the replies of an episode. Raises RecordError if there is none, or if one is not from `generate`."""
    replies = [turn for turn in episode.turns if not isinstance(turn, Message | ContextFull)]
    completions = [reply for reply in replies if isinstance(reply, Completion)]
    if not completions or len(completions) != len(replies):
        raise RecordError("an episode must hold at least one reply, and only replies that generate returned")
    return completions


def join(episode: Episode) -> EpisodeTokens:
    """Join all turns into one sequence.

    The tokens that a reply's prompt adds to the previous reply belong to the message between the two replies, or to the
    last message if there are several. Raises RecordError if a reply's prompt does not begin with all tokens before it.
    """
    length = 0
    tokens: list[Int32] = []
    masks: list[Bool] = []
    logprobs: list[Float32] = []
    versions: list[Int64] = []
    turns: list[Turn] = []
    for turn in episode.turns:
        if isinstance(turn, Message):
            turns.append(Turn(role=turn.role, text=turn.text, start=length, stop=length))
            continue
        if isinstance(turn, ContextFull):
            continue
        if not isinstance(turn, Completion):
            raise RecordError("an episode holds a reply that generate did not return")
        before = np.concatenate(tokens) if tokens else np.empty(0, np.int32)
        if not np.array_equal(turn.prompt_tokens[:length], before):
            raise RecordError(
                "an episode's context was rewritten between two replies; a rollout needs a context that only grows"
            )
        fresh = turn.prompt_tokens[length:]
        start = length + len(fresh)
        if turns and turns[-1].role != "assistant":
            message = turns.pop()
            turns.append(Turn(role=message.role, text=message.text, start=length, stop=start))
        length = start + len(turn.tokens)
        tokens += [fresh, turn.tokens]
        masks += [np.zeros(len(fresh), np.bool_), np.ones(len(turn.tokens), np.bool_)]
        logprobs += [np.zeros(len(fresh), np.float32), turn.logprobs]
        versions += [np.full(len(fresh), UNKNOWN, np.int64), turn.versions]
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
    return EpisodeTokens(
        tokens=np.concatenate(tokens).astype("<i4"),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs).astype("<f4"),
        versions=np.concatenate(versions).astype("<i8"),
        turns=tuple(turns),
    )


def rollout_of(
    episode: Episode,
    prompt: Prompt,
    stamp: GroupStamp,
    *,
    uid: str,
    extra: Mapping[str, str] | None = None,
) -> Rollout:
    """Return the rollout of one episode. Raises RecordError as `join` does.

    Its timestamp comes from its last reply, and its weight step from the lowest version that sampled it. `token_arrays`
    hold the version of each token, and the experts that computed it if the replies name them.
    """
    completions = completions_of(episode)
    oldest = min(completions, key=lambda completion: completion.lowest_version)
    sequence = join(episode)
    arrays: dict[str, NDArray[Any]] = {WEIGHT_VERSION: sequence.versions}
    starts = [len(completion.prompt_tokens) for completion in completions]
    masks = [completion.mask for completion in completions]
    mask = joined_masks(list(zip(starts, masks, strict=True)), len(sequence.tokens))
    if mask is not None:
        arrays |= {SAMPLING_MASK: mask.tokens, SAMPLING_MASK_COUNTS: mask.counts}
    experts = joined_experts([completion.experts for completion in completions], len(sequence.tokens))
    if experts is not None:
        arrays[ROUTED_EXPERTS] = experts
    return Rollout(
        uid=uid,
        group_id=stamp.group_id,
        group_size=stamp.group_size,
        environment=stamp.environment,
        example_id=prompt.example_id,
        policy_version=stamp.policy_version,
        lowest_version=oldest.lowest_version,
        highest_version=max(c.highest_version for c in completions),
        episode_uid=uid,
        turns=sequence.turns,
        tokens=sequence.tokens,
        loss_mask=sequence.loss_mask,
        logprobs=sequence.logprobs,
        logprobs_mode=stamp.logprobs_mode,
        sampling=SamplingParams(temperature=stamp.temperature, **stamp.filters._asdict()),
        # An environment's numbers may be NumPy's.
        reward=float(episode.score.reward),
        reward_components={name: float(value) for name, value in episode.score.components.items()},
        truncated=episode.truncated
        or completions[-1].truncated
        or any(isinstance(turn, ContextFull) for turn in episode.turns),
        metadata=RolloutMetadata(
            worker_id=stamp.worker_id,
            replica_id=completions[-1].replica_id,
            timestamp=completions[-1].timestamp,
            weight_step=oldest.weight_step,
        ),
        token_arrays={name: NamedArray.of(array) for name, array in arrays.items()},
        extra={**stamp.origin, **(extra or {})},
    )


def uids_of(group_id: str, group_size: int) -> Sequence[str]:
    """Return the uids of a group's rollouts, each made of the group's id and the member's index."""
    return [f"{group_id}.{member}" for member in range(group_size)]

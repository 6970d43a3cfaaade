"""Converts the old form, a RolloutBatch with metadata on the batch, to Rollouts with their own metadata.

Pure. The same batch from the same place gives the same rollouts with the same uids, so that reading a place again
duplicates nothing.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rollstream.topics.errors import RecordError, brief
from rollstream.topics.records import (
    NO_FLOATS,
    Float32,
    OldGroup,
    OldMetadata,
    OldRollout,
    Rollout,
    RolloutBatch,
    RolloutMetadata,
)
from rollstream.topics.wire.validation import NAME_LIMIT, problems

PLACE = "imported_from"
"""Key in a rollout's `extra` of the place it was read from."""
_NAME_ROOM = NAME_LIMIT - 64
_FIELDS = ("env_name", "env_example_id", "prompt_tokens", "response_tokens", "response_logprobs", "episode_reward")


class RefusedRollout(NamedTuple):
    """An invalid rollout of a batch."""

    place: str
    environment: str
    reason: str
    records: int = 1
    """Number of records lost with it, if a part of a file cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Upcast:
    """Result of converting a batch: each of its rollouts is either converted or refused."""

    rollouts: tuple[Rollout, ...]
    refused: tuple[RefusedRollout, ...]


def upcast(batch: RolloutBatch, place: str) -> Upcast:
    """Return the Rollouts of a batch read from `place`, a permanent name such as `file@digest:7`.

    A rollout keeps its own metadata, or else gets the batch's; without both, worker is "", timestamp 0 and step -1.
    Its policy version is the lowest weight step of the valid rollouts of its group, where an unknown step counts as 0.
    Its group size counts the valid rollouts of the same environment and example in the group, so that the group can be
    complete.
    """
    rollouts: list[Rollout] = []
    refused: list[RefusedRollout] = []
    for number, group in enumerate(batch.groups):
        name = f"{_short(place)}.{number}"
        valid = []
        for member, old in enumerate(group.rollouts):
            uid = f"{name}.{member}"
            try:
                valid.append(_rollout(old, _metadata(old, batch), uid, place))
            except RecordError as error:
                refused.append(RefusedRollout(f"{place}, group {number}, rollout {member}", old.env_name, str(error)))
        sizes = Counter((r.environment, r.example_id) for r in valid)
        version = min((r.policy_version for r in valid), default=0)
        rollouts += [
            replace(r, group_id=name, group_size=sizes[r.environment, r.example_id], policy_version=version)
            for r in valid
        ]
    return Upcast(rollouts=tuple(rollouts), refused=tuple(refused))


def batch_of(values: Any) -> RolloutBatch:
    """Return a RolloutBatch from the values of an Avro reader, for any writer's schema whose fields have the old names.

    Arrays may be lists of numbers; metadata may be null or missing.

    Raises RecordError if a field is missing or has another type.
    """
    try:
        groups = tuple(OldGroup(rollouts=tuple(map(_old_of, group["rollouts"]))) for group in values["groups"])
        return RolloutBatch(groups=groups, metadata=_metadata_of(values.get("metadata")))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RecordError(f"not a RolloutBatch: {brief(error)}") from error


def _old_of(values: Mapping[str, Any]) -> OldRollout:
    if missing := [name for name in _FIELDS if values[name] is None]:
        raise ValueError(f"fields are null: {', '.join(missing)}")
    return OldRollout(
        env_name=str(values["env_name"]),
        env_example_id=str(values["env_example_id"]),
        prompt_tokens=_array(values["prompt_tokens"], "<i4"),
        response_tokens=_array(values["response_tokens"], "<i4"),
        response_logprobs=_array(values["response_logprobs"], "<f4"),
        token_rewards=NO_FLOATS if values.get("token_rewards") is None else _array(values["token_rewards"], "<f4"),
        episode_reward=float(values["episode_reward"]),
        metadata=_metadata_of(values.get("metadata")),
    )


def _array(values: Any, dtype: str) -> Any:
    if isinstance(values, bytes):  # from a schema that declares bytes without a dtype
        return np.frombuffer(values, dtype)
    array = np.asarray(values)
    with np.errstate(invalid="ignore", over="ignore"):  # the check below or the rollout's checks find bad values
        converted = array.astype(dtype)
    if np.dtype(dtype).kind == "i" and not np.array_equal(converted, array):
        raise ValueError("token ids are not 32-bit integers")
    return converted


def _metadata_of(values: Any) -> tuple[OldMetadata, ...]:
    if not values:
        return ()
    fields = values[0] if isinstance(values, Sequence) else values
    return (
        OldMetadata(
            worker_id=str(fields["worker_id"]),
            timestamp=float(fields["timestamp"]),
            weight_step=int(fields["weight_step"]),
        ),
    )


def _metadata(old: OldRollout, batch: RolloutBatch) -> OldMetadata:
    return next(iter((*old.metadata, *batch.metadata)), OldMetadata())


def _short(place: str) -> str:
    """Return the place; if it is too long for a uid, return a digest of the place followed by its last characters."""
    if len(place) <= _NAME_ROOM:
        return place
    return f"{hashlib.sha256(place.encode()).hexdigest()[:32]}{place[-_NAME_ROOM // 2 :]}"


def _rollout(old: OldRollout, metadata: OldMetadata, uid: str, place: str) -> Rollout:
    prompt, response = len(old.prompt_tokens), len(old.response_tokens)
    if len(old.response_logprobs) != response:
        raise RecordError(f"response_logprobs has {len(old.response_logprobs)} entries for {response} tokens")
    version = max(0, metadata.weight_step)
    mask = np.zeros(prompt + response, bool)
    mask[prompt:] = True
    rollout = Rollout(
        uid=uid,
        group_size=1,
        environment=old.env_name,
        example_id=old.env_example_id,
        policy_version=version,
        lowest_version=version,
        highest_version=version,
        tokens=np.concatenate([old.prompt_tokens, old.response_tokens]).astype("<i4"),
        loss_mask=mask,
        logprobs=np.concatenate([np.zeros(prompt, "<f4"), old.response_logprobs]).astype("<f4"),
        token_rewards=_token_rewards(old.token_rewards, prompt, response),
        reward=old.episode_reward,
        episode_uid=uid,
        metadata=RolloutMetadata(
            worker_id=metadata.worker_id, timestamp=metadata.timestamp, weight_step=metadata.weight_step
        ),
        extra={PLACE: place},
    )
    if wrong := problems(rollout):
        raise RecordError("; ".join(wrong))
    return rollout


def _token_rewards(rewards: Float32, prompt: int, response: int) -> Float32:
    """Return rewards over all tokens, which are 0 for the prompt."""
    if len(rewards) in (0, prompt + response):
        return rewards
    if len(rewards) != response:
        raise RecordError(f"token_rewards has {len(rewards)} entries for {response} tokens")
    return np.concatenate([np.zeros(prompt, "<f4"), rewards]).astype("<f4")

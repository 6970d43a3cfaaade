"""Rollouts as lists of turns, each with its own tokens, and their conversion to Rollout and back. Pure functions."""

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.topics.errors import RecordError
from rollstream.topics.records import InferenceMetadata, Rollout, RolloutMetadata, Turn

RECORD = "rollstream.record"
"""Key of `Rollout.extra` for what a record says and the fields of a rollout cannot hold, as JSON."""


@dataclass(frozen=True, kw_only=True)
class RecordTurn:
    """One message with its own tokens."""

    message: str
    role: str
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    """Log-probability of each token, if the policy sampled them."""
    reward: float | None = None
    inference_metadata: InferenceMetadata | Mapping[str, Any] = field(default_factory=InferenceMetadata)
    """InferenceMetadata, or a mapping with model_version, sampling_params, inference_time (seconds)."""
    timestamp: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One rollout as a list of turns."""

    environment: str
    example_id: str
    policy_version: int | str
    """A whole number, or a label that ends in one, by which it is ordered: "run7/v10" means 10. Labels that differ
    before their number, except by "v" alone, never share a group."""
    rollout_uid: str
    turns: Sequence[RecordTurn]
    created_ts: float
    metadata: Mapping[str, Any] = field(default_factory=dict)
    replica_id: str = "unknown"

    @property
    def total_reward(self) -> float:
        """Sum of the turns' rewards."""
        return float(sum(turn.reward or 0.0 for turn in self.turns))


def as_rollout(record: RolloutRecord, *, group_size: int = 1) -> Rollout:
    """Convert a record to a Rollout, whose tokens are those of the turns; tokens with log-probabilities are trained on.

    worker_id and weight_step in its metadata become fields; all metadata are also copied to `extra`, as JSON unless
    they are strings. What no field can hold (labels, a missing reward, other inference metadata) is kept in `extra`,
    and `as_record` gives the record back. Numbers and arrays may be NumPy's. Raises RecordError for a version that does
    not end in a number, metadata of the wrong type, or a turn with more or fewer log-probabilities than tokens.
    """
    label, version = _version(record.policy_version)
    turns, length = [], 0
    for number, turn in enumerate(record.turns):
        if turn.logprobs is not None and len(turn.logprobs) != len(turn.tokens):
            raise RecordError(
                f"turn {number} of rollout {record.rollout_uid!r} has {len(turn.logprobs)} log-probabilities for "
                f"{len(turn.tokens)} tokens"
            )
        stop = length + len(turn.tokens)
        turns.append(
            Turn(
                role=turn.role,
                text=turn.message,
                start=length,
                stop=stop,
                reward=float(turn.reward or 0.0),
                has_logprobs=turn.logprobs is not None,
                timestamp=turn.timestamp,
                inference=_inference(turn.inference_metadata),
            )
        )
        length = stop
    fields = record.metadata
    extra = {name: _text(name, value) for name, value in fields.items()}
    if kept := _beyond_fields(record):
        extra[RECORD] = _text(RECORD, kept)
    return Rollout(
        uid=record.rollout_uid,
        group_size=group_size,
        group_id=label.removeprefix("v") and label,
        environment=record.environment,
        example_id=record.example_id,
        policy_version=version,
        lowest_version=version,
        highest_version=version,
        tokens=_joined([turn.tokens for turn in record.turns], "<i4"),
        loss_mask=_joined([[turn.logprobs is not None] * len(turn.tokens) for turn in record.turns], "|b1"),
        logprobs=_joined([_logprobs(turn) for turn in record.turns], "<f4"),
        reward=record.total_reward,
        turns=tuple(turns),
        metadata=RolloutMetadata(
            worker_id=str(fields.get("worker_id", "")),
            replica_id=record.replica_id,
            timestamp=record.created_ts,
            weight_step=_weight_step(fields),
        ),
        extra=extra,
    )


def as_record(rollout: Rollout) -> RolloutRecord:
    """Convert a rollout made by `as_rollout` back to the record, with lists of Python's numbers in place of arrays."""
    kept = json.loads(rollout.extra.get(RECORD, "{}"))
    turns = []
    for number, turn in enumerate(rollout.turns):
        span = slice(turn.start, turn.stop)
        own = {"reward": turn.reward, "inference_metadata": turn.inference} | kept.get("turns", {}).get(str(number), {})
        turns.append(
            RecordTurn(
                message=turn.text,
                role=turn.role,
                tokens=rollout.tokens[span].tolist(),
                logprobs=rollout.logprobs[span].tolist() if turn.has_logprobs else None,
                timestamp=turn.timestamp,
                **own,
            )
        )
    extra = {name: value for name, value in rollout.extra.items() if name != RECORD}
    return RolloutRecord(
        environment=rollout.environment,
        example_id=rollout.example_id,
        policy_version=kept.get("policy_version", rollout.policy_version),
        rollout_uid=rollout.uid,
        turns=turns,
        created_ts=rollout.metadata.timestamp,
        metadata=extra | kept.get("metadata", {}),
        replica_id=rollout.metadata.replica_id,
    )


def _beyond_fields(record: RolloutRecord) -> dict[str, Any]:
    """What the fields of a rollout cannot hold."""
    turns: dict[str, Any] = {}
    for number, turn in enumerate(record.turns):
        own: dict[str, Any] = {} if turn.reward is not None else {"reward": None}
        if not isinstance(turn.inference_metadata, InferenceMetadata):
            own["inference_metadata"] = turn.inference_metadata
        if own:
            turns[str(number)] = own
    kept: dict[str, Any] = {
        "policy_version": record.policy_version if isinstance(record.policy_version, str) else None,
        "metadata": {name: value for name, value in record.metadata.items() if not isinstance(value, str)},
        "turns": turns,
    }
    return {name: value for name, value in kept.items() if value}


def _version(version: int | str) -> tuple[str, int]:
    """Return the label before the number of a version, and the number."""
    if not isinstance(version, str):
        try:
            return "", operator.index(version)
        except TypeError as error:
            raise RecordError(f"policy version {version!r} is neither a whole number nor a text") from error
    match = re.fullmatch(r"(.*?)(\d+)", version, re.ASCII | re.DOTALL)
    if match is None:
        raise RecordError(
            f"policy version {version!r} does not end in a number; add one, so that versions can be compared"
        )
    return match[1], int(match[2])


def _weight_step(fields: Mapping[str, Any]) -> int:
    step = fields.get("weight_step", -1)
    try:
        return int(step)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"metadata 'weight_step' is {step!r}, which is not a whole number") from error


def _text(name: str, value: Any) -> str:
    """Return metadata as text: a string as it is, anything else as JSON."""
    try:
        return value if isinstance(value, str) else json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"metadata {name!r} cannot be written as JSON ({error}); make it a text") from error


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy as JSON has it. Raises TypeError for anything else."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _logprobs(turn: RecordTurn) -> Sequence[float]:
    return [0.0] * len(turn.tokens) if turn.logprobs is None else turn.logprobs


def _inference(fields: InferenceMetadata | Mapping[str, Any]) -> InferenceMetadata:
    if isinstance(fields, InferenceMetadata):
        return fields
    try:
        return InferenceMetadata(
            model_version=_version(fields.get("model_version", -1))[1],
            sampling_params={name: str(value) for name, value in (fields.get("sampling_params") or {}).items()},
            inference_time_s=float(fields.get("inference_time", 0.0)),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise RecordError(f"inference metadata {fields!r} has a value of the wrong type ({error})") from error


def _joined(parts: Sequence[Sequence[Any]], dtype: str) -> Any:
    return np.array([value for part in parts for value in part], dtype)

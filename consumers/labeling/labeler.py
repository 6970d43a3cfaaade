"""Labeling of one record: it becomes a record of `trajectories` or `rollouts`, nothing, or a dead letter.

This is a pure function if the labeler is pure. The labeler should be, because after a crash it gets the same record
again.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rollstream.consumers.grouping.core.groups import episode_of
from rollstream.consumers.transactions import Refused
from rollstream.topics.errors import ConfigurationError, RecordError, RecordTooLarge
from rollstream.topics.records import GroupCancelled, Rollout, RolloutMetadata, TrajectoryRecord
from rollstream.topics.user_code import load_object
from rollstream.topics.wire.codec import decode, encode, kind_of
from rollstream.topics.wire.signatures import ROLLOUT, Signer, is_signed_by, signed_or_plain
from rollstream.topics.wire.trajectory_arrays import Trajectory, from_record, to_record
from rollstream.topics.wire.validation import cancellation_problems, problems, untyped_problems


@dataclass(frozen=True, kw_only=True)
class RolloutLabel:
    """The reward of a rollout. Any object with these attributes will do, such as an environment's Score."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


Labeler = Callable[[Any], Any]
"""Gets a Trajectory and returns it with its rewards, or with any other array that it lacks; or gets a Rollout and
returns its RolloutLabel or its reward; numbers may be NumPy's. If it returns None, the record is left out. An
asynchronous labeler gets several records at once. Arrays are read-only. An object whose method `longest_s` returns the
longest time in seconds for a number of records may take more than five minutes for those of a poll.

A record for which it raises RecordError becomes a dead letter. Any other error ends the process before anything is
written for the record, so that a repaired labeler gets the record again.
"""


class UnlabeledRecord(NamedTuple):
    """One record of `unlabelled`."""

    topic: str
    """Full name of the topic."""
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class LabeledRecord(NamedTuple):
    """A record for `trajectories` or `rollouts`, with the offset of its source in `unlabelled`."""

    offset: int
    key: bytes | None
    value: bytes
    topic: str = "trajectories"


class LabelOutcome(NamedTuple):
    """Outcome of one record: labeled, refused, or neither if the labeler left it out."""

    result: LabeledRecord | Refused | None
    cancellation: bytes | None = None
    """Record for `rollouts` that cancels the episode of a member without a reward, so that the group can still seal."""


async def label(
    labeler: Labeler,
    record: UnlabeledRecord,
    limit_bytes: int,
    signer: Signer | None = None,
    source_keys: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> LabelOutcome:
    """Label one record. Key and value have at most `limit_bytes`; rollouts and cancellations are signed by `signer`.

    A rollout of an environment in `source_keys` is refused, without a cancellation, unless one of the keys signed it:
    the labeler's own signature would vouch for it. Raises ConfigurationError if the labeler returns anything but a
    label of the record that it got, and any error of the labeler except RecordError.
    """
    member: Rollout | None = None
    try:
        kind = kind_of(record.value)
        if kind not in (None, "Rollout", "TrajectoryRecord"):
            # Not decoded, because records of other types may take much more memory.
            raise RecordError(f"it is a {kind}, neither a trajectory nor a rollout")
        given = decode(record.value)
        if isinstance(given, Rollout):
            keys = source_keys.get(given.environment)
            if keys and not is_signed_by(record.value or b"", ROLLOUT, keys):
                raise RecordError(f"no key of environment {given.environment} in grouping.environment_keys signed it")
            member = given
            if wrong := problems(replace(given, reward=0.0)):
                raise RecordError("; ".join(wrong))
            answer = await _answer(labeler, given)
            labeled: Rollout | TrajectoryRecord | None = None if answer is None else _with_label(given, answer)
        elif isinstance(given, TrajectoryRecord):
            trajectory = from_record(given)
            answer = await _answer(labeler, trajectory)
            if answer is not None:
                _check_same(trajectory, answer)
            labeled = None if answer is None else to_record(answer)
        else:
            raise RecordError(f"it is a {type(given).__name__}, neither a trajectory nor a rollout")
        if labeled is None:
            return LabelOutcome(None, _cancellation(member, "the labeler left it out", signer))
        value = encode(labeled) if member is None else signed_or_plain(labeled, signer, ROLLOUT)
        size = len(record.key or b"") + len(value)
        if size > limit_bytes:
            raise RecordTooLarge(
                f"it has {size} bytes with its label, but a record may have {limit_bytes}; make it shorter, or raise "
                "kafka.max_record_bytes"
            )
        topic = "rollouts" if member is not None else "trajectories"
        return LabelOutcome(LabeledRecord(record.offset, record.key, value, topic))
    except RecordError as error:
        # A user's labeler may quote a text that was cut within a character.
        reason = str(error).encode("utf-8", "replace").decode()
        refused = Refused(record.topic, record.partition, record.offset, record.key, record.value, reason)
        return LabelOutcome(refused, _cancellation(member, f"it was not labeled: {reason}", signer))


async def _answer(labeler: Labeler, given: Rollout | Trajectory) -> Any:
    answer = labeler(given)
    return await answer if inspect.isawaitable(answer) else answer


def finish(coroutine: Coroutine[Any, Any, LabelOutcome]) -> LabelOutcome:
    """Return the outcome of a labeler that is not a coroutine function.

    No event loop is used, because the labeler may run one itself.
    """
    try:
        coroutine.send(None)
    except StopIteration as stopped:
        outcome: LabelOutcome = stopped.value
        return outcome
    coroutine.close()
    raise ConfigurationError("the labeler returned a coroutine that waits; make it a function declared with async def")


def is_asynchronous(labeler: Labeler) -> bool:
    """Whether the labeler is a coroutine function, or an object whose `__call__` is a coroutine function."""
    return inspect.iscoroutinefunction(labeler) or inspect.iscoroutinefunction(getattr(labeler, "__call__", None))  # noqa: B004


def longest_s(labeler: Labeler, records: int) -> float:
    """Return the longest time in seconds that a labeler says it takes for so many records; 0 if it does not say."""
    method = getattr(labeler, "longest_s", None)
    return 0.0 if method is None else float(method(records))


def _with_label(rollout: Rollout, label: Any) -> Rollout:
    """Return the rollout with its reward. Raises RecordError for a reward that is not finite; it never becomes 0."""
    reward, components = getattr(label, "reward", label), getattr(label, "components", {})
    if not isinstance(components, Mapping):
        raise ConfigurationError(
            f"the labeler returned components {components!r} for rollout {rollout.uid!r}; return a mapping of names to "
            "numbers, or leave them out"
        )
    labeled = replace(
        rollout,
        reward=_finite("reward", reward, rollout),
        reward_components={
            **rollout.reward_components,
            **{name: _finite(name, value, rollout) for name, value in components.items()},
        },
    )
    if wrong := untyped_problems(labeled):
        raise RecordError("; ".join(wrong))
    return labeled


def _finite(name: str, value: Any, rollout: Rollout) -> float:
    """Return a number of a label, which may be NumPy's. Raises RecordError if it is not finite, ConfigurationError for
    anything else."""
    number = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
    # Scalars of NumPy are numbers.Real, except its bools.
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ConfigurationError(
            f"the labeler returned {name} {value!r} for rollout {rollout.uid!r}; return a RolloutLabel or a number"
        )
    try:
        finite = float(number)
    except OverflowError:
        finite = math.inf
    if not math.isfinite(finite):
        raise RecordError(f"the labeler gave {name} {finite}, which is not a finite number")
    return finite


def _cancellation(rollout: Rollout | None, reason: str, signer: Signer | None) -> bytes | None:
    """Return the cancellation of a member's whole episode; None for a trajectory, which has no group."""
    if rollout is None:
        return None
    cancelled = GroupCancelled(
        environment=rollout.environment,
        example_id=rollout.example_id,
        policy_version=rollout.policy_version,
        group_size=rollout.group_size,
        uids=(episode_of(rollout),),
        group_id=rollout.group_id,
        reason=reason[:500],
        metadata=RolloutMetadata(worker_id=rollout.metadata.worker_id, timestamp=rollout.metadata.timestamp),
    )
    return None if cancellation_problems(cancelled) else signed_or_plain(cancelled, signer, ROLLOUT)


def labeler_of(name: str) -> Labeler:
    """Import the function with this name (topics.user_code). Raises ConfigurationError if there is none."""
    labeler = load_object(name, "the labeler is", "a labeler is named package.module:function")
    if not callable(labeler):
        raise ConfigurationError(f"the labeler is {name!r}, which is not a function")
    return labeler  # type: ignore[no-any-return]


def _check_same(given: Trajectory, labeled: Trajectory) -> None:
    """Raise ConfigurationError if the labeler changed a field on which the record's partition or readers depend."""
    for name in ("uid", "environment"):
        if getattr(given, name) != getattr(labeled, name):
            raise ConfigurationError(
                f"the labeler returned trajectory {labeled.uid!r} of {labeled.environment!r} for {given.uid!r} of "
                f"{given.environment!r}; change arrays only, with dataclasses.replace(trajectory, arrays=...)"
            )
    if given.metadata.worker_id != labeled.metadata.worker_id:
        raise ConfigurationError(f"the labeler changed the worker of trajectory {given.uid!r}; leave metadata as it is")

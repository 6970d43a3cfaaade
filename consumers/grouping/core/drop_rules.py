"""Rules for dropping records and groups: pure functions that return a Rejection, or None if nothing is dropped.

The fold applies them when a record arrives, when a group seals, when a deadline passes, and to sealed groups when a
clock moves.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from rollstream.consumers.grouping.config import GroupingConfig, milliseconds
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.estimators import Estimator, Outcomes
from rollstream.consumers.grouping.core.groups import DeadlineKind, Group
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.core.rollout_reader import read_again, read_rollouts
from rollstream.topics.records import GroupCancelled, Mark, Rollout
from rollstream.topics.records.fates import exclusion_detail
from rollstream.topics.wire import codec
from rollstream.topics.wire.keys import encode_key, partition_of
from rollstream.topics.wire.rl_examples import SAMPLING_MASK
from rollstream.topics.wire.signatures import ROLLOUT, is_signed_by
from rollstream.topics.wire.validation import cancellation_problems, is_masked, problems


class Rejection(NamedTuple):
    """Why a record or a group is dropped."""

    reason: str
    """One of DROP_REASONS, or a reason that a batch maker gave."""
    detail: str
    """Human-readable explanation."""


class Clocks(NamedTuple):
    """Stream time, policy clock and configuration that are in force when a record is read."""

    stream_time_ms: int
    policy_version: int
    config: GroupingConfig


_KINDS = frozenset(cls.__name__ for cls in (Rollout, GroupCancelled, Mark))
_key_of = lru_cache(maxsize=8192)(encode_key)


def foreign_rejection(record: InputRecord) -> Rejection | None:
    """Reject a record of a kind that does not belong in rollouts, without decoding it: another kind may take hundreds
    of times the record's bytes of memory."""
    kind = codec.kind_of(record.value)
    if kind is None or kind in _KINDS:
        return None
    return Rejection("invalid", f"a {kind} does not belong in rollouts")


class Content(NamedTuple):
    """Content of a record."""

    value: HeldRollout | GroupCancelled | Mark
    problems: Sequence[str] = ()
    """Everything wrong with it; a mark has other checks."""


def content_of(record: InputRecord, reward: float | None = None, *, replaying: bool) -> Content:
    """Read a record; `reward` replaces the reward of a rollout. Raises RecordError if it cannot be decoded.

    An error of a check is a mistake in the check: it ends the task, because a record that it rejected would be lost in
    silence.
    """
    if reward is None:
        if replaying:
            rollout = read_again(record.value)
        else:
            rollout = record.rollout or read_rollouts([record.value])[0]
        if rollout is not None:
            return Content(rollout)
    value = codec.decode(record.value)
    if isinstance(value, Rollout):
        # The signature is checked against the bytes of the record, which stay unchanged.
        value = value if reward is None else replace(value, reward=reward)
        return Content(HeldRollout.of(value), problems(value))
    return Content(value, cancellation_problems(value) if isinstance(value, GroupCancelled) else ())


def value_rejection(
    record: InputRecord,
    content: Content,
    partition: int,
    partitions: int,
    config: GroupingConfig,
    *,
    replaying: bool,
) -> Rejection | None:
    """Reject a record that cannot be grouped, whatever the state of its group: by its content, key, partition,
    signature, sampling and bounds. Marks are never rejected here.

    Raises StateRefused if this process cannot check a signature that other processes can check.
    """
    value, faults = content
    if isinstance(value, Mark):
        return None
    if replaying and isinstance(value, HeldRollout):
        return None  # It passed these checks when it was first read.
    if faults:
        return Rejection("invalid", "; ".join(faults))
    key = _key_of(value.environment, value.example_id)
    if record.key != key:
        return Rejection("invalid", f"its key is {(record.key or b'')[:200]!r}, its content belongs under {key!r}")
    home = partition_of(key, partitions)
    if home != partition:
        return Rejection("wrong_partition", f"its key belongs on partition {home}")
    if (keys := config.keys_by_environment.get(value.environment)) and not is_signed_by(
        record.value or b"", ROLLOUT, keys
    ):
        return Rejection("invalid", f"no key of environment {value.environment} in grouping.environment_keys signed it")
    if (
        isinstance(value, HeldRollout)
        and value.filtered
        and not config.allow_filtered_sampling
        and not is_masked(value.loss_mask, value.logprobs_mode, value.token_arrays)
    ):
        return Rejection(
            "invalid",
            f"sampled with {value.sampling}; logprobs of filtered sampling cannot be trained on without a "
            f"{SAMPLING_MASK} (grouping.allow_filtered_sampling permits it)",
        )
    if isinstance(value, HeldRollout) and (excess := config.bounds_of(value.environment).excess(value)):
        return Rejection("invalid", excess)
    return None


def sealed_rejection(group: Group, clocks: Clocks) -> Rejection | None:
    """Reject a sealed group for what may change after sealing: exclusions, staleness, age and the batch size limit."""
    stream_time_ms, policy_version, config = clocks
    if group.key.environment in config.exclude_environments:
        return Rejection("excluded", exclusion_detail("environment", group.key.environment))
    if config.exclude_workers:
        for member in group.members.values():
            if member.rollout.worker_id in config.exclude_workers:
                return Rejection("excluded", exclusion_detail("worker", member.rollout.worker_id))
    if config.exclude_offsets:
        for member in group.members.values():
            if config.excludes_offset(member.source.partition, member.source.offset):
                return Rejection("excluded", exclusion_detail("offset", member.source.offset))
    lag = policy_version - group.lowest_version
    if 0 <= config.max_policy_lag < lag:
        return Rejection("stale_version", f"sampled {lag} versions before {policy_version}")
    age_ms = stream_time_ms - group.opened_ms
    if config.max_age_s >= 0 and age_ms > milliseconds(config.max_age_s):
        return Rejection("too_old", f"opened {age_ms / 1000:g} s of stream time ago")
    if group.batch_bytes > config.batch_bytes:
        return Rejection(
            "too_large", f"it takes {group.batch_bytes} bytes, grouping.batch_bytes is {config.batch_bytes}"
        )
    return None


def content_rejection(
    group: Group, outcomes: Outcomes, config: GroupingConfig, estimator: Estimator
) -> Rejection | None:
    """Reject a sealed group by its episodes and their rewards, which no longer change."""
    if group.complete_episodes < config.min_group_size:
        return Rejection("group_too_small", f"{group.complete_episodes} of {config.min_group_size} members")
    rewards = outcomes.rewards
    keeps = config.keep_zero_variance or estimator.keeps_equal_rewards
    if max(rewards) == min(rewards) and not keeps:
        return Rejection("zero_variance", f"every reward is {rewards[0]:g}")
    return None


def deadline_rejection(kind: DeadlineKind, group: Group, clocks: Clocks) -> Rejection | None:
    """Reject a group whose deadline has passed. An open group with enough members is not rejected: it seals."""
    if kind is DeadlineKind.OPEN:
        least = clocks.config.min_group_size or group.expected
        if group.complete_episodes >= least:
            return None
        return Rejection("group_too_small", f"{group.complete_episodes} of {least} members at the deadline")
    if kind is DeadlineKind.FUTURE:
        return Rejection("future_version", f"the policy clock stayed at {clocks.policy_version} until the deadline")
    # The age limit may have been raised since the deadline was set.
    return sealed_rejection(group, clocks)


def superseded_by(version: int, *, before: bool = False) -> Rejection:
    """Return the rejection of a group because a newer version of its example seals now or, if `before`, has sealed."""
    return Rejection("superseded_version", f"version {version} of it sealed{' before' if before else ''}")

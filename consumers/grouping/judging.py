"""Why a record or a group must go: pure rules, each answering with a drop reason and a detail for people, or None.

The fold asks when a record comes, when a group seals, and again for sealed groups when a clock moves.
"""

from functools import lru_cache
from typing import NamedTuple

from consumers.grouping.changes import Record
from consumers.grouping.config import GroupingConfig, milliseconds
from consumers.grouping.estimators import Outcomes
from consumers.grouping.groups import Group
from topics.keys import encode_key, partition_of
from topics.records import GroupCancelled, Rollout
from topics.validation import cancellation_problems, problems


class Verdict(NamedTuple):
    """Why something is dropped."""

    reason: str
    """One of changes.DROP_REASONS."""
    detail: str


class Clocks(NamedTuple):
    """What a fold goes by besides the record it reads."""

    stream_time_ms: int
    policy_version: int
    config: GroupingConfig


_key_of = lru_cache(maxsize=8192)(encode_key)


def judge_record(
    record: Record, value: Rollout | GroupCancelled, partition: int, partitions: int, config: GroupingConfig
) -> Verdict | None:
    """A rollout or cancellation by itself: sense, key, partition, sampling, and since core version 3 bounds."""
    bounded = config.core_version >= 3
    if isinstance(value, Rollout):
        found = problems(value, bounded=bounded)
    else:
        found = cancellation_problems(value, bounded=bounded)
    if found:
        return Verdict("invalid", "; ".join(found))
    key = _key_of(value.environment, value.example_id)
    if record.key != key:
        return Verdict("invalid", f"its key is {(record.key or b'')[:200]!r}, its content belongs under {key!r}")
    home = partition_of(key, partitions)
    if home != partition:
        return Verdict("wrong_partition", f"its key belongs on partition {home}")
    if isinstance(value, Rollout) and value.sampling.filtered and not config.allow_filtered_sampling:
        return Verdict(
            "invalid",
            f"sampled with {value.sampling}; logprobs of filtered sampling cannot be trained on "
            f"(grouping.allow_filtered_sampling permits it)",
        )
    if bounded and isinstance(value, Rollout) and (excess := config.bounds_of(value.environment).excess(value)):
        return Verdict("invalid", excess)
    return None


def exclusion_detail(what: str, name: str | int) -> str:
    """What is said of a group that is dropped for an environment, a worker or an offset; the journal clips it."""
    return f"{what} {name} is excluded"


def judge_sealed(group: Group, clocks: Clocks) -> Verdict | None:
    """A sealed group by what can change after sealing: exclusion, staleness, age, room in a batch."""
    stream_time_ms, policy_version, config = clocks
    if group.key.environment in config.exclude_environments:
        return Verdict("excluded", exclusion_detail("environment", group.key.environment))
    if config.exclude_workers:
        for member in group.members.values():
            if member.rollout.metadata.worker_id in config.exclude_workers:
                return Verdict("excluded", exclusion_detail("worker", member.rollout.metadata.worker_id))
    if config.exclude_offsets:
        for member in group.members.values():
            if config.excludes_offset(member.source.partition, member.source.offset):
                return Verdict("excluded", exclusion_detail("offset", member.source.offset))
    lag = policy_version - group.lowest_version
    if 0 <= config.max_policy_lag < lag:
        return Verdict("stale_version", f"sampled {lag} versions before {policy_version}")
    age_ms = stream_time_ms - group.opened_ms
    if config.max_age_s >= 0 and age_ms > milliseconds(config.max_age_s):
        return Verdict("too_old", f"opened {age_ms / 1000:g} s of stream time ago")
    if group.batch_bytes > config.batch_bytes:
        return Verdict("too_large", f"it takes {group.batch_bytes} bytes, grouping.batch_bytes is {config.batch_bytes}")
    return None


def judge_content(group: Group, outcomes: Outcomes, config: GroupingConfig) -> Verdict | None:
    """A sealed group by what it holds and what its episodes came to, which no longer changes."""
    if group.complete_episodes < config.min_group_size:
        return Verdict("group_too_small", f"{group.complete_episodes} of {config.min_group_size} members")
    rewards = outcomes.rewards
    if max(rewards) == min(rewards):
        return Verdict("zero_variance", f"every reward is {rewards[0]:g}")
    return None

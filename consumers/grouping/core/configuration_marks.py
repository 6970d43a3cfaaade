"""Rules that decide which marks a task obeys, the same in every process whatever its settings.

A configuration that no code can run is an invalid record. A configuration that other code might run but this code
cannot stops the task, because a task that ignored it would cut different batches than the other code does.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from rollstream.consumers.grouping.config import (
    GENERATION_STEP,
    ForeignConfiguration,
    GroupingConfig,
    largest_batch_bytes,
)
from rollstream.consumers.grouping.core.effects import CORE_VERSION, InputRecord
from rollstream.consumers.grouping.core.estimators import estimator, is_user_estimator
from rollstream.consumers.grouping.core.plug_ins import BUILT_IN, PlugIns, batch_maker, is_user_maker
from rollstream.consumers.grouping.makers.batch_maker import MakerContext
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Mark
from rollstream.topics.wire.signatures import is_signed_by, mark_context

VERSION_STEP = 2**20
"""Maximum number of versions by which one mark moves the policy clock. A task that is further behind writes several
marks."""

CORE_STEP = 8
"""Maximum number by which a mark may raise the core version. A mark that raises it further is invalid in every release,
even in a release that knows the version."""

BATCH_BYTES_LIMIT = largest_batch_bytes(2**31 - 1)
"""Largest grouping.batch_bytes that a Kafka record can hold."""

DRAIN_AGE_S = 600
"""Maximum difference in seconds between the time in a signed drain mark and its append time. Without this limit,
somebody else could append an old mark again, which would cut batches early. Repeating other marks changes nothing."""

Change = Callable[[GroupingConfig], GroupingConfig]
"""Alters the configurations of a log, for a replay under other settings."""


def check_names(config: GroupingConfig, plug_ins: PlugIns = BUILT_IN) -> None:
    """Raise ConfigurationError unless the estimators and the maker of a configuration exist."""
    for name in config.estimator_names:
        estimator(name, plug_ins.estimators)
    context = MakerContext(partition=0, seed=config.seed, batch_bytes=config.batch_bytes)
    batch_maker(config.maker, context, plug_ins.makers)


class MarkOutcome(NamedTuple):
    """Effect of a mark on a task."""

    config: GroupingConfig | None = None
    """Configuration to put in force, if any."""
    problem: str = ""
    """Why the mark is an invalid record without effect; empty if it is valid."""


def mark_outcome(
    record: InputRecord,
    mark: Mark,
    partition: int,
    current: GroupingConfig,
    policy_version: int,
    plug_ins: PlugIns,
    change: Change | None = None,
) -> MarkOutcome:
    """Return the effect of a mark under the configuration and the policy version in force where it is read.

    `mark` is the content of `record`. `change` alters the configuration that the mark carries. Raises StateRefused if
    only other code can run that configuration, because newer code wrote it or because it names a user's maker or
    estimator that this process does not know. Also raises StateRefused if this process cannot check the signature.
    """
    if current.mark_keys and (problem := _forgery(record, mark, partition, current)):
        return MarkOutcome(problem=problem)
    return content_outcome(mark, current, policy_version, plug_ins, change)


def _forgery(record: InputRecord, mark: Mark, partition: int, current: GroupingConfig) -> str:
    """Return why a mark is rejected when marks must be signed; "" if it is accepted."""
    if mark.kind == "deadline" and mark.policy_version < 0:
        return ""  # Such a mark only moves stream time, as every record does.
    if not is_signed_by(record.value or b"", mark_context(partition), current.mark_keys):
        return f"a mark of kind {mark.kind} that no key of grouping.mark_keys signed for this partition"
    age_s = record.timestamp_ms / 1000 - mark.wall_time
    if mark.kind == "drain" and not abs(age_s) <= DRAIN_AGE_S:
        return f"a drain mark made {age_s:.0f} s before it was appended, and {DRAIN_AGE_S} s are allowed; drain again"
    return ""


def content_outcome(
    mark: Mark,
    current: GroupingConfig,
    policy_version: int,
    plug_ins: PlugIns,
    change: Change | None = None,
) -> MarkOutcome:
    """Return the effect of a mark as `mark_outcome` does, but without a check of its signature."""
    if mark.policy_version - max(policy_version, 0) > VERSION_STEP:
        clock = f"the policy clock is at {policy_version}, and a mark moves it {VERSION_STEP} versions at most"
        return MarkOutcome(problem=f"a mark of policy version {mark.policy_version}: {clock}")
    if mark.kind != "configuration" or mark.generation <= current.generation:
        return MarkOutcome()
    try:
        return MarkOutcome(_configuration(mark, current, plug_ins, change))
    except ConfigurationError as error:
        # No task can have run this configuration, because tasks check the configurations that they write.
        return MarkOutcome(problem=f"a mark of generation {mark.generation}: {error}")


def _check_extent(config: GroupingConfig) -> None:
    if config.batch_bytes > BATCH_BYTES_LIMIT:
        raise ConfigurationError(f"grouping.batch_bytes {config.batch_bytes} is more than a Kafka record can hold")
    for name, value in vars(config).items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigurationError(f"grouping.{name} does not fit into 64 bits")


def _configuration(mark: Mark, current: GroupingConfig, plug_ins: PlugIns, change: Change | None) -> GroupingConfig:
    """Return the configuration of a mark.

    Raises ConfigurationError if no code can run it, and StateRefused if only other code can.
    """
    if mark.generation - current.generation > GENERATION_STEP:
        raise ConfigurationError(
            f"grouping.generation is {current.generation}, and may rise by at most {GENERATION_STEP} at once"
        )
    try:
        config = GroupingConfig.from_json(mark.configuration)
    except ForeignConfiguration as newer:
        if CORE_VERSION < newer.core_version <= current.core_version + CORE_STEP:
            raise
        raise ConfigurationError(
            f"core version {newer.core_version} is beyond {current.core_version + CORE_STEP}"
            if newer.core_version > CORE_VERSION
            else f"core version {newer.core_version} has no such keys"
        ) from newer
    if change is not None:
        with suppress(ConfigurationError):
            config = change(config)
    if config.generation != mark.generation:
        raise ConfigurationError(f"its configuration is of generation {config.generation}")
    _check_extent(config)
    _check_known(config, plug_ins)
    check_names(config, plug_ins)
    return config


def _check_known(config: GroupingConfig, plug_ins: PlugIns) -> None:
    """Raise ForeignConfiguration if a configuration names users' code that this process did not import."""
    foreign = {
        "maker": config.maker if is_user_maker(config.maker) and config.maker not in plug_ins.makers else "",
        "estimator": next(
            (n for n in config.estimator_names if is_user_estimator(n) and n not in plug_ins.estimators), ""
        ),
    }
    for key, name in foreign.items():
        if name:
            raise ForeignConfiguration(
                f"the log puts generation {config.generation} in force, with grouping.{key} {name!r}, "
                f"which this process does not know: name it in grouper.{key}s of every grouping process",
                config.core_version,
            )

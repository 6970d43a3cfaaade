"""Rules for marks: which ones a task obeys, alike in every process whatever its release or settings.

A configuration that no code can run is an invalid record. A configuration that other code might run and this code
cannot stops the task: ignoring it would cut other batches than that code does.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rollstream.consumers.grouping.config import (
    GENERATION_STEP,
    KEYS_SINCE,
    ForeignConfiguration,
    GroupingConfig,
    largest_batch_bytes,
)
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.core.estimators import estimator
from rollstream.consumers.grouping.makers.batch_maker import MakerContext
from rollstream.consumers.grouping.makers.registry import MAKERS, MakerFactory, batch_maker, is_user_maker
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records import Mark

SINCE = {"opo": 2, "reinforce_pp": 2, "reservoir": 2}
"""Core version that introduced an estimator or maker, if it was not the first; makers of users came with version 2."""

VERSION_STEP = 2**20
"""Most policy versions by which one mark moves the clock. A task that is further behind writes several marks."""

CORE_STEP = 8
"""Most core versions by which a mark may rise: a higher one is invalid to every release, whether it knows it or not."""

BATCH_BYTES_LIMIT = largest_batch_bytes(2**31 - 1)
"""Largest grouping.batch_bytes that a Kafka record can hold."""

_DEFAULT = GroupingConfig()


def check_names(config: GroupingConfig, makers: Mapping[str, MakerFactory] = MAKERS) -> None:
    """Raise ConfigurationError unless the estimator and the maker of a configuration exist in its core version."""
    estimator(config.estimator)
    batch_maker(config.maker, MakerContext(partition=0, seed=config.seed, batch_bytes=config.batch_bytes), makers)
    for key, name in (("estimator", config.estimator), ("maker", config.maker)):
        since = 2 if is_user_maker(name) else SINCE.get(name, 1)
        if since > config.core_version:
            raise ConfigurationError(
                f"grouping.{key} is {name!r}, which came with core version {since}, and grouping.core_version is "
                f"{config.core_version}; raise it"
            )
    # Code of version 1 ignores keys that it does not know; later code stops at them.
    if config.exclude_offsets and config.core_version < 2:
        raise ConfigurationError(
            "grouping.exclude_offsets came with core version 2, and grouping.core_version is 1; raise it"
        )
    for since, names in KEYS_SINCE.items():
        for name in names if config.core_version < since else ():
            if getattr(config, name) != getattr(_DEFAULT, name):
                raise ConfigurationError(
                    f"grouping.{name} came with core version {since}, and grouping.core_version is "
                    f"{config.core_version}; raise it"
                )


class MarkOutcome(NamedTuple):
    """Effect of a mark on a task."""

    config: GroupingConfig | None = None
    """Configuration to put in force, if any."""
    problem: str = ""
    """Why the mark is an invalid record and does nothing, since core version 3. Earlier versions ignore invalid
    configurations in silence, and their clock goes wherever a mark says."""


def mark_outcome(
    mark: Mark, current: GroupingConfig, policy_version: int, makers: Mapping[str, MakerFactory]
) -> MarkOutcome:
    """Return the effect of a mark under the configuration and the policy version in force where it is read.

    Raises StateRefused if only other code may run its configuration: it is of newer code, or it names a user's maker
    that this process does not know.
    """
    if current.core_version >= 3 and mark.policy_version - max(policy_version, 0) > VERSION_STEP:
        clock = f"the policy clock is at {policy_version}, and a mark moves it {VERSION_STEP} versions at most"
        return MarkOutcome(problem=f"a mark of policy version {mark.policy_version}: {clock}")
    if mark.kind != "configuration" or mark.generation <= current.generation:
        return MarkOutcome()
    try:
        return MarkOutcome(_configuration(mark, current, makers))
    except (StateRefused, MemoryError):
        raise
    except Exception as error:
        # No task can have run it: tasks check the configurations that they write.
        if current.core_version >= 3:
            why = error if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
            return MarkOutcome(problem=f"a mark of generation {mark.generation}: {why}")
        if isinstance(error, ConfigurationError):
            return MarkOutcome()
        raise


def _check_extent(config: GroupingConfig, current: GroupingConfig) -> None:
    if config.core_version > current.core_version + CORE_STEP:
        raise ConfigurationError(f"core version {config.core_version} is beyond {current.core_version + CORE_STEP}")
    if config.batch_bytes > BATCH_BYTES_LIMIT:
        raise ConfigurationError(f"grouping.batch_bytes {config.batch_bytes} is more than a record of Kafka's holds")
    for name, value in vars(config).items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigurationError(f"grouping.{name} takes more than 64 bits")


def _configuration(mark: Mark, current: GroupingConfig, makers: Mapping[str, MakerFactory]) -> GroupingConfig:
    """Return the configuration of a mark.

    Raises ConfigurationError if no code can run it, and StateRefused if only other code may.
    """
    if current.core_version >= 3 and mark.generation - current.generation > GENERATION_STEP:
        raise ConfigurationError(
            f"grouping.generation is {current.generation}, and rises by {GENERATION_STEP} at most at once"
        )
    try:
        config = GroupingConfig.from_json(mark.configuration)
    except ForeignConfiguration as newer:
        if current.core_version < 3 or CORE_VERSION < newer.core_version <= current.core_version + CORE_STEP:
            raise
        raise ConfigurationError(
            f"core version {newer.core_version} is beyond {current.core_version + CORE_STEP}"
            if newer.core_version > CORE_VERSION
            else f"core version {newer.core_version} has no such keys"
        ) from newer
    if config.generation != mark.generation:
        raise ConfigurationError(f"its configuration is of generation {config.generation}")
    if current.core_version >= 3:
        _check_extent(config, current)
    if is_user_maker(config.maker) and config.maker not in makers:
        raise ForeignConfiguration(
            f"the log puts generation {config.generation} in force, with grouping.maker {config.maker!r}, which "
            f"this process does not know: name it in grouper.makers of every grouping process",
            config.core_version,
        )
    check_names(config, makers)
    return config

"""Which marks of the log are obeyed: every process must decide alike, whatever its release or settings.

What no code can run is an invalid record. What other code might run, and this cannot, stops the task: passing over it
would cut other batches than that code does.
"""

from collections.abc import Mapping
from typing import NamedTuple

from consumers.grouping.batch_maker import MakerContext
from consumers.grouping.changes import CORE_VERSION
from consumers.grouping.config import (
    GENERATION_STEP,
    SINCE_3,
    ForeignConfiguration,
    GroupingConfig,
    largest_batch_bytes,
)
from consumers.grouping.estimators import estimator
from consumers.grouping.makers import MAKERS, MakerFactory, batch_maker, is_of_users
from topics.errors import ConfigurationError, StateRefused
from topics.records import Mark

SINCE = {"opo": 2, "reinforce_pp": 2, "reservoir": 2}
"""Core version that brought an estimator or maker, where it was not the first; makers of users came with version 2."""

VERSION_STEP = 2**20
"""Most policy versions the clock goes forward by one mark. Who has further to go writes several."""

CORE_STEP = 8
"""Most core versions a mark rises by: one further up is senseless to every release, whether it knows it or not."""

BATCH_BYTES_LIMIT = largest_batch_bytes(2**31 - 1)
"""Largest grouping.batch_bytes for which a record of Kafka's can have room."""

_DEFAULT = GroupingConfig()


def check_names(config: GroupingConfig, makers: Mapping[str, MakerFactory] = MAKERS) -> None:
    """Raise ConfigurationError unless estimator and maker of a configuration exist, under its core version."""
    estimator(config.estimator)
    batch_maker(config.maker, MakerContext(partition=0, seed=config.seed, batch_bytes=config.batch_bytes), makers)
    for key, name in (("estimator", config.estimator), ("maker", config.maker)):
        since = 2 if is_of_users(name) else SINCE.get(name, 1)
        if since > config.core_version:
            raise ConfigurationError(
                f"grouping.{key} is {name!r}, which came with core version {since}, and grouping.core_version is "
                f"{config.core_version}; raise it"
            )
    # Code of version 1 passes over keys it does not know; later code stops at them.
    if config.exclude_offsets and config.core_version < 2:
        raise ConfigurationError(
            "grouping.exclude_offsets came with core version 2, and grouping.core_version is 1; raise it"
        )
    if config.core_version < 3:
        for name in SINCE_3:
            if getattr(config, name) != getattr(_DEFAULT, name):
                raise ConfigurationError(
                    f"grouping.{name} came with core version 3, and grouping.core_version is {config.core_version}; "
                    f"raise it"
                )


class Judged(NamedTuple):
    """What a mark is to a task."""

    config: GroupingConfig | None = None
    """To be put in force; None where there is nothing to be."""
    problem: str = ""
    """Why the mark is an invalid record, which does nothing, since core version 3. Before it senseless configurations
    were passed over in silence, and the clock went wherever a mark said."""


def judge_mark(mark: Mark, current: GroupingConfig, policy_version: int, makers: Mapping[str, MakerFactory]) -> Judged:
    """A mark by what is in force, and the policy clock, where it is read.

    Raises StateRefused where its configuration is of newer code, or names a maker of yours that this process was not
    told of: what other code may run.
    """
    if current.core_version >= 3 and mark.policy_version - max(policy_version, 0) > VERSION_STEP:
        clock = f"the policy clock is at {policy_version}, and a mark moves it {VERSION_STEP} versions at most"
        return Judged(problem=f"a mark of policy version {mark.policy_version}: {clock}")
    if mark.kind != "configuration" or mark.generation <= current.generation:
        return Judged()
    try:
        return Judged(_configuration(mark, current, makers))
    except (StateRefused, MemoryError):
        raise
    except Exception as error:
        # Whoever wrote it cannot have run it: tasks check what they write.
        if current.core_version >= 3:
            why = error if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
            return Judged(problem=f"a mark of generation {mark.generation}: {why}")
        if isinstance(error, ConfigurationError):
            return Judged()
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
    """The configuration of a mark. Raises ConfigurationError where no code can run it, StateRefused where other may."""
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
    if is_of_users(config.maker) and config.maker not in makers:
        raise ForeignConfiguration(
            f"the log puts generation {config.generation} in force, with grouping.maker {config.maker!r}, which "
            f"this process was not told of: name it in grouper.makers of every grouping process",
            config.core_version,
        )
    check_names(config, makers)
    return config

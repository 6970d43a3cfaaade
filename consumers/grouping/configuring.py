"""Which configurations of the log are put in force: every process must decide alike, whatever its release or settings.

What no code can run is passed over. What other code might run, and this cannot, stops the task: passing over it would
cut other batches than that code does.
"""

from collections.abc import Mapping

from consumers.grouping.batch_maker import MakerContext
from consumers.grouping.config import GroupingConfig
from consumers.grouping.estimators import estimator
from consumers.grouping.makers import MAKERS, MakerFactory, batch_maker, is_of_users
from topics.errors import ConfigurationError, StateRefused
from topics.records import Mark

SINCE = {"opo": 2, "reinforce_pp": 2, "reservoir": 2}
"""Core version that brought an estimator or maker, where it was not the first; makers of users came with version 2."""


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


def to_put_in_force(mark: Mark, current: GroupingConfig, makers: Mapping[str, MakerFactory]) -> GroupingConfig | None:
    """The configuration of a mark, None where there is nothing to put in force: old, or senseless.

    Raises StateRefused where it is of newer code, or names a maker of yours that this process was not told of.
    """
    if mark.generation <= current.generation:
        return None
    try:
        config = GroupingConfig.from_json(mark.configuration)
        if config.generation != mark.generation:
            return None
        if is_of_users(config.maker) and config.maker not in makers:
            raise StateRefused(
                f"the log puts generation {config.generation} in force, with grouping.maker {config.maker!r}, which "
                f"this process was not told of: name it in grouper.makers of every grouping process"
            )
        check_names(config, makers)
    except ConfigurationError:
        return None  # Whoever wrote it cannot have run it: tasks check what they write.
    return config

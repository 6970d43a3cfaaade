"""Loads the environments of a run, for every role that plays them or needs their prompts."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ENV
from rollstream.producers.config import EnvironmentConfig
from rollstream.producers.tasks.environment_loading import LoadedEnvironment, load_environments
from rollstream.topics.errors import ConfigurationError

NAME_HELP = "an entry of environments, or a value of `use`, such as game.py:Game"
"""Help of the argument of commands that `environment_named` takes."""


def played_by(config: RunConfig, ordinal: int, numbers: Mapping[str, int]) -> list[EnvironmentConfig]:
    """Return the entries of the mixture that the worker with this ordinal plays; none that are only evaluated.

    `numbers` are the numbers that operators want, in which env:NAME is the number of workers that play an environment.
    """
    wanted = [replace(e, workers=numbers.get(f"{ENV}:{e.name or e.use}", e.workers)) for e in config.mixture]
    return [e for e in wanted if e.weight and (not e.workers or ordinal < e.workers)]


def environments_of(
    config: RunConfig, ordinal: int | None = None, numbers: Mapping[str, int] = MappingProxyType({})
) -> tuple[LoadedEnvironment, ...]:
    """Load the run's environments, or, with `ordinal`, those that the worker with this number plays by `numbers`.

    Raises ConfigurationError, naming the entry, if an environment cannot be loaded or, without `ordinal`, can never be
    unlocked; and if this worker has none to play.
    """
    if ordinal is None:
        environments = load_environments(config.mixture, config.worker, config.tasks)
        _check_lessons([(e.name, e.entry) for e in environments])
        return environments
    # Numbers that leave this worker nothing are for the other workers.
    entries = played_by(config, ordinal, numbers) or played_by(config, ordinal, {})
    if not entries:
        raise ConfigurationError(
            f"no environment is played by worker {ordinal}: every entry of environments has fewer workers; raise "
            "environments.N.workers, or set it to 0 for all"
        )
    return load_environments(entries, config.worker, config.tasks)


def environment_named(config: RunConfig, name: str) -> LoadedEnvironment:
    """Load an entry of environments by its name or `use`, or another value of `use`. Raises ConfigurationError."""
    listed = next((entry for entry in config.environments if name in (entry.name, entry.use)), None)
    try:
        [environment] = load_environments([listed or EnvironmentConfig(use=name)], config.worker, config.tasks)
        return environment
    except ConfigurationError:
        # The name of an entry that gives none is that of its class.
        others = [] if listed else load_environments(config.environments, config.worker, config.tasks)
        for environment in others:
            if environment.name == name:
                return environment
        raise


def _check_lessons(entries: Sequence[tuple[str, EnvironmentConfig]]) -> None:
    """Raise ConfigurationError if an environment can never be unlocked; `entries` are pairs of name and settings."""
    names = [name for name, _entry in entries]
    unknown = {name for name, entry in entries if entry.rewards == "labeler"}
    unplayed = {name for name, entry in entries if not entry.weight}
    for name, entry in entries:
        for before in entry.after:
            if before in unknown:
                raise ConfigurationError(
                    f"environment {name} comes after {before}, whose rewards come from a labeler, so "
                    "workers do not know its success; name another in `after`"
                )
            if before in unplayed:
                raise ConfigurationError(
                    f"environment {name} comes after {before}, whose weight 0 means that it is never played; name "
                    "another in `after`"
                )
            if before not in names:
                near = difflib.get_close_matches(before, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
                raise ConfigurationError(f"environment {name} comes after {before!r}, which does not exist; {hint}")
    unlocked: set[str] = set()
    while opened := {n for n, entry in entries if n not in unlocked and unlocked.issuperset(entry.after)}:
        unlocked |= opened
    locked = [name for name in names if name not in unlocked]
    if locked:
        raise ConfigurationError(
            f"environments {', '.join(locked)} wait for each other and are never played; remove `after` from one"
        )

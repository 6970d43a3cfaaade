"""Loads the environments of a run, for every role that plays them or needs their prompts."""

import difflib
from collections.abc import Sequence

from rollstream.pipeline.config import RunConfig
from rollstream.producers.config import EnvironmentConfig
from rollstream.producers.environment_loading import LoadedEnvironment, load_environments
from rollstream.topics.errors import ConfigurationError


def environments_of(config: RunConfig, ordinal: int | None = None) -> tuple[LoadedEnvironment, ...]:
    """Load the run's environments, or, with `ordinal`, those that the worker with this number plays.

    Without `ordinal`, environments that only workers load are left out. Raises ConfigurationError, naming the entry, if
    an environment cannot be loaded or, without `ordinal`, can never be unlocked; and if this worker has none to play.
    """
    if ordinal is None:
        environments = load_environments([e for e in config.mixture if e.load_in == "all"], config.worker, config.tasks)
        others = [(e.name, e) for e in config.mixture if e.load_in == "workers"]
        _check_lessons([*((e.name, e.entry) for e in environments), *others])
        return environments
    entries = [e for e in config.mixture if not e.workers or ordinal < e.workers]
    if not entries:
        raise ConfigurationError(
            f"no environment is played by worker {ordinal}: every entry of environments has fewer workers; raise "
            "environments.N.workers, or set it to 0 for all"
        )
    return load_environments(entries, config.worker, config.tasks)


def _check_lessons(entries: Sequence[tuple[str, EnvironmentConfig]]) -> None:
    """Raise ConfigurationError if an environment can never be unlocked; `entries` are pairs of name and settings."""
    names = [name for name, _entry in entries]
    unknown = {name for name, entry in entries if entry.rewards == "labeler"}
    for name, entry in entries:
        for before in entry.after:
            if before in unknown:
                raise ConfigurationError(
                    f"environment {name} comes after {before}, whose rewards come from a labeler, so "
                    "workers do not know its success; name another in `after`"
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

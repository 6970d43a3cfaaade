"""The environments of a run, loaded: for every role that plays them or needs their prompts."""

import difflib
from collections.abc import Sequence

from rollstream.pipeline.config import RunConfig
from rollstream.producers.environment_loading import LoadedEnvironment, load_environments
from rollstream.topics.errors import ConfigurationError


def environments_of(config: RunConfig, ordinal: int | None = None) -> tuple[LoadedEnvironment, ...]:
    """Load the run's environments, or with `ordinal` those that the worker of this number plays.

    Raises ConfigurationError, naming the entry, if one cannot be loaded, or if there is none for this worker.
    """
    entries = [e for e in config.mixture if ordinal is None or not e.workers or ordinal < e.workers]
    if not entries:
        raise ConfigurationError(
            f"no environment is played by worker {ordinal}: every entry of environments has fewer workers; raise "
            "environments.N.workers, or set it to 0 for all"
        )
    environments = load_environments(entries, config.worker, config.tasks)
    if ordinal is None:
        _check_lessons(environments)
    return environments


def _check_lessons(environments: Sequence[LoadedEnvironment]) -> None:
    """Raise ConfigurationError for an environment that nothing can unlock."""
    names = [environment.name for environment in environments]
    unknown = {environment.name for environment in environments if environment.awaits_label}
    for environment in environments:
        for before in environment.entry.after:
            if before in unknown:
                raise ConfigurationError(
                    f"environment {environment.name} comes after {before}, whose rewards come from a labeler, so "
                    "workers do not know its success; name another in `after`"
                )
            if before not in names:
                near = difflib.get_close_matches(before, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
                raise ConfigurationError(
                    f"environment {environment.name} comes after {before!r}, which is none; {hint}"
                )
    unlocked: set[str] = set()
    while opened := {e.name for e in environments if e.name not in unlocked and unlocked.issuperset(e.entry.after)}:
        unlocked |= opened
    locked = [name for name in names if name not in unlocked]
    if locked:
        raise ConfigurationError(
            f"environments {', '.join(locked)} wait for each other and are never played; take one's `after` away"
        )

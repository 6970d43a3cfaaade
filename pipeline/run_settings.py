"""Settings with which the processes of a run were started, and those of them that differ from the defaults."""

from collections.abc import Sequence
from typing import NamedTuple

from rollstream.pipeline.config import RunConfig, inference_urls, load
from rollstream.pipeline.settings import flattened, plain
from rollstream.producers.config import EnvironmentConfig

_FIRST = ("task", "environments", "grouping", "learner", "labeling", "worker", "inference", "curriculum", "evaluation")
"""Sections that decide what is learned; they come before those that say where and how a run is kept."""


class ChangedSetting(NamedTuple):
    """A setting of a run that is not at its default."""

    key: str
    """Dotted, as in `learner.optimizer.learning_rate`."""
    value: str
    default: str
    """Empty if there is none, as for a key of a table with any keys."""


def settings_of(config: RunConfig) -> RunConfig | None:
    """Return the settings that the processes of a run read; None if this machine lacks their file.

    Raises ConfigurationError if a setting of the file is unknown to this release.
    """
    file = config.run_dir / "run.toml"
    return load(file) if file.exists() else None


def changed_settings(config: RunConfig) -> list[ChangedSetting] | None:
    """Return the changed settings of a run; None if this machine lacks the file that the run's processes read.

    Defaults are those of a run with the same name, directory and seed, so that settings derived from these do not count
    as changed; nor do the ports and addresses of the run's own servers, which differ at each start. Secrets are
    references (`env:NAME`, `file:PATH`), as in the file. Raises the errors of `settings_of`.
    """
    run = settings_of(config)
    if run is None:
        return None
    same = [f"run={run.run}", f"data_dir={run.data_dir}", f"seed={run.seed}"]
    defaults = dict(flattened(plain(load(flags=same)))) | {"seed": "0"}
    for number, entry in enumerate(run.environments):
        defaults |= dict(flattened(plain(EnvironmentConfig(use=entry.use)), f"environments.{number}."))
        del defaults[f"environments.{number}.use"]
    places = {"run", "data_dir", "inference.port", "ui.port"}
    if run.inference.port and run.worker.inference_urls == inference_urls(run.inference):
        places.add("worker.inference_urls")
    changed = [
        ChangedSetting(key, value, defaults.get(key, ""))
        for key, value in flattened(plain(run))
        if defaults.get(key) != value and key not in places
    ]
    return sorted(changed, key=_place)


def differing_settings(sides: Sequence[Sequence[ChangedSetting]]) -> dict[str, list[str]]:
    """Return the settings that differ among runs, by key in the order of `changed_settings`: a value for each run."""
    changed = {each.key: each for side in sides for each in side}
    values = [{each.key: each.value for each in side} for side in sides]
    ordered = sorted(changed.values(), key=_place)
    rows = {each.key: [side.get(each.key, each.default) for side in values] for each in ordered}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def _place(setting: ChangedSetting) -> tuple[int, str]:
    section = setting.key.split(".")[0]
    return (_FIRST.index(section) if section in _FIRST else len(_FIRST), setting.key)

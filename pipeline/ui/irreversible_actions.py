"""Makes the changes that a run's page offers and no command can withdraw: rollbacks of weights, and exclusions.

This process makes them at once, as `rollstream weights rollback` and `rollstream steer exclude` do. In contrast,
`rollstream.pipeline.control.steering` only writes records that other processes follow.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rollstream.consumers.weights.rollback import roll_back
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.exclude import put_on_record, settings_of
from rollstream.pipeline.tools.exclusion_marks import Exclusion, newest, partition_configurations
from rollstream.pipeline.tools.published_versions import PublishedVersions
from rollstream.topics.control.named_records import EXCLUDED, read_named
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.records import ExcludedBatch

_MOST_NAMED = 20
_WAIT_S = 60.0
"""How long an exclusion waits for the grouping processes."""


def make(config: RunConfig, change: Mapping[str, Any]) -> str:
    """Make a change, and return a sentence about it.

    `change` has the name of the change under `command`, and its arguments under their names, as docs/steering.md lists
    them. Raises ConfigurationError, which names the remedy, if the change cannot be made, and the command's own errors.
    """
    arguments = {name: value for name, value in change.items() if name != "command"}
    clients.check_broker(config.kafka)
    return CHANGES[str(change["command"])](config, arguments)


def state(config: RunConfig) -> dict[str, Any]:
    """Return the rollbacks and exclusions of a run, as plain values for JSON. Raises BrokerUnavailable."""
    return {"rolled_back": _rollbacks(config), "excluded": _excluded(config)}


def _rollbacks(config: RunConfig) -> dict[str, str]:
    """Return, for each policy version published by a rollback, the source of its parameters and the reason."""
    return {
        f"version {version}": f"has the parameters of version {note.source}, by {note.by}: {note.reason}"
        for version, published in sorted(PublishedVersions(config).by_number.items())
        if (note := published.rollback) is not None
    }


def _excluded(config: RunConfig) -> dict[str, Any]:
    """Return what the newest configuration of grouping excludes, and the batches that learners leave out."""
    configurations = partition_configurations(config.kafka, config.run, config.grouper)
    settings = settings_of(newest(configurations)) if configurations else {}
    excluded = {name.removeprefix("grouping.exclude_"): ", ".join(values) for name, values in settings.items()}
    batches = list(read_named(config.kafka, config.run, EXCLUDED, ExcludedBatch))
    if batches:
        more = f" and {len(batches) - _MOST_NAMED:,} more" if len(batches) > _MOST_NAMED else ""
        excluded["batches"] = ", ".join(batches[-_MOST_NAMED:]) + more
    return excluded


def _rollback(config: RunConfig, arguments: Mapping[str, Any]) -> str:
    """Publish a version again: {"version": 17, "reason": "reward hacking", "take_over": True}."""
    version, reason = arguments.get("version"), str(arguments.get("reason") or "").strip()
    take_over = arguments.get("take_over", False)
    _only(arguments, "version", "reason", "take_over")
    if not isinstance(version, int) or isinstance(version, bool):
        raise ConfigurationError(f"{version!r} is not a policy version; `rollstream weights ls` lists them")
    if not reason:
        raise ConfigurationError("give a reason: it is kept on record")
    if not isinstance(take_over, bool):
        raise ConfigurationError(f"take_over is {take_over!r}; it must be true or false")
    made = roll_back(
        config.kafka, config.run, version, reason=reason, take_over=take_over, config=config.learner.weights
    )
    return f"Policy version {made.version} has the parameters of version {version}."


def _exclude(config: RunConfig, arguments: Mapping[str, Any]) -> str:
    """Exclude rollouts: {"environments": ["math"], "workers": ["env-3"], "offsets": ["0:5-9"]}; each is optional."""
    _only(arguments, "environments", "workers", "offsets")
    named = {name: _texts(name, arguments.get(name, [])) for name in ("environments", "workers", "offsets")}
    done = put_on_record(config, Exclusion(**named), timeout_s=_WAIT_S)
    rollouts, batches = done.report.fates.total(), len(done.report.batches)
    return f"{rollouts:,} rollouts are excluded, and learners leave out {batches:,} batches that contain some of them."


def _texts(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ConfigurationError(f"{name} is {values!r}; it must be a list of texts")
    return tuple(values)


def _only(arguments: Mapping[str, Any], *names: str) -> None:
    for name in arguments:
        if name not in names:
            raise ConfigurationError(f"the command has no argument {name!r}; its arguments are {', '.join(names)}")


CHANGES: Mapping[str, Callable[[RunConfig, Mapping[str, Any]], str]] = {"rollback": _rollback, "exclude": _exclude}
"""Every change by its name; its function checks the arguments and makes it."""

"""Grouping configurations in a journal: the offset at which each came into force, and the settings that it changed."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.topics.records import JournalRecord


class ConfigurationHistory:
    """Grouping configurations of one partition, from its first available journal record."""

    def __init__(self) -> None:
        self.generations: list[tuple[int, int]] = []
        """Each generation, with the first offset of the transaction in which it came into force."""
        self.settings: dict[int, str] = {}
        """Settings as JSON by generation, which become known once the watermark has passed the generation's mark."""

    def read(self, record: JournalRecord) -> None:
        """Process the next journal record."""
        if not self.generations or self.generations[-1][0] != record.generation:
            self.generations.append((record.generation, record.begin))
        if record.watermark_generation not in self.settings:
            self.settings[record.watermark_generation] = record.watermark_configuration

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"generations": self.generations, "settings": list(self.settings.items())}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "ConfigurationHistory":
        """Return the history of a saved state."""
        history = cls()
        history.generations = [(generation, offset) for generation, offset in state["generations"]]
        history.settings = dict(state["settings"])
        return history


@dataclass(frozen=True, kw_only=True)
class ConfigurationSummary:
    """Summary of one grouping configuration, for `top` and `lineage`."""

    generation: int
    partitions: int = 0
    """Number of partitions in which the configuration is in force."""
    before: int = 0
    """Number of earlier configurations in the journals."""
    core_version: int | None = None
    """None, like the other settings, until the watermark of a partition has passed the configuration's mark."""
    estimator: str | None = None
    mark_keys: int | None = None
    """Number of keys with which marks may be signed; 0 if every writer to `rollouts` may write marks."""
    environment_keys: tuple[str, ...] | None = None
    """Environments whose rollouts must be signed."""
    changed: Mapping[str, list[Any]] | None = field(default_factory=dict)
    """Old and new values of settings that differ from the previous configuration; None if one of the two is unknown."""

    @property
    def facts(self) -> dict[str, str]:
        """The summary as text by name, without the generation."""
        if self.core_version is None:
            return {"settings": "not known yet"}
        signed = ", ".join(self.environment_keys or ())
        changed = "not known" if self.changed is None else ", ".join(self.changed)
        return {
            "core": str(self.core_version),
            "estimator": str(self.estimator),
            "marks": "signed" if self.mark_keys else "unsigned",
            **({"signed environments": signed} if signed else {}),
            **({"changed": changed} if changed and (self.before or self.changed is None) else {}),
        }

    @property
    def text(self) -> str:
        """The summary in one line."""
        return ", ".join((f"generation {self.generation}", *(f"{name} {fact}" for name, fact in self.facts.items())))


def summary(histories: Iterable[tuple[int, ConfigurationHistory]], generation: int) -> ConfigurationSummary:
    """Summarize one configuration of a run, from the history of each partition."""
    histories = list(histories)
    listed = configurations(histories)
    settings = _settings(history for _partition, history in histories).get(generation)
    own = next((each for each in listed if each["generation"] == generation), None)
    known = {} if settings is None else _known(settings)
    return ConfigurationSummary(
        generation=generation,
        partitions=len(own["in_force"]) if own else 0,
        before=sum(each["generation"] < generation for each in listed),
        changed=own["changed"] if own else None,
        **known,
    )


def newest_summary(histories: Iterable[tuple[int, ConfigurationHistory]]) -> ConfigurationSummary | None:
    """Summarize the newest configuration in force on any partition; None before the first journal record."""
    histories = list(histories)
    generations = [history.generations[-1][0] for _partition, history in histories if history.generations]
    return summary(histories, max(generations)) if generations else None


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a summary."""
    environments = {str(entry).rpartition(":")[0] for entry in _listed(settings, "environment_keys")}
    return {
        "core_version": settings.get("core_version", 1),
        "estimator": settings.get("estimator", ""),
        "mark_keys": len(_listed(settings, "mark_keys")),
        "environment_keys": tuple(sorted(environments)),
    }


def _listed(settings: Mapping[str, Any], name: str) -> list[Any]:
    value = settings.get(name)
    return value if isinstance(value, list) else []


def _settings(histories: Iterable[ConfigurationHistory]) -> dict[int, dict[str, Any]]:
    """Return the known settings by generation; the settings of an invalid text count as unknown."""
    texts = {generation: text for history in histories for generation, text in history.settings.items() if text}
    settings = {}
    for generation, text in texts.items():
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(text), dict):
                settings[generation] = value
    return settings


def configurations(histories: Iterable[tuple[int, ConfigurationHistory]]) -> list[dict[str, Any]]:
    """Return the grouping configurations of a run, oldest first, from the history of each partition.

    Each has its generation, by partition the offset from which it was in force, the partitions in which it is in force
    now, and the settings (old and new value) that differ from the previous generation, or from the defaults if it is
    the first.
    The settings are None until they are known.
    """
    since: dict[int, dict[int, int]] = {}
    in_force: dict[int, list[int]] = {}
    histories = list(histories)
    settings = _settings(history for _partition, history in histories)
    for partition, history in histories:
        for generation, offset in history.generations:
            since.setdefault(generation, {})[partition] = offset
        if history.generations:
            in_force.setdefault(history.generations[-1][0], []).append(partition)
    before: dict[str, Any] | None = json.loads(GroupingConfig().to_json())
    listed = []
    for generation in sorted(since):
        now = settings.get(generation)
        known = before is not None and now is not None
        listed.append(
            {
                "generation": generation,
                "since": since[generation],
                "in_force": in_force.get(generation, []),
                "changed": _changed(before or {}, now or {}) if known else None,
            }
        )
        before = now
    return listed


def _changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    names = sorted((before.keys() | now.keys()) - {"generation"})
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}

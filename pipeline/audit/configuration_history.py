"""The configurations of grouping that a journal tells of: which came into force where, and what each changed."""

import json
from collections.abc import Iterable
from typing import Any

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.topics.records import JournalRecord


class ConfigurationHistory:
    """The configurations of one partition, from the first journal record that is there."""

    def __init__(self) -> None:
        self.generations: list[tuple[int, int]] = []
        """Each generation, with the first offset of the transaction in which it came into force."""
        self.settings: dict[int, str] = {}
        """Settings as JSON by generation; those of one in force are known once the watermark has passed its mark."""

    def read(self, record: JournalRecord) -> None:
        """Process the next journal record."""
        if not self.generations or self.generations[-1][0] != record.generation:
            self.generations.append((record.generation, record.begin))
        if record.watermark_generation not in self.settings:
            self.settings[record.watermark_generation] = record.watermark_configuration

    def state(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {"generations": self.generations, "settings": list(self.settings.items())}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "ConfigurationHistory":
        """The history of a state."""
        history = cls()
        history.generations = [(generation, offset) for generation, offset in state["generations"]]
        history.settings = dict(state["settings"])
        return history


def configurations(histories: Iterable[tuple[int, ConfigurationHistory]]) -> list[dict[str, Any]]:
    """The configurations of a run, oldest first, from the history of each partition.

    Each has its generation, the offset from which it held by partition, the partitions in which it is in force, and the
    settings that differ from those of the generation before it, or from the defaults: value before and value now. They
    are None until they are known.
    """
    since: dict[int, dict[int, int]] = {}
    in_force: dict[int, list[int]] = {}
    settings: dict[int, dict[str, Any]] = {}
    for partition, history in histories:
        for generation, offset in history.generations:
            since.setdefault(generation, {})[partition] = offset
        if history.generations:
            in_force.setdefault(history.generations[-1][0], []).append(partition)
        settings |= {generation: json.loads(text) for generation, text in history.settings.items() if text}
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

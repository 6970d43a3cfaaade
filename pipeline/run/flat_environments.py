"""Finds environments that teach nothing: every group of many policy versions was dropped for equal rewards. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rollstream.topics.records import FateCount
from rollstream.topics.records.fates import BATCHED, dropped_for

FLAT_VERSIONS = 20
"""Versions without a batched rollout after which an environment counts as flat."""
_FLAT = (dropped_for("zero_variance"), dropped_for("zero_advantage"))


class _Taught(NamedTuple):
    """When a rollout of an environment was last batched."""

    version: int
    batched: int
    flat: int
    """Rollouts that had been dropped for equal rewards by then."""


class FlatEnvironments:
    """The environments that are flat, by the counts of the journal."""

    def __init__(self) -> None:
        self._taught: dict[str, _Taught] = {}

    def look(self, counts: Iterable[FateCount], version: int) -> tuple[str, ...]:
        """Return the names of the environments that are flat at this policy version. Call it often."""
        fates: dict[str, Counter[str]] = {}
        for count in counts:
            fates.setdefault(count.environment, Counter())[count.fate] += count.rollouts
        flat = []
        for name, now in fates.items():
            dropped, taught = sum(now[fate] for fate in _FLAT), self._taught.get(name)
            if taught is None or now[BATCHED] != taught.batched:
                self._taught[name] = taught = _Taught(version, now[BATCHED], dropped)
            if version - taught.version >= FLAT_VERSIONS and dropped > taught.flat:
                flat.append(name)
        return tuple(sorted(flat))

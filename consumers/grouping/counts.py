"""Cumulative counts of one partition by environment and fate, with sums over sound rollouts: their means tell whether
what was lost is of another kind than what was kept. `topics.journal_counts` says which of them a record holds.

Sums are added up in the order in which offsets reach their fate, so that they are the same bits after any crash.
Bounded: environments that come once the counts are full are counted together, for the journal has a limit.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from consumers.grouping.changes import DROP_REASONS, DROPPED
from topics.records import FateCount, Rollout

COUNTED_BYTES = 128 * 1024
"""What counts may take in a snapshot before environments not met yet are counted together."""
OTHERS = "(others)"
_ENTRY_BYTES = 80
_KNOWN = frozenset(f"{DROPPED}:{reason}" for reason in DROP_REASONS)


def text_bytes(text: str) -> int:
    """At most what a text takes in a record."""
    return 5 + (len(text) if text.isascii() else 4 * len(text))


class Sums(NamedTuple):
    """Fields of FateCount but its key, in its order."""

    rollouts: int = 0
    tokens: int = 0
    measured: int = 0
    sampled_tokens: int = 0
    sampled_tokens_squared: float = 0.0
    reward: float = 0.0
    reward_squared: float = 0.0


class Counts:
    """Sums by environment and fate."""

    def __init__(self, counts: Iterable[FateCount] = ()) -> None:
        self._built = {(count.environment, count.fate): count for count in counts}
        self._sums = {
            key: Sums(
                count.rollouts,
                count.tokens,
                count.measured,
                count.sampled_tokens,
                count.sampled_tokens_squared,
                count.reward,
                count.reward_squared,
            )
            for key, count in self._built.items()
        }
        self._bytes = sum(map(_entry_bytes, self._sums))
        self._changed: set[tuple[str, str]] = set()

    def add(self, environment: str, fate: str, tokens: int, measured: Rollout | None = None) -> None:
        """Count a record; `measured` is its rollout where that is sound."""
        key = (environment, fate)
        sums = self._sums.get(key)
        if sums is None:
            key, sums = self._enter(key)
        if measured is None:
            self._sums[key] = sums._replace(rollouts=sums.rollouts + 1, tokens=sums.tokens + tokens)
        else:
            length, reward = int(np.count_nonzero(measured.loss_mask)), measured.reward
            self._sums[key] = Sums(
                sums.rollouts + 1,
                sums.tokens + tokens,
                sums.measured + 1,
                sums.sampled_tokens + length,
                sums.sampled_tokens_squared + float(length * length),
                sums.reward + reward,
                sums.reward_squared + reward * reward,
            )
        self._built.pop(key, None)
        self._changed.add(key)

    def _enter(self, key: tuple[str, str]) -> tuple[tuple[str, str], Sums]:
        if self._bytes + _entry_bytes(key) <= COUNTED_BYTES:
            self._bytes += _entry_bytes(key)
            return key, Sums()
        fate = key[1]
        # Reasons a batch maker makes up could fill the journal too.
        key = (OTHERS, f"{DROPPED}:other" if fate.startswith(f"{DROPPED}:") and fate not in _KNOWN else fate)
        return key, self._sums.get(key, Sums())

    def records(self) -> tuple[FateCount, ...]:
        """Every entry, by environment and fate."""
        return self._records(self._sums)

    def take(self, *, whole: bool) -> tuple[FateCount, ...]:
        """The entries for the next journal record: every one, or those that changed since the last call."""
        changed, self._changed = self._changed, set()
        return self.records() if whole else self._records(changed)

    def _records(self, keys: Iterable[tuple[str, str]]) -> tuple[FateCount, ...]:
        return tuple(map(self._record, sorted(keys)))

    def _record(self, key: tuple[str, str]) -> FateCount:
        if key not in self._built:
            self._built[key] = FateCount(environment=key[0], fate=key[1], **self._sums[key]._asdict())
        return self._built[key]


def _entry_bytes(key: tuple[str, str]) -> int:
    return _ENTRY_BYTES + sum(map(text_bytes, key))

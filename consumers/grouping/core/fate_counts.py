"""Cumulative counts of one partition by environment and fate, with sums over valid rollouts.

The means show whether lost rollouts differ from kept rollouts. Values are added in the order in which offsets reach
their fate, so that the sums have the same bits after any crash. The counts in the journal have a size limit: once it is
reached, new environments are counted together. `JournalCounts` says which counts a record holds.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.records import FateCount
from rollstream.topics.records.fates import (
    DROP_REASONS,
    DROPPED,
    OTHER_ENVIRONMENTS,
    OTHER_REASONS,
    dropped_for,
    fate_and_reason,
)

COUNTED_BYTES = 128 * 1024
"""Maximum size of the counts in a snapshot; beyond it, new environments are counted together."""
_ENTRY_BYTES = 80


def text_bytes(text: str) -> int:
    """Return the maximum number of bytes that a text takes in a record."""
    return 5 + (len(text) if text.isascii() else 4 * len(text))


class FateSums(NamedTuple):
    """Fields of FateCount without its key, in the same order."""

    rollouts: int = 0
    tokens: int = 0
    measured: int = 0
    sampled_tokens: int = 0
    sampled_tokens_squared: float = 0.0
    reward: float = 0.0
    reward_squared: float = 0.0


class FateCounts:
    """Sums by environment and fate."""

    def __init__(self, counts: Iterable[FateCount] = ()) -> None:
        self._built = {(count.environment, count.fate): count for count in counts}
        self._sums = {
            key: FateSums(
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
        # As `_enter` counts them: the entry of other environments may always be made.
        self._bytes = sum(_entry_bytes(key) for key in self._sums if key[0] != OTHER_ENVIRONMENTS)
        self._changed: set[tuple[str, str]] = set()

    def add(self, environment: str, fate: str, tokens: int, measured: HeldRollout | None = None) -> None:
        """Count a record; `measured` is its rollout if the rollout is valid."""
        key = (environment, fate)
        sums = self._sums.get(key)
        if sums is None:
            key, sums = self._enter(key)
        if measured is None:
            self._sums[key] = FateSums(sums.rollouts + 1, sums.tokens + tokens, *sums[2:])
        else:
            length, reward = measured.sampled, measured.reward
            self._sums[key] = FateSums(
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

    def _enter(self, key: tuple[str, str]) -> tuple[tuple[str, str], FateSums]:
        if self._bytes + _entry_bytes(key) <= COUNTED_BYTES:
            self._bytes += _entry_bytes(key)
            return key, FateSums()
        fate, reason = fate_and_reason(key[1])
        # Reasons that a batch maker invents are counted together too, because their number has no limit.
        other = fate == DROPPED and reason not in DROP_REASONS
        key = (OTHER_ENVIRONMENTS, dropped_for(OTHER_REASONS) if other else key[1])
        return key, self._sums.get(key, FateSums())

    def records(self) -> tuple[FateCount, ...]:
        """Return every count, by environment and fate."""
        return self._records(self._sums)

    def journal_entries(self, *, whole: bool) -> tuple[FateCount, ...]:
        """Return the counts for the next journal record: all of them, or those that changed since the last call."""
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

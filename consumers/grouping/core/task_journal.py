"""The journal of a task: offsets that commits point to, cumulative counts, and records too large to be written whole.

Splitting keeps the records of any transaction far below the size limit of any topic. Lists continue from part to part,
in order. Every part holds the scalars as they are after the transaction. Only `begin` differs: in every part after the
first, it is the position after the transaction, so that each part follows the previous part as whole records do.

The means by fate show whether lost rollouts differ from kept rollouts. Values are added in the order in which offsets
reach their fate, so that the sums have the same bits after any crash. The counts in the journal have a size limit: once
it is reached, new environments are counted together. `JournalCounts` says which counts a record holds.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.records import FateCount, FinishedOffsets, Int64, JournalRecord
from rollstream.topics.records.fates import (
    DROP_REASONS,
    DROPPED,
    OTHER_ENVIRONMENTS,
    OTHER_REASONS,
    dropped_for,
    fate_and_reason,
)
from rollstream.topics.wire.commit_metadata import CommitMetadata

_COARSE_MS = 1000


@dataclass
class JournalPointers:
    """Pointers from which the metadata of a task's next commit is made.

    If a transaction is aborted and sent again, the pointers may be too low, which does no harm.
    """

    newest: int
    """Offset of the newest journal record."""
    snapshot: int
    """Offset of the newest snapshot."""
    horizon: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Journal records that name remembered groups, oldest first: first and last finishing time, first offset. Each
    entry covers up to a second of stream time, so that there are few entries even if transactions are frequent."""
    leader_epoch: int = -1
    """Leader epoch of the record before the position when the task was restored; -1 if it is unknown."""

    def add_written(self, offset: int, record: JournalRecord) -> CommitMetadata:
        """Add a record that was just written at `offset`; return the metadata to commit with it."""
        self.newest = offset
        if record.snapshot and record.part == 0:
            self.snapshot = offset
        self.add_finished_groups(offset, record)
        oldest = self.horizon[0][2] if self.horizon else offset
        return CommitMetadata(self.newest, self.snapshot, min(oldest, self.snapshot))

    def add_finished_groups(self, offset: int, record: JournalRecord) -> None:
        """Add the finished groups of the record at `offset`, and forget the groups that the record forgets."""
        if record.finished_groups:
            first_ms, last_ms = record.finished_groups[0].finished_ms, record.finished_groups[-1].finished_ms
            if self.horizon and last_ms - self.horizon[-1][0] < _COARSE_MS:
                began_ms, _, first_offset = self.horizon[-1]
                self.horizon[-1] = (began_ms, last_ms, first_offset)
            else:
                self.horizon.append((first_ms, last_ms, offset))
        while self.horizon and self.horizon[0][1] < record.remembered_since_ms:
            self.horizon.popleft()


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


PART_BYTES = 512 * 1024
"""Maximum size of the lists of one part. Counts and configuration are not included."""
LEAST_RECORD_BYTES = 1024 * 1024
"""Minimum record limit: room for the lists of a part, the counts twice, and a configuration."""
_RANGE_BYTES = 16
_NUMBERS_BYTES = 60
"""Maximum number of bytes for the numbers of a drop or a finished group."""
_RANGE_FIELDS = ("admitted", "unfinished", "delivered")

Item = tuple[str, Any, int]
"""Field, value, and the maximum number of bytes that the value takes."""


def split_record(record: JournalRecord, limit_bytes: int = PART_BYTES) -> tuple[JournalRecord, ...]:
    """Return the record itself if its lists take at most `limit_bytes`, else its parts.

    An item that is larger than the limit gets a separate part.
    """
    if sum(size for _name, _value, size in _items(record, 2**62)) <= limit_bytes:
        return (record,)
    parts: list[dict[str, list[Any]]] = [{}]
    room = limit_bytes
    for name, value, size in _items(record, max(1, limit_bytes // 4)):
        if size > room and parts[-1]:
            parts.append({})
            room = limit_bytes
        parts[-1].setdefault(name, []).append(value)
        room -= size
    return tuple(
        replace(
            record,
            sequence=record.sequence + number,
            begin=record.begin if number == 0 else record.position,
            part=number,
            parts=len(parts),
            **{name: _joined(name, part.get(name, [])) for name in _LISTS},
        )
        for number, part in enumerate(parts)
    )


_LISTS = (*_RANGE_FIELDS, "finished", "drops", "finished_groups", "batch_ids")


def _items(record: JournalRecord, piece_bytes: int) -> Iterator[Item]:
    """Yield the items of the record's lists; ranges are split into pieces of about `piece_bytes`."""
    for finished in record.finished:
        for piece in _pieces(finished.runs, piece_bytes):
            yield "finished", replace(finished, runs=piece), piece.nbytes + text_bytes(finished.fate)
    for name in _RANGE_FIELDS:
        for piece in _pieces(getattr(record, name), piece_bytes):
            yield name, piece, piece.nbytes
    for drop in record.drops:
        texts = (drop.reason, drop.detail, drop.uid, drop.environment)
        yield "drops", drop, _NUMBERS_BYTES + sum(map(text_bytes, texts))
    for group in record.finished_groups:
        names = (group.environment, group.example_id, group.group_id)
        yield "finished_groups", group, _NUMBERS_BYTES + sum(map(text_bytes, names))
    for batch_id in record.batch_ids:
        yield "batch_ids", batch_id, text_bytes(batch_id)


def _pieces(ranges: Int64, piece_bytes: int) -> Iterable[Int64]:
    numbers = 2 * max(1, piece_bytes // _RANGE_BYTES)
    return (ranges[start : start + numbers] for start in range(0, len(ranges), numbers))


def _joined(name: str, values: list[Any]) -> Any:
    if name in _RANGE_FIELDS:
        return np.concatenate(values) if values else np.empty(0, "<i8")
    if name != "finished":
        return tuple(values)
    by_fate: dict[str, list[Int64]] = {}
    for finished in values:
        by_fate.setdefault(finished.fate, []).append(finished.runs)
    return tuple(FinishedOffsets(fate=fate, runs=np.concatenate(pieces)) for fate, pieces in by_fate.items())

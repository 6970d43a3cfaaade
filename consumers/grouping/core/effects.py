"""Effects of a fold since its last commit: batches to publish, dead letters, and the journal of what changed.

The grouping process publishes them in one transaction; replay and verification compare them. Nothing else leaves a
fold.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.records import BatchIndexEntry, Drop, FinishedGroup, JournalRecord, TrainingBatch
from rollstream.topics.wire.codec import decode_as

CORE_VERSION = 1
"""Version of the fold's behaviour. The configuration in the log says which version is in force
(`grouping.core_version`). Once a release exists, every change of the fold's behaviour is a new version, and so is a new
key, estimator or maker (docs/decisions/0002-the-log-is-the-state.md)."""


class InputRecord(NamedTuple):
    """One record of a partition of `rollouts`, as the fold reads it."""

    offset: int
    timestamp_ms: int
    """Append time, by the broker."""
    key: bytes | None
    value: bytes | None
    rollout: HeldRollout | None = None
    """Its content, if `rollout_reader` has read it with other records."""

    @property
    def readable(self) -> bool:
        """Whether the record could be decompressed. If not, this is a placeholder without an append time."""
        return self.timestamp_ms >= 0


class DeadLetter(NamedTuple):
    """A record that cannot be decoded, or that an operator skips."""

    record: InputRecord
    error: str
    """Human-readable reason."""


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """A batch that was cut: its record, and the figures of it that grouping needs."""

    frame: bytes
    cut: str
    entry: BatchIndexEntry
    """Its entry in the index, before it has an offset."""
    source_offsets: list[int]
    timestamps: list[float]

    @property
    def batch_id(self) -> str:
        return self.entry.batch_id

    @property
    def digest(self) -> str:
        return self.entry.digest

    @cached_property
    def batch(self) -> TrainingBatch:
        """The batch as its readers decode it."""
        return decode_as(TrainingBatch, self.frame)


@dataclass
class PendingEffects:
    """Effects that are not committed yet, since the position `begin`."""

    begin: int
    batches: list[EncodedBatch] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    finished: dict[str, list[int]] = field(default_factory=dict)
    """Offsets by fate."""
    admitted: list[int] = field(default_factory=list)
    """Offsets that opened or joined a group."""
    delivered: list[int] = field(default_factory=list)
    """Offsets that a batch carries."""
    finished_groups: list[FinishedGroup] = field(default_factory=list)

    @property
    def has_fates(self) -> bool:
        """Whether any record reached its fate."""
        return bool(self.batches or self.finished)


@dataclass(frozen=True)
class Effects:
    """One task's part of a transaction."""

    journal: JournalRecord
    """All changes in one record, of any size."""
    encoded: tuple[EncodedBatch, ...]
    """Batches that were cut."""
    dead_letters: tuple[DeadLetter, ...]
    records: tuple[JournalRecord, ...]
    """The journal as it is written: the same record, or its parts if it would be too large."""

    @property
    def batches(self) -> tuple[TrainingBatch, ...]:
        """The batches that were cut, decoded."""
        return tuple(encoded.batch for encoded in self.encoded)

"""Effects of a fold since its last commit: batches to publish, dead letters, and the journal of what changed.

The grouping process publishes them in one transaction; replay and verification compare them. Nothing else leaves a
fold.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.topics.records import Drop, FinishedGroup, JournalRecord, TrainingBatch

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

    @property
    def readable(self) -> bool:
        """Whether the record could be decompressed. If not, this is a placeholder without an append time."""
        return self.timestamp_ms >= 0


class DeadLetter(NamedTuple):
    """A record that cannot be decoded, or that an operator skips."""

    record: InputRecord
    error: str
    """Human-readable reason."""


@dataclass
class PendingEffects:
    """Effects that are not committed yet, since the position `begin`."""

    begin: int
    batches: list[TrainingBatch] = field(default_factory=list)
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
    batches: tuple[TrainingBatch, ...]
    dead_letters: tuple[DeadLetter, ...]
    records: tuple[JournalRecord, ...]
    """The journal as it is written: the same record, or its parts if it would be too large."""

"""What a fold did since the last commit: batches to publish, records that left, offsets with their fate.

The shell publishes it in one transaction; replay and verification compare it; nothing else leaves a fold.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from topics.records import Drop, FinishedGroup, JournalRecord, TrainingBatch

CORE_VERSION = 3
"""Newest version of the fold's behaviour this code knows; it knows all before it, too. Which one is in force, the
configuration in the log says (`grouping.core_version`). A new key, estimator or maker needs a new version as well."""

BATCHED, DROPPED, DEAD_LETTERED, CONTROL = "batched", "dropped", "dead_lettered", "control"

DROP_REASONS = (
    "duplicate_uid",
    "stale_version",
    "future_version",
    "excluded",
    "too_old",
    "group_too_small",
    "zero_variance",
    "zero_advantage",
    "superseded_version",
    "late",
    "capacity",
    "cancelled",
    "too_large",
    "wrong_partition",
    "invalid",
    "skipped",
)
"""Why a record may be dropped; each is counted and named in the journal."""


class Record(NamedTuple):
    """One record of a partition of `rollouts`, as the fold takes it."""

    offset: int
    timestamp_ms: int
    """Append time, by the broker."""
    key: bytes | None
    value: bytes | None


class DeadLetter(NamedTuple):
    """A record whose bytes mean nothing."""

    record: Record
    error: str
    """What was wrong with it."""


@dataclass
class Changes:
    """Effects gathered since the last commit."""

    begin: int
    batches: list[TrainingBatch] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    finished: dict[str, list[int]] = field(default_factory=dict)
    """Offsets by fate."""
    admitted: list[int] = field(default_factory=list)
    delivered: list[int] = field(default_factory=list)
    finished_groups: list[FinishedGroup] = field(default_factory=list)

    @property
    def effects(self) -> bool:
        """Whether anything reached a fate."""
        return bool(self.batches or self.finished)


@dataclass(frozen=True)
class Output:
    """One task's part of a transaction."""

    journal: JournalRecord
    """All of it in one record, of whatever size."""
    batches: tuple[TrainingBatch, ...]
    dead_letters: tuple[DeadLetter, ...]
    records: tuple[JournalRecord, ...]
    """The journal as it is written: the same, or its parts where it would be too large."""

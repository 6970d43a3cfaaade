"""Counts of a run's records by place, which the ledger proves and a snapshot of a run estimates."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.topics.records.fates import BATCHED, CONTROL, DEAD_LETTERED, DROPPED, fate_and_reason


@dataclass
class RecordCounts:
    """Number of records of `rollouts` in each place, of batches, and of rollouts trained on or skipped."""

    produced: int = 0
    """Records of `rollouts`, including records that were deleted later."""
    rollouts: int = 0
    """Number of these records that are rollouts."""
    batched: int = 0
    batches: int = 0
    trained: int = 0
    skipped: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped rollouts by reason."""
    dead_lettered: int = 0
    control: int = 0
    in_flight: int = 0
    """Records read by grouping that have no fate yet."""
    unread: int = 0
    """Records not yet read by grouping."""

    def place(self, fates: Mapping[str, int]) -> None:
        """Set the counts of records that have a fate, from counts by fate as spelled in the journal."""
        self.batched = fates.get(BATCHED, 0)
        self.dead_lettered = fates.get(DEAD_LETTERED, 0)
        self.control = fates.get(CONTROL, 0)
        named = [(*fate_and_reason(counted), count) for counted, count in sorted(fates.items())]
        self.dropped = {reason: count for fate, reason, count in named if fate == DROPPED}

    @property
    def placed(self) -> int:
        """Number of records in any place; equals `produced` if the counts are right."""
        ended = self.batched + sum(self.dropped.values()) + self.dead_lettered + self.control
        return ended + self.in_flight + self.unread

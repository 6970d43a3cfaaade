"""Offsets in a task's journal that its commits point to: newest record, last snapshot, oldest record that is needed."""

from collections import deque
from dataclasses import dataclass, field

from rollstream.topics.records import JournalRecord
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

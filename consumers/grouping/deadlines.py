"""What falls due in stream time: a heap, so that a record costs the same with a thousand open groups as with many more.

Entries of groups that moved on are passed over, and cleared away before they are many; they hold no rollouts.
"""

import heapq
from enum import IntEnum
from typing import NamedTuple

from consumers.grouping.groups import Group, Stage


class Due(IntEnum):
    """What falls due; at the same instant in this order."""

    OPEN = 0
    """An incomplete group is over."""
    FUTURE = 1
    """A group has waited long enough for the policy clock."""
    AGE = 2
    """A sealed group may be too old for a batch."""
    BATCH_AGE = 3
    """The oldest group has waited long enough for its batch to fill."""


class _Entry(NamedTuple):
    due_ms: int
    kind: Due
    opened_offset: int


class Deadlines:
    """Deadlines of the groups that are not over."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._groups: dict[int, Group] = {}

    def add(self, due_ms: int, kind: Due, group: Group) -> None:
        """Have `group` fall due, unless it has moved on by then."""
        self._groups[group.opened_offset] = group
        heapq.heappush(self._heap, _Entry(due_ms, kind, group.opened_offset))
        if len(self._heap) > 64 + 4 * len(self._groups):
            self._heap = [entry for entry in dict.fromkeys(self._heap) if self._alive(entry)]
            heapq.heapify(self._heap)

    def forget(self, group: Group) -> None:
        """The group is over."""
        self._groups.pop(group.opened_offset, None)

    @property
    def next_ms(self) -> int | None:
        """When something is due next; None when nothing is."""
        while self._heap and not self._alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].due_ms if self._heap else None

    def pop(self, now_ms: int) -> tuple[Due, Group] | None:
        """The next thing due by `now_ms`, or None."""
        due_ms = self.next_ms
        if due_ms is None or due_ms > now_ms:
            return None
        entry = heapq.heappop(self._heap)
        return entry.kind, self._groups[entry.opened_offset]

    def __len__(self) -> int:
        return len(self._heap)

    def _alive(self, entry: _Entry) -> bool:
        group = self._groups.get(entry.opened_offset)
        if group is None:
            return False
        if entry.kind is Due.OPEN:
            return group.stage is Stage.OPEN
        if entry.kind is Due.FUTURE:
            return group.stage is Stage.WAITING
        if entry.kind is Due.BATCH_AGE:
            return group.stage is Stage.OFFERED
        return group.stage in (Stage.WAITING, Stage.OFFERED)

"""Deadlines in stream time, in a heap, so that the cost of a record hardly grows with the number of open groups.

Deadlines of groups that have moved on are ignored, and are removed before there are many. A deadline names its group by
offset, so it keeps no rollouts in memory.
"""

import heapq
from enum import IntEnum
from typing import NamedTuple

from rollstream.consumers.grouping.core.groups import Group, Stage


class DeadlineKind(IntEnum):
    """Kinds of deadlines. Deadlines at the same time fall due in this order."""

    OPEN = 0
    """An open group seals if it is complete enough, and is dropped otherwise."""
    FUTURE = 1
    """A sealed group has waited too long for the policy clock."""
    AGE = 2
    """A sealed group may be too old for a batch."""
    BATCH_AGE = 3
    """A sealed group has waited long enough for its batch to fill."""


class _Deadline(NamedTuple):
    due_ms: int
    kind: DeadlineKind
    opened_offset: int


class Deadlines:
    """Deadlines of the groups that are not finished."""

    def __init__(self) -> None:
        self._heap: list[_Deadline] = []
        self._groups: dict[int, Group] = {}

    def add(self, due_ms: int, kind: DeadlineKind, group: Group) -> None:
        """Add a deadline, which is ignored if the group has moved on when it is due."""
        self._groups[group.opened_offset] = group
        heapq.heappush(self._heap, _Deadline(due_ms, kind, group.opened_offset))
        if len(self._heap) > 64 + 4 * len(self._groups):
            self._heap = [deadline for deadline in dict.fromkeys(self._heap) if self._alive(deadline)]
            heapq.heapify(self._heap)

    def forget(self, group: Group) -> None:
        """Forget the deadlines of a finished group."""
        self._groups.pop(group.opened_offset, None)

    @property
    def next_ms(self) -> int | None:
        """Stream time of the next deadline; None if there is none."""
        while self._heap and not self._alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].due_ms if self._heap else None

    def pop(self, now_ms: int) -> tuple[DeadlineKind, Group] | None:
        """Remove and return the next deadline that is due at `now_ms`; None if there is none."""
        due_ms = self.next_ms
        if due_ms is None or due_ms > now_ms:
            return None
        deadline = heapq.heappop(self._heap)
        return deadline.kind, self._groups[deadline.opened_offset]

    def __len__(self) -> int:
        return len(self._heap)

    def _alive(self, deadline: _Deadline) -> bool:
        group = self._groups.get(deadline.opened_offset)
        if group is None:
            return False
        if deadline.kind is DeadlineKind.OPEN:
            return group.stage is Stage.OPEN
        if deadline.kind is DeadlineKind.FUTURE:
            return group.stage is Stage.WAITING
        if deadline.kind is DeadlineKind.BATCH_AGE:
            return group.stage is Stage.OFFERED
        return group.stage in (Stage.WAITING, Stage.OFFERED)

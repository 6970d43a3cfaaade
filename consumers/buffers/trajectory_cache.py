"""The newest trajectories of a buffer as rows in memory, first in first out: a read does not refresh.

Rows of all lie in one array per leaf, as a ring, so that a sample is one gather each. Not thread-safe: its owner holds
a lock.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.copying import copy_rows
from consumers.buffers.trajectory_index import Queue
from consumers.buffers.trajectory_rows import Layout, Rows, empty_rows
from topics.records import Int64

_NUMBER = np.dtype("<i8")
_SPARE = 4
"""A ring this many times as large as what it holds is made smaller."""


class TrajectoryCache:
    """At most `max_trajectories`; 0 is no bound."""

    def __init__(self, max_trajectories: int) -> None:
        self.max_trajectories = max_trajectories
        self.clear()

    def __len__(self) -> int:
        return len(self._starts)

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._starts, self._counts = Queue(_NUMBER), Queue(_NUMBER)
        self._leaves: dict[str, NDArray[Any]] = {}
        self._capacity = 0

    def put(self, layout: Layout, rows: Rows, count: int) -> None:
        """Copy `count` rows in; the oldest make room. Raises MemoryError, and holds then what it held."""
        leave = max(0, len(self) - self.max_trajectories + 1) if self.max_trajectories else 0
        start = self._place(leave, count)
        if start < 0:
            start = self._move(layout, leave, count)
        self.drop(leave)
        for path, leaf in self._leaves.items():
            copy_rows(leaf[start : start + count], rows[path])
        self._starts.append(start)
        self._counts.append(count)

    def drop(self, count: int) -> None:
        """Take the oldest out."""
        self._starts.drop(count)
        self._counts.drop(count)

    def rows(self, place: int) -> dict[str, NDArray[Any]]:
        """Rows of one, by its place from the oldest: views, valid until the next change."""
        start, count = int(self._starts.all[place]), int(self._counts.all[place])
        return {path: leaf[start : start + count] for path, leaf in self._leaves.items()}

    def take(self, places: Int64, local: Int64, batch: Rows, into: Int64 | None = None) -> None:
        """Copy row `local[i]` of trajectory `places[i]` to row `into[i]` of the batch; by default to row i."""
        rows = self._starts.all[places] + local
        for path, leaf in self._leaves.items():
            if into is None:
                # Any mode but "raise" writes without a copy in between; what is given is in bounds.
                np.take(leaf, rows, axis=0, out=batch[path], mode="clip")
            else:
                batch[path][into] = leaf[rows]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, room to grow included."""
        return sum(leaf.nbytes for leaf in self._leaves.values())

    def _place(self, leave: int, count: int) -> int:
        """Where `count` rows may lie together once the `leave` oldest are out; -1 where the ring is too small for that,
        or much larger than it need be."""
        starts, counts = self._starts.all[leave:], self._counts.all[leave:]
        if self._capacity > _SPARE * (int(counts.sum()) + count):
            return -1
        if not len(starts):
            return 0 if count <= self._capacity else -1
        head = int(starts[0])
        tail = int(starts[-1] + counts[-1])
        if int(starts[-1]) >= head:
            if tail + count <= self._capacity:
                return tail
            return 0 if count <= head else -1
        return tail if tail + count <= head else -1

    def _move(self, layout: Layout, leave: int, count: int) -> int:
        """Move all but the `leave` oldest to a ring that fits them and `count` rows more, and return where these may
        lie. It grows as it fills: what may never come asks for no memory, what was long once keeps none."""
        old, counts = self._starts.all[leave:], self._counts.all[leave:]
        held = int(counts.sum())
        capacity = held + count + (held + count) // 2
        if self.max_trajectories and np.all(counts == count):
            capacity = min(capacity, self.max_trajectories * count)  # no gaps between equals
        leaves = empty_rows(layout, capacity)
        starts = np.cumsum(counts) - counts
        for path, leaf in leaves.items():
            before = self._leaves.pop(path, leaf)
            for source, start, length in zip(old, starts, counts, strict=True):
                leaf[start : start + length] = before[source : source + length]
        self._leaves, self._capacity = leaves, capacity
        old[:] = starts
        return held

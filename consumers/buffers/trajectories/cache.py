"""Cache of the newest trajectories of a buffer, as rows in memory. The oldest trajectory leaves first, even if it was
read recently.

All rows of a leaf are in one array, used as a ring, so a sample is one gather for each leaf. Not thread-safe: its owner
holds a lock.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.array_copies import copy_rows
from rollstream.consumers.buffers.storage.layouts import Layout, empty_rows
from rollstream.consumers.buffers.trajectories.index import ColumnQueue
from rollstream.consumers.buffers.trajectories.rows import Rows
from rollstream.topics.records import Int64

_NUMBER = np.dtype("<i8")
_SPARE = 4
"""A ring larger than its content by more than this factor is shrunk."""


class TrajectoryCache:
    """Caches the rows of at most `max_trajectories` trajectories; 0 means no bound."""

    def __init__(self, max_trajectories: int) -> None:
        self.max_trajectories = max_trajectories
        self.clear()

    def __len__(self) -> int:
        return len(self._starts)

    def clear(self) -> None:
        """Forget everything, and release the memory."""
        self._starts, self._counts = ColumnQueue(_NUMBER), ColumnQueue(_NUMBER)
        self._leaves: dict[str, NDArray[Any]] = {}
        self._capacity = 0

    def put(self, layout: Layout, rows: Rows, count: int) -> None:
        """Copy `count` rows in, and remove the oldest to make room. Raises MemoryError; the cache is then unchanged."""
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
        """Remove the `count` oldest trajectories."""
        self._starts.drop(count)
        self._counts.drop(count)

    def rows(self, place: int) -> dict[str, NDArray[Any]]:
        """Rows of one trajectory, by its place from the oldest; views, valid until the next change."""
        start, count = int(self._starts.all[place]), int(self._counts.all[place])
        return {path: leaf[start : start + count] for path, leaf in self._leaves.items()}

    def gather(self, places: Int64, local: Int64, batch: Rows, into: Int64 | None = None) -> None:
        """Copy row `local[i]` of trajectory `places[i]` to row `into[i]` of the batch, by default to row i."""
        rows = self._starts.all[places] + local
        for path, leaf in self._leaves.items():
            if into is None:
                # All rows are in bounds, and mode "clip", unlike "raise", avoids a temporary copy.
                np.take(leaf, rows, axis=0, out=batch[path], mode="clip")
            else:
                batch[path][into] = leaf[rows]

    @property
    def nbytes(self) -> int:
        """Bytes of memory, including room to grow."""
        return sum(leaf.nbytes for leaf in self._leaves.values())

    def _place(self, leave: int, count: int) -> int:
        """Return the first of `count` adjacent rows that are free once the `leave` oldest trajectories are gone; -1 if
        there are no such rows, or if the ring is much too large."""
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
        """Move all but the `leave` oldest trajectories to a ring with room for `count` more rows, and return the start
        of that room. The size follows the content, so memory is neither reserved in advance nor kept once long
        trajectories are gone."""
        old, counts = self._starts.all[leave:], self._counts.all[leave:]
        held = int(counts.sum())
        capacity = held + count + (held + count) // 2
        if self.max_trajectories and np.all(counts == count):
            capacity = min(capacity, self.max_trajectories * count)  # Trajectories of equal size leave no gaps.
        leaves = empty_rows(layout, capacity)
        starts = np.cumsum(counts) - counts
        for path, leaf in leaves.items():
            before = self._leaves.pop(path, leaf)
            for source, start, length in zip(old, starts, counts, strict=True):
                leaf[start : start + length] = before[source : source + length]
        self._leaves, self._capacity = leaves, capacity
        old[:] = starts
        return held

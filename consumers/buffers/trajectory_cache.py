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
        """Copy `count` rows in; the oldest make room."""
        if self.max_trajectories and len(self) >= self.max_trajectories:
            self.drop(len(self) - self.max_trajectories + 1)
        start = self._place(layout, count)
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

    def _place(self, layout: Layout, count: int) -> int:
        """Where `count` rows may lie together."""
        if not len(self):
            if count > self._capacity:
                self._capacity = count * max(1, self.max_trajectories)
                self._leaves = empty_rows(layout, self._capacity)
            return 0
        head = int(self._starts.all[0])
        last = int(self._starts.all[-1])
        tail = last + int(self._counts.all[-1])
        if last >= head:
            if tail + count <= self._capacity:
                return tail
            if count <= head:
                return 0
        elif tail + count <= head:
            return tail
        return self._grow(layout, count)

    def _grow(self, layout: Layout, count: int) -> int:
        """Make room for `count` rows behind the newest, and return where."""
        counts = self._counts.all
        held = int(counts.sum())
        longest = max(count, int(counts.max()))
        self._capacity = max(2 * held, held + count, self.max_trajectories * longest)
        leaves = empty_rows(layout, self._capacity)
        starts = np.concatenate([[0], np.cumsum(counts)])
        for old, new, length in zip(self._starts.all, starts[:-1], counts, strict=True):
            for path, leaf in leaves.items():
                leaf[new : new + length] = self._leaves[path][old : old + length]
        self._leaves = leaves
        self._starts.all[:] = starts[:-1]
        return held

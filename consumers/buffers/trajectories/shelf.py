"""The trajectories of a buffer: index, cache of the newest, and a function that fetches those that are not cached.

The cache has the newest trajectories, so one comparison tells which rows are cached. All rows of a leaf are in one
array, used as a ring, so a sample is one gather for each leaf. Not thread-safe: the owner holds a lock.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.segments import Layout, empty_rows
from rollstream.consumers.buffers.trajectories.index import (
    ColumnQueue,
    Description,
    TrajectoryEntry,
    TrajectoryIndex,
    uuid_of,
)
from rollstream.consumers.buffers.trajectories.journal import JournalContent
from rollstream.consumers.buffers.trajectories.rows import (
    CheckedTrajectory,
    FetchedArrays,
    Rows,
    refuse_foreign,
    rows_of,
)
from rollstream.topics.records import Int64

LARGE_BYTES = 2**21
"""Size below which one thread finishes a copy before a second one could start."""


def copy_rows(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy an array into another of its shape and dtype."""
    if source.nbytes < LARGE_BYTES:
        target[...] = source
        return
    half = len(source) // 2
    other = _second().submit(np.copyto, target[half:], source[half:])
    np.copyto(target[:half], source[:half])
    other.result()


@lru_cache(maxsize=1)
def _second() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="copying")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_second.cache_clear)


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


_MAPPED_FILES = 256
"""Maximum number of files kept mapped, because opening a file takes longer than gathering rows from it."""


class TrajectoryShelf:
    """Trajectories by place. With `cache_size` None there is no cache; 0 caches everything."""

    def __init__(self, cache_size: int | None, fetch: Callable[[TrajectoryEntry], FetchedArrays]) -> None:
        self.index = TrajectoryIndex()
        self.layout: Layout = ()
        self._cache = None if cache_size is None else TrajectoryCache(cache_size)
        self._fetch = fetch
        self._mapped: dict[int, dict[str, NDArray[Any]]] = {}
        """Rows in mapped files by id; the file mapped first is unmapped first."""

    @property
    def cached(self) -> int:
        """Number of trajectories in the cache, which are the newest."""
        return 0 if self._cache is None else len(self._cache)

    def caches(self, count: int) -> int:
        """Number of trajectories, the newest of `count`, that the cache has room for."""
        return 0 if self._cache is None else min(count, self._cache.max_trajectories or count)

    def put(self, part: CheckedTrajectory, format_name: str) -> TrajectoryEntry:
        """Add a trajectory, which must have the shelf's layout. Raises MemoryError; the shelf is then unchanged."""
        record = part.trajectory
        if not len(self.index) and part.layout != self.layout:
            self.layout = part.layout
            if self._cache is not None:
                self._cache.clear()
        description = Description(
            part.steps, part.width, record.max_episode_length, record.model_weights_id, record.environment, format_name
        )
        self.remember(part.arrays, description)  # Fill the cache first, because that may raise MemoryError.
        return self.index.append(uuid_of(record.uid), description, part.size_bytes)

    def remember(self, arrays: Mapping[str, NDArray[Any]], description: Description) -> None:
        """Copy the arrays of the next trajectory into the cache."""
        if self._cache is not None:
            self._cache.put(self.layout, rows_of(arrays, description.steps), description.samples)

    def cached_rows(self, place: int) -> dict[str, NDArray[Any]]:
        """Rows of the cached trajectory at a place of the index; views, valid until the next change."""
        assert self._cache is not None
        return self._cache.rows(place - len(self.index) + len(self._cache))

    def prune(self, max_trajectories: int, max_bytes: int) -> list[TrajectoryEntry]:
        """Remove and return the oldest trajectories until the bounds are met; a bound of 0 is no bound."""
        return self.drop(self.index.over(max_trajectories, max_bytes))

    def drop(self, count: int) -> list[TrajectoryEntry]:
        """Remove and return the `count` oldest trajectories."""
        gone = self.index.drop(count)
        for entry in gone:
            self._mapped.pop(entry.trajectory_id, None)
        if self._cache is not None:
            self._cache.drop(max(0, len(self._cache) - len(self.index)))
        return gone

    def draw(self, window_size: int, count: int, generator: np.random.Generator) -> dict[str, NDArray[Any]] | None:
        """Draw at most `count` rows, uniformly with replacement from the steps of the newest `window_size`
        trajectories; return None if there are none."""
        window = self.index.window(window_size)
        count = min(count, window.samples)
        if not count:
            return None
        # Not generator.integers, because numpy guarantees only the stream of uniform numbers (NEP 19).
        drawn = (generator.random(count) * window.samples).astype(np.int64)
        drawn = np.minimum(drawn, window.samples - 1) + window.base
        places = np.searchsorted(window.ends, drawn, side="right")
        starts = np.where(places > 0, window.ends[places - 1], window.base)
        return self._gather(places + window.first, drawn - starts)

    def load(self, content: JournalContent) -> None:
        """Replace everything by the content of a journal; fill the cache with the newest trajectories."""
        self.index = TrajectoryIndex()
        self.index.extend(content.entries, content.descriptions)
        self.index.counter = content.counter
        self.layout = content.layout
        self._mapped.clear()
        if self._cache is not None:
            self._cache.clear()
            for place in range(len(content) - self.caches(len(content)), len(content)):
                entry = content[place]
                self.remember(self._checked(entry).arrays, entry.description)

    def content(self) -> JournalContent:
        """Return index and layout as the content of a journal."""
        return JournalContent.of(self.index, self.layout)

    def _gather(self, places: Int64, local: Int64) -> dict[str, NDArray[Any]]:
        batch = empty_rows(self.layout, len(places))
        first_cached = len(self.index) - self.cached
        cached = places >= first_cached
        if self._cache is not None and cached.any():
            into = None if cached.all() else np.flatnonzero(cached)
            chosen = slice(None) if into is None else into
            self._cache.gather(places[chosen] - first_cached, local[chosen], batch, into)
        missing = np.flatnonzero(~cached)
        missing = missing[np.argsort(places[missing], kind="stable")]
        changes = np.flatnonzero(np.diff(places[missing])) + 1
        for into in np.split(missing, changes) if len(missing) else ():
            rows = self._rows(self.index[int(places[into[0]])])
            for path, leaf in batch.items():
                leaf[into] = rows[path][local[into]]
        return batch

    def _rows(self, entry: TrajectoryEntry) -> Mapping[str, NDArray[Any]]:
        rows = self._mapped.get(entry.trajectory_id)
        if rows is None:
            arrays, mapped = self._checked(entry)
            rows = rows_of(arrays, entry.description.steps)
            if mapped:
                if len(self._mapped) == _MAPPED_FILES:
                    del self._mapped[next(iter(self._mapped))]
                self._mapped[entry.trajectory_id] = rows
        return rows

    def _checked(self, entry: TrajectoryEntry) -> FetchedArrays:
        fetched = self._fetch(entry)
        description = entry.description
        what = f"the file of trajectory {entry.trajectory_id}"
        refuse_foreign(fetched.arrays, self.layout, description.steps, description.width, what)
        return fetched

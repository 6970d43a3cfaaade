"""The trajectories a buffer holds, as it draws from them: index, cache, and a way to fetch what is not cached.

The cache holds the newest, so that which rows are cached is one comparison. Not thread-safe: its owner holds a lock.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.trajectory_cache import TrajectoryCache
from consumers.buffers.trajectory_index import About, Entry, TrajectoryIndex, uuid_of
from consumers.buffers.trajectory_journal import Content
from consumers.buffers.trajectory_rows import Checked, Fetched, Layout, empty_rows, refuse_foreign, rows_of
from topics.records import Int64

_MAPPED_FILES = 256
"""Most files whose maps are kept: opening one costs more than gathering from it."""


class TrajectoryShelf:
    """`cache_size` of None is no cache, of 0 one that holds everything."""

    def __init__(self, cache_size: int | None, fetch: Callable[[Entry], Fetched]) -> None:
        self.index = TrajectoryIndex()
        self.layout: Layout = ()
        self._cache = None if cache_size is None else TrajectoryCache(cache_size)
        self._fetch = fetch
        self._mapped: dict[int, dict[str, NDArray[Any]]] = {}
        """Rows in mapped files by id, first in first out."""

    @property
    def cached(self) -> int:
        """Trajectories in the cache: the newest."""
        return 0 if self._cache is None else len(self._cache)

    def put(self, part: Checked, format_name: str) -> Entry:
        """Add a trajectory whose arrays are those of the others. Raises MemoryError; all is then as it was."""
        of = part.trajectory
        if not len(self.index) and part.layout != self.layout:
            self.layout = part.layout
            if self._cache is not None:
                self._cache.clear()
        about = About(part.steps, part.width, of.max_episode_length, of.model_weights_id, of.environment, format_name)
        self.remember(part.arrays, about)  # first, as memory may not suffice
        return self.index.append(uuid_of(of.uid), about, part.size_bytes)

    def remember(self, arrays: Mapping[str, NDArray[Any]], about: About) -> None:
        """Copy the arrays of the trajectory that follows the newest in the cache."""
        if self._cache is not None:
            self._cache.put(self.layout, rows_of(arrays, about.steps), about.samples)

    def cached_rows(self, place: int) -> dict[str, NDArray[Any]]:
        """Rows of the trajectory at a place of the index, which is cached; views, valid until the next change."""
        assert self._cache is not None
        return self._cache.rows(place - len(self.index) + len(self._cache))

    def prune(self, max_trajectories: int, max_bytes: int) -> list[Entry]:
        """Take out the oldest until what is left is within the bounds; 0 is no bound."""
        return self.drop(self.index.over(max_trajectories, max_bytes))

    def drop(self, count: int) -> list[Entry]:
        """Take out so many of the oldest."""
        gone = self.index.drop(count)
        for entry in gone:
            self._mapped.pop(entry.trajectory_id, None)
        if self._cache is not None:
            self._cache.drop(max(0, len(self._cache) - len(self.index)))
        return gone

    def draw(self, window_size: int, count: int, generator: np.random.Generator) -> dict[str, NDArray[Any]] | None:
        """At most `count` rows, uniform over the steps of the newest `window_size` trajectories, with replacement; None
        where there are none."""
        window = self.index.window(window_size)
        count = min(count, window.samples)
        if not count:
            return None
        # By hand: numpy promises the stream of its uniform numbers, not that of its distributions (NEP 19).
        drawn = (generator.random(count) * window.samples).astype(np.int64)
        drawn = np.minimum(drawn, window.samples - 1) + window.base
        places = np.searchsorted(window.ends, drawn, side="right")
        starts = np.where(places > 0, window.ends[places - 1], window.base)
        return self._gather(places + window.first, drawn - starts)

    def become(self, content: Content) -> None:
        """Hold what a journal says; of its newest trajectories as many as fit are fetched into the cache."""
        self.index = TrajectoryIndex()
        entries = content.entries
        self.index.extend(entries["id"], entries["uuid"], entries["about"], entries["size_bytes"], content.abouts)
        self.index.counter = content.counter
        self.layout = content.layout
        self._mapped.clear()
        if self._cache is not None:
            self._cache.clear()
            room = self._cache.max_trajectories or len(content)
            for place in range(max(0, len(content) - room), len(content)):
                entry = content[place]
                self.remember(self._checked(entry).arrays, entry.about)

    def content(self) -> Content:
        """Index and layout as a journal says them."""
        return Content.of(self.index, self.layout)

    def _gather(self, places: Int64, local: Int64) -> dict[str, NDArray[Any]]:
        batch = empty_rows(self.layout, len(places))
        first_cached = len(self.index) - self.cached
        cached = places >= first_cached
        if self._cache is not None and cached.any():
            into = None if cached.all() else np.flatnonzero(cached)
            chosen = slice(None) if into is None else into
            self._cache.take(places[chosen] - first_cached, local[chosen], batch, into)
        missing = np.flatnonzero(~cached)
        missing = missing[np.argsort(places[missing], kind="stable")]
        changes = np.flatnonzero(np.diff(places[missing])) + 1
        for into in np.split(missing, changes) if len(missing) else ():
            rows = self._rows(self.index[int(places[into[0]])])
            for path, leaf in batch.items():
                leaf[into] = rows[path][local[into]]
        return batch

    def _rows(self, entry: Entry) -> Mapping[str, NDArray[Any]]:
        rows = self._mapped.get(entry.trajectory_id)
        if rows is None:
            arrays, mapped = self._checked(entry)
            rows = rows_of(arrays, entry.about.steps)
            if mapped:
                if len(self._mapped) == _MAPPED_FILES:
                    del self._mapped[next(iter(self._mapped))]
                self._mapped[entry.trajectory_id] = rows
        return rows

    def _checked(self, entry: Entry) -> Fetched:
        fetched = self._fetch(entry)
        about = entry.about
        what = f"the file of trajectory {entry.trajectory_id}"
        refuse_foreign(fetched.arrays, self.layout, about.steps, about.width, what)
        return fetched

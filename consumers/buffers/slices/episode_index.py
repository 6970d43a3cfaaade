"""The index of the episodes in a ring of steps, updated with each change and without scans.

Steps are numbered from the first step ever written. An episode is an ordered list of runs of consecutive steps, so
alternating writers do not split it. The ring overwrites the oldest steps, which are always the first remaining steps of
an episode.

A RankedSet is a binary tree of counts in one array: a change or a selection takes time proportional to the depth of the
tree.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

_LEAST_LEAVES = 1024


class RankedSet:
    """A set of non-negative integers; it takes 8 to 16 bytes for each integer up to the largest ever added."""

    def __init__(self, members: NDArray[np.bool_] | None = None) -> None:
        """Start with the numbers n for which `members[n]` is True; by default, with an empty set."""
        members = np.zeros(0, np.bool_) if members is None else members
        self._leaves = _LEAST_LEAVES
        while self._leaves < len(members):
            self._leaves *= 2
        self._counts = np.zeros(2 * self._leaves, np.int32)
        self._counts[self._leaves : self._leaves + len(members)] = members
        self._sum_up()

    def __len__(self) -> int:
        return int(self._counts[1])

    def __contains__(self, number: int) -> bool:
        return number < self._leaves and bool(self._counts[self._leaves + number])

    def add(self, number: int) -> None:
        """Add a number."""
        while number >= self._leaves:
            self._double()
        self._set(number, 1)

    def discard(self, number: int) -> None:
        """Remove a number, if it is a member."""
        if number < self._leaves:
            self._set(number, 0)

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the members at these ranks [N], where rank 0 is the smallest; ranks must be below the length."""
        rank, node = ranks.copy(), np.ones(len(ranks), np.int64)
        for _level in range(self._leaves.bit_length() - 1):
            node *= 2
            left = self._counts[node]
            right = rank >= left
            rank -= left * right
            node += right
        return node - self._leaves

    def _set(self, number: int, value: int) -> None:
        counts, node = self._counts.data, self._leaves + number
        change = value - counts[node]
        if change:
            while node:
                counts[node] += change
                node //= 2

    def _double(self) -> None:
        leaves = self._counts[self._leaves :]
        self._leaves *= 2
        self._counts = np.zeros(2 * self._leaves, np.int32)
        self._counts[self._leaves : self._leaves + len(leaves)] = leaves
        self._sum_up()

    def _sum_up(self) -> None:
        level = self._leaves // 2
        while level:
            self._counts[level : 2 * level] = self._counts[2 * level : 4 * level].reshape(level, 2).sum(1)
            level //= 2


Ints = NDArray[np.int64]

_VIEWS = 4
"""Number of slice lengths tracked at once; a further length costs a pass over the episodes."""
ROOM = 1024
"""Minimum number of rows of a column; rows without steps are removed only if there are more than this."""


class StepRange(NamedTuple):
    """Consecutive steps: a number of `steps`, from counter `at` on."""

    at: int
    steps: int


class EpisodeIndex:
    """Episodes by number, and runs by counter; numbers and counters only increase.

    Draws use the rank of an episode in the order of numbers. It depends only on the content, so draws from a restored
    index are the same. An episode takes about 100 bytes, and each further run of an episode 40 bytes.
    """

    def __init__(self) -> None:
        self._episodes = _Columns(("number", "begin", "length", "last_run"))
        self._runs = _Columns(("at", "count", "step", "episode"))
        self._first_run = 0
        """Serial number of the run in row 0."""
        self._left = 0
        """Number of leading rows of runs without remaining steps."""
        self._more: dict[int, list[int]] = {}
        """Serial numbers of the runs of each episode that has had more than one."""
        self._dead = 0
        """Number of rows of episodes without remaining steps."""
        self._views: dict[int, RankedSet] = {}
        """Rows of the episodes that have a minimum number of steps, by this minimum."""
        self.size = 0
        """Number of steps held."""

    @property
    def episodes(self) -> int:
        """Number of episodes that have steps in the ring."""
        return self._episodes.rows - self._dead

    # ------------------------------------------------------------------ changes

    def extend(self, episode: int, at: int, count: int, begin: int = 0) -> None:
        """Append `count` steps, the first with counter `at`, to the episode with number `episode`.

        A number above all earlier episode numbers begins a new episode, whose first `begin` steps are not stored.
        """
        episodes, runs = self._episodes, self._runs
        row = self._row_of(episode)
        if row < 0:
            row = episodes.append(episode, begin, 0, -1)
        before, last_run = episodes["length"][row], episodes["last_run"][row]
        last = runs.rows - 1
        if last_run == self._first_run + last >= 0 and runs["at"][last] + runs["count"][last] == at:
            runs["count"][last] += count
        else:
            serial = self._first_run + runs.append(at, count, episodes["begin"][row] + before, episode)
            episodes["last_run"][row] = serial
            if before:
                self._join(episode, last_run, serial)
        episodes["length"][row] = before + count
        self.size += count
        for length, view in self._views.items():
            if before < length <= before + count:
                view.add(row)

    def evict(self, below: int) -> list[int]:
        """Forget all steps below a counter, and return the episodes that have none left."""
        runs, ended = self._runs, []
        at, counts, steps, owners = (runs[name] for name in runs.names)
        while self._left < runs.rows and at[self._left] < below:
            run = self._left
            gone = min(counts[run], below - at[run])
            if self._shorten(owners[run], gone):
                ended.append(owners[run])
            at[run] += gone
            steps[run] += gone
            counts[run] -= gone
            self._left += not counts[run]
        if self._left > ROOM + runs.rows // 2:
            runs.keep(np.arange(self._left, runs.rows))
            self._first_run += self._left
            self._left = 0
        if self._dead > ROOM + self._episodes.rows // 2:
            self._episodes.keep(np.flatnonzero(self._episodes.array("length")))
            self._dead = 0
            self._views = {length: self._view_of(length) for length in self._views}
        return ended

    # ------------------------------------------------------------------ queries

    def end_of(self, episode: int) -> int:
        """Number of steps from the beginning of a held episode to its last step, forgotten steps included."""
        row = self._row_of(episode)
        return self._episodes["begin"][row] + self._episodes["length"][row]

    def with_length(self, length: int) -> RankedSet:
        """Rows of the episodes with at least `length` steps (1 or more). The index tracks this length afterwards."""
        view = self._views.pop(length, None)
        if view is None:
            view = self._view_of(length)
            if len(self._views) == _VIEWS:
                del self._views[next(iter(self._views))]
        self._views[length] = view  # The least recently used view is the first to be removed.
        return view

    def lengths(self, rows: Ints) -> Ints:
        """Numbers of steps of the episodes in these rows."""
        return self._episodes.array("length")[rows]

    def ranges(self, row: int, start: int, count: int) -> list[StepRange]:
        """Ranges of `count` steps of a row's episode, from its `start`-th remaining step; all of them must exist."""
        episodes, runs = self._episodes, self._runs
        step = episodes["begin"][row] + start
        serials: Sequence[int] = self._more.get(episodes["number"][row], (episodes["last_run"][row],))
        place = 0
        if len(serials) > 1:
            held = bisect_left(serials, self._first_run + self._left)
            place = bisect_right(serials, step, lo=held, key=self._step_of) - 1
        ranges = []
        while count:
            run = serials[place] - self._first_run
            skipped = step - runs["step"][run]
            taken = min(count, runs["count"][run] - skipped)
            ranges.append(StepRange(runs["at"][run] + skipped, taken))
            step, count, place = step + taken, count - taken, place + 1
        return ranges

    # ------------------------------------------------------------------ as a whole

    def columns(self) -> dict[str, Ints]:
        """Return the whole content, from which `of` creates an equal index."""
        live = np.flatnonzero(self._episodes.array("length"))
        held = {f"episode_{name}": self._episodes.array(name)[live] for name in ("number", "begin")}
        return held | {f"run_{name}": self._runs.array(name)[self._left :].copy() for name in self._runs.names}

    @classmethod
    def of(cls, columns: Mapping[str, Ints]) -> Self:
        """Create an index from the columns of another. Raises KeyError or ValueError if they are not a valid index."""
        index = cls()
        numbers, owners, counts = columns["episode_number"], columns["run_episode"], columns["run_count"]
        if not np.array_equal(np.unique(owners), numbers):
            raise ValueError("episodes and runs do not belong together")
        rows = np.searchsorted(numbers, owners)
        lengths, last_run = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1, np.int64)
        np.add.at(lengths, rows, counts)
        np.maximum.at(last_run, rows, np.arange(len(owners)))
        index._episodes.fill(numbers, columns["episode_begin"], lengths, last_run)
        index._runs.fill(*(columns[f"run_{name}"] for name in index._runs.names))
        index.size = int(counts.sum())
        for serial in np.flatnonzero(np.bincount(rows, minlength=len(numbers))[rows] > 1).tolist():
            index._more.setdefault(int(owners[serial]), []).append(serial)
        return index

    # ------------------------------------------------------------------ helpers

    def _row_of(self, episode: int) -> int:
        """Row of an episode; -1 if there is none."""
        numbers, rows = self._episodes["number"], self._episodes.rows
        row = bisect_left(numbers, episode, 0, rows)
        return row if row < rows and numbers[row] == episode else -1

    def _step_of(self, serial: int) -> int:
        return int(self._runs["step"][serial - self._first_run])

    def _join(self, episode: int, before: int, serial: int) -> None:
        serials = self._more.setdefault(episode, [before])
        serials.append(serial)
        half = len(serials) // 2
        if serials[half] < self._first_run + self._left:
            del serials[:half]

    def _shorten(self, episode: int, gone: int) -> bool:
        """Remove the first steps of an episode, and return whether none are left."""
        row = self._row_of(episode)
        before = self._episodes["length"][row]
        self._episodes["begin"][row] += gone
        self._episodes["length"][row] = before - gone
        self.size -= gone
        for length, view in self._views.items():
            if before - gone < length <= before:
                view.discard(row)
        if before > gone:
            return False
        self._dead += 1
        self._more.pop(episode, None)
        return True

    def _view_of(self, length: int) -> RankedSet:
        return RankedSet(self._episodes.array("length") >= length)


class _Columns:
    """Columns of integers with room to grow: `[name]` is fast for one number, `array(name)` for many."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.rows = 0
        self._set_data(np.zeros((len(names), ROOM), np.int64))

    def __getitem__(self, name: str) -> memoryview:
        """Return a column to read and write by row; rows from `rows` on are unused. Valid until a row is added."""
        return self._cells[name]

    def array(self, name: str) -> Ints:
        """Return a column as an array, which is a view."""
        return self._data[self.names.index(name), : self.rows]

    def append(self, *values: int) -> int:
        """Add a row, and return its number."""
        row = self.rows
        if row == self._data.shape[1]:
            self._set_data(np.concatenate([self._data, np.zeros_like(self._data)], axis=1))
        for cells, value in zip(self._cells.values(), values, strict=True):
            cells[row] = value
        self.rows += 1
        return row

    def keep(self, rows: Ints) -> None:
        """Keep these rows, in this order."""
        self.fill(*self._data[:, rows])

    def fill(self, *columns: Ints) -> None:
        """Replace the columns."""
        data = np.zeros((len(columns), max(ROOM, 2 * len(columns[0]))), np.int64)
        data[:, : len(columns[0])] = columns
        self.rows = len(columns[0])
        self._set_data(data)

    def _set_data(self, data: Ints) -> None:
        self._data = data
        # Accessing an item of a memoryview takes a third of the time of an array.
        self._cells = {name: memoryview(column) for name, column in zip(self.names, data, strict=True)}

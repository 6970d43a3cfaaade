"""The episode slice buffer: slices of one length, drawn from episodes of any length in memory-mapped files.

It keeps the newest steps, and is filled by hand or from the log. Once `add` has returned, its item survives the
process. Two buffers of the same seed that are filled to the same position of one partition have the same content and
draws; see `rollstream.consumers.buffers.protocol` for several partitions. Adding, drawing and saving are thread-safe.

Draws are uniform over episodes, then over starts: a long episode is drawn as often as a short one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.slices.episode_cuts import (
    Boundaries,
    EpisodePart,
    parts_of_episode,
    parts_of_trajectory,
)
from rollstream.consumers.buffers.slices.state import SliceSide
from rollstream.consumers.buffers.slices.store import SliceStore
from rollstream.consumers.buffers.storage.fork_safe_locks import fork_safe_lock
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.consumers.buffers.storage.segments import SegmentFiles
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, RecordError, RollstreamError
from rollstream.topics.wire.trajectory_arrays import Trajectory, Tree, nest

LENGTHS, MASK = "lengths", "mask"


class NothingToDraw(RollstreamError):
    """No episode of a buffer is long enough for a slice."""


class SlicePlaces(NamedTuple):
    """Places of drawn slices in the ring."""

    lengths: NDArray[np.int64]
    steps: list[tuple[int, int, int]]
    """Ranges of steps (slice number, counter of the first step, number of steps), in order of slices."""


def check_drawable(side: SliceSide, length: int, least: int) -> None:
    """Raise NothingToDraw unless an episode has `least` steps, the minimum for a slice of `length`."""
    index = side.index
    if not len(index.with_length(least)):
        why = f"none of {index.episodes} episodes has {length} steps" if index.size else "it is empty"
        raise NothingToDraw(f"no slice of {length} steps can be drawn: {why}; add longer episodes first")


def draw(side: SliceSide, seed: int, count: int, length: int, least: int) -> SlicePlaces:
    """Draw `count` slices of `length` steps. A shorter episode with at least `least` steps gives all its steps.

    This counts as one draw of the side. Raises NothingToDraw.
    """
    check_drawable(side, length, least)
    rows = side.index.with_length(least)
    # Not generator.integers, because numpy guarantees only the stream of uniform numbers (NEP 19).
    uniform = generator_at(seed, side.draws).random((2, count))
    side.draws += 1
    chosen = rows.select((uniform[0] * len(rows)).astype(np.int64))
    held = side.index.lengths(chosen)
    lengths = np.minimum(held, length)
    starts = (uniform[1] * (held - lengths + 1)).astype(np.int64)
    places = zip(chosen.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    steps = [
        (number, steps_range.at, steps_range.steps)
        for number, (row, start, taken) in enumerate(places)
        for steps_range in side.index.ranges(row, start, taken)
    ]
    return SlicePlaces(lengths, steps)


def gather(files: SegmentFiles, drawn: SlicePlaces, length: int, *, padded: bool) -> dict[str, NDArray[Any]]:
    """Return arrays by path: [slices, length, ...] with zeros after short slices if `padded`, else [all steps, ...]."""
    count = len(drawn.lengths)
    rows = count * length if padded else int(drawn.lengths.sum())
    steps, to, before = [], 0, -1
    for number, at, taken in drawn.steps:
        if padded and number != before:
            to, before = number * length, number
        steps.append((to, at, taken))
        to += taken
    leaves = files.gather(steps, rows)
    if padded:
        return {path: leaf.reshape(count, length, *leaf.shape[1:]) for path, leaf in leaves.items()}
    return leaves


def mark_last(leaves: dict[str, NDArray[Any]], path: str, drawn: SlicePlaces, length: int, *, padded: bool) -> None:
    """Set the last step of each slice to True under a path; steps that are stored as True stay."""
    count = len(drawn.lengths)
    if padded:
        last: tuple[Any, ...] = (np.arange(count), drawn.lengths - 1)
        shape: tuple[int, ...] = (count, length)
    else:
        last, shape = (np.cumsum(drawn.lengths) - 1,), (int(drawn.lengths.sum()),)
    leaves.setdefault(path, np.zeros(shape, np.bool_))[last] = True


CAPACITY = 10_000_000
"""Default number of steps of a ring."""
SLICE_LEN = 80
"""Default number of steps of a slice."""
__all__ = ["EpisodeSliceBuffer", "NothingToDraw"]


class EpisodeSliceBuffer(Closing):
    """Slices of episodes of any length, drawn from a ring of steps in memory-mapped files.

    All episodes have the same arrays as the first: paths, dtypes, and shapes of a step. Episodes must not have arrays
    named `lengths` or `mask`, because samples add them. Samples also add `truncated_key` if it is not stored.
    """

    _SIDES = 1
    _side = 0
    """The side that this buffer draws from."""

    def __init__(
        self,
        directory: str | Path,
        capacity: int = CAPACITY,
        slice_len: int | None = SLICE_LEN,
        *,
        num_slices: int | None = None,
        strict_length: bool = True,
        pad_output: bool = False,
        seed: int = 0,
        boundaries: Boundaries | None = None,
        truncated_key: str = "truncated",
        read_only: bool = False,
    ) -> None:
        """Open or create a directory.

        `capacity` is in steps. With `slice_len`, slices have that many steps; with `num_slices`, samples have that many
        slices (`sample_steps`). Without `strict_length`, a short episode gives all its steps as one slice, to which
        `pad_output` adds zeros. `boundaries` names the arrays that mark the ends of episodes.

        Raises ConfigurationError for invalid settings, StoreError if another process writes to the directory or the
        files are damaged.
        """
        if (slice_len is None) == (num_slices is None):
            raise ConfigurationError(
                f"slice_len {slice_len} and num_slices {num_slices}: give exactly one of them, and None for the other"
            )
        if capacity < 1 or (slice_len or num_slices or 0) < 1:
            raise ConfigurationError(
                f"capacity {capacity}, slice_len {slice_len}, num_slices {num_slices}: each must be at least 1"
            )
        if slice_len is not None and slice_len > capacity:
            raise ConfigurationError(f"slice_len {slice_len} is above the capacity {capacity}; raise the capacity")
        if pad_output and strict_length:
            raise ConfigurationError("pad_output pads short slices, which strict_length excludes; set only one of them")
        self.slice_len = slice_len
        self.num_slices = num_slices
        self._strict = strict_length
        self._pad = pad_output
        self._seed = seed
        self._boundaries = boundaries or Boundaries()
        self._truncated_key = truncated_key
        self._lock = fork_safe_lock()
        self._store = SliceStore(Path(directory), capacity, self._SIDES, read_only=read_only)

    # ------------------------------------------------------------------ adding

    def add(
        self,
        item: Tree | Trajectory,
        /,
        *,
        at: tuple[int, int] | None = None,
        episode: str = "",
        last: bool = True,
    ) -> bool:
        """Add a tree of [T, ...] arrays or a trajectory, and return whether it was added.

        A tree is cut by episode ids, or after each done flag; without them it is one episode. With `episode` it
        continues the open episode of that uid, or begins it; with `last` False the episode stays open, so that writers
        may alternate. A trajectory is cut by its spans, or else each column is cut by ids or done flags.

        `at` is the (partition, offset) of the item's record. A record below the position was stored or skipped
        before, so False is returned. Raises RecordError if the item is invalid or its arrays differ from the stored
        arrays, StoreError if it cannot be written; then nothing is added, and the position stays.
        """
        with self._lock:
            if self._has(at):
                return False
            return self.add_parts(self.cut(item, episode=episode, last=last), at=at)

    def cut(self, item: Tree | Trajectory, /, *, episode: str = "", last: bool = True) -> list[EpisodePart]:
        """Return the parts of episodes that `add` stores. Raises RecordError for an invalid item."""
        if not isinstance(item, Trajectory):
            return parts_of_episode(item, self._boundaries, episode=episode, first=not episode, last=last)
        if episode or not last:
            raise RecordError(f"trajectory {item.uid!r}: its spans tell which episodes continue; omit episode and last")
        return parts_of_trajectory(item, self._boundaries)

    def check(self, parts: Sequence[EpisodePart]) -> None:
        """Raise RecordError for parts that differ from the stored arrays, or have names that samples use."""
        for part in parts:
            taken = {LENGTHS, MASK} & part.leaves.keys()
            if taken:
                raise RecordError(f"arrays {sorted(taken)} have names that samples use; rename them")
        with self._lock:
            self._store.check(parts)

    def add_parts(self, parts: Sequence[EpisodePart], *, at: tuple[int, int] | None = None) -> bool:
        """Add the parts that `cut` returned. Returns and raises the same as `add`."""
        with self._lock:
            if self._has(at):
                return False
            self.check(parts)
            self._store.add(self._routed(parts), at)
            return True

    def skip(self, at: tuple[int, int]) -> bool:
        """Move the position past a refused record; return False if it is already past the record."""
        return self.add_parts((), at=at)

    # ------------------------------------------------------------------ drawing

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw `batch_size` slices with replacement, as a tree of [batch_size, slice_len, ...] arrays.

        For each slice, an episode is drawn uniformly from those that are long enough, and a start uniformly within it.
        The last step of each slice is marked under `truncated_key`: bool [batch_size, slice_len], or the stored array
        of that name.

        Without `strict_length` a sample also has `lengths` int64 [batch_size]. Its slices are concatenated, so arrays
        are [sum of lengths, ...]; with `pad_output` they are [batch_size, slice_len, ...], and zero where `mask`, bool
        [batch_size, slice_len], is False.

        Raises NothingToDraw if no episode is long enough, ConfigurationError if `batch_size` is below 1.
        """
        if self.slice_len is None:
            raise ConfigurationError("num_slices is set, so slices have no fixed length; call sample_steps")
        return self.draw(batch_size, self.slice_len)

    def sample_steps(self, steps: int, /) -> dict[str, Any]:
        """Like `sample`, for a total number of steps, a multiple of `slice_len` or `num_slices`."""
        return self.draw(*self.slices_in(steps))

    def slices_in(self, steps: int) -> tuple[int, int]:
        """Return the number and length of the slices in a total of `steps`. Raises ConfigurationError."""
        divisor = self.slice_len or self.num_slices or 1
        if steps < 1 or steps % divisor:
            name = "num_slices" if self.slice_len is None else "slice_len"
            raise ConfigurationError(f"{steps} steps cannot be divided by {name} {divisor}; request a multiple of it")
        other = steps // divisor
        return (divisor, other) if self.slice_len is None else (other, divisor)

    def draw(self, count: int, length: int) -> dict[str, Any]:
        """Like `sample`, for slices of any length."""
        if count < 1:
            raise ConfigurationError(f"a sample of {count} slices; draw at least 1")

        def read() -> Any:
            drawn = draw(self._state, self._seed, count, length, self._least(length))
            leaves = gather(self._store.files(self._side), drawn, length, padded=self._padded)
            return self._completed(leaves, drawn, length)

        with self._lock:
            return nest(self._store.reading(read))

    def check_drawable(self, length: int) -> None:
        """Raise NothingToDraw if no episode is long enough for a slice of `length` steps."""
        with self._lock:
            self._store.refresh()
            check_drawable(self._state, length, self._least(length))

    def size(self) -> int:
        """Number of steps held."""
        with self._lock:
            self._store.refresh()
            return self._state.index.size

    def __len__(self) -> int:
        return self.size()

    def is_open(self, episode: str) -> bool:
        """Whether the episode of this uid is open and has steps in the ring."""
        with self._lock:
            self._store.refresh()
            return episode in self._state.open

    @property
    def position(self) -> dict[int, int]:
        """Next offset to read, by partition; empty if nothing is from the log."""
        with self._lock:
            self._store.refresh()
            return dict(self._store.state.position)

    def stats(self) -> dict[str, Any]:
        """Return numbers of steps (held, capacity, ever added), of episodes (all, drawable, open) and of draws."""
        with self._lock:
            self._store.refresh()
            state = self._state
            least = self._least(self.slice_len or 1)
            return {
                "size": state.index.size,
                "capacity": self._store.state.capacity,
                "total_steps_added": state.head,
                "num_episodes": state.index.episodes,
                "num_episodes_to_draw_from": len(state.index.with_length(least)),
                "num_open_episodes": len(state.open),
                "draws": state.draws,
            }

    # ------------------------------------------------------------------ on disk

    def flush(self) -> None:
        """Write all added steps to disk, so that they survive a crash of the machine. Raises StoreError."""
        with self._lock:
            self._store.flush()

    def save(self, directory: str | Path, /) -> None:
        """Write everything to disk, or copy it to another `directory`. If it raises StoreError, nothing changes there.

        Other threads can add and draw during the copy.
        """
        self._store.save(Path(directory), self._lock)

    def load(self, directory: str | Path, /) -> None:
        """Replace the content by a saved buffer of the same capacity; settings stay. If it raises StoreError, nothing
        changes."""
        with self._lock:
            self._store.load(Path(directory))

    def close(self) -> None:
        """Flush and close, so that another process may write. Raises StoreError."""
        with self._lock:
            self._store.close()

    # ------------------------------------------------------------------ helpers

    @property
    def _state(self) -> SliceSide:
        return self._store.state.sides[self._side]

    def _routed(self, parts: Sequence[EpisodePart]) -> list[Sequence[EpisodePart]]:
        """Return the parts of each side."""
        return [parts if side == self._side else () for side in range(len(self._store.state.sides))]

    def _has(self, at: tuple[int, int] | None) -> bool:
        return at is not None and at[1] < self._store.state.position.get(at[0], 0)

    @property
    def _padded(self) -> bool:
        """Whether all slices of a sample have one length, padded or not."""
        return self._strict or self._pad

    def _least(self, length: int) -> int:
        """Number of steps that an episode must have for a slice."""
        return length if self._strict else 1

    def _completed(self, leaves: dict[str, NDArray[Any]], drawn: SlicePlaces, length: int) -> dict[str, NDArray[Any]]:
        """Add the arrays that mark where slices end."""
        mark_last(leaves, self._truncated_key, drawn, length, padded=self._padded)
        if not self._strict:
            leaves[LENGTHS] = drawn.lengths
        if self._pad:
            leaves[MASK] = np.arange(length) < drawn.lengths[:, None]
        return leaves

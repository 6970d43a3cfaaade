"""The episode slice buffer: pieces of one length out of episodes of any, kept in memory-mapped files.

A ring of steps, filled by hand or from the log. What `add` returned for outlives the process, and filled to the same
position of one partition two buffers of a seed hold and give the same; see `consumers.buffers.protocol` for several.
Safe to add to, draw from and save in several threads.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.episode_cuts import Boundaries, EpisodePart, parts_of_episode, parts_of_trajectory
from consumers.buffers.files import StoreError
from consumers.buffers.slice_draws import LENGTHS, MASK, Drawn, NothingToDraw, check_drawable, draw, gather, mark_last
from consumers.buffers.slice_store import SliceStore
from consumers.closing import Closing
from topics.errors import ConfigurationError, RecordError
from topics.trajectories import Trajectory, Tree, nest

_TRIES = 20
__all__ = ["EpisodeSliceBuffer", "NothingToDraw"]


class EpisodeSliceBuffer(Closing):
    """See the module.

    The arrays of the first episode are those of all: paths, dtypes and shapes of a step. Names that samples bring with
    them (`truncated_key`, where it is not stored, `lengths` and `mask`) must not be stored by other means.
    """

    def __init__(
        self,
        directory: str | Path,
        capacity: int = 10_000_000,
        slice_len: int | None = 80,
        *,
        num_slices: int | None = None,
        strict_length: bool = True,
        pad_output: bool = False,
        seed: int = 0,
        boundaries: Boundaries | None = None,
        truncated_key: str = "truncated",
        read_only: bool = False,
    ) -> None:
        """Open a directory, or begin one.

        `capacity` is in steps. With `slice_len`, slices have that many steps; with `num_slices`, samples have that many
        slices (`sample_steps`). Without `strict_length` episodes that are too short give all they have, and with
        `pad_output` zeros behind that. `boundaries` says which arrays tell where episodes end.

        Raises ConfigurationError for settings that make no buffer, StoreError where another process writes there or
        what lies there is not whole.
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
            raise ConfigurationError(f"slices of {slice_len} steps do not fit a ring of {capacity}; raise its capacity")
        if pad_output and strict_length:
            raise ConfigurationError("pad_output fills up slices that strict_length rules out; set only one of them")
        self.slice_len = slice_len
        self.num_slices = num_slices
        self._strict = strict_length
        self._pad = pad_output
        self._seed = seed
        self._boundaries = boundaries or Boundaries()
        self._truncated_key = truncated_key
        self._lock = threading.RLock()
        self._store = SliceStore(Path(directory), capacity, read_only=read_only)

    # ------------------------------------------------------------------ in

    def add(
        self,
        item: Tree | Trajectory,
        /,
        *,
        at: tuple[int, int] | None = None,
        episode: str = "",
        last: bool = True,
    ) -> bool:
        """Put in a tree of [T, ...] arrays, or a trajectory; returns whether it is in.

        A tree is cut by episode ids or after each done, where it has them, and is one episode where it has not. With
        `episode` it goes on with the open episode of that uid, or begins it, and with `last` False leaves it open: so
        writers may take turns. A trajectory is cut by its spans, or else column by column by ids or done.

        `at` is (partition, offset) of the record it came from: what lies below the position is in already, or was
        skipped, and False is returned. Raises RecordError for what is unsound or differs from what is stored,
        StoreError where it cannot be written; then none of it is in, and the position stays.
        """
        with self._lock:
            if self._has(at):
                return False
            return self.add_parts(self.cut(item, episode=episode, last=last), at=at)

    def cut(self, item: Tree | Trajectory, /, *, episode: str = "", last: bool = True) -> list[EpisodePart]:
        """What `add` puts in, part by part. Raises RecordError for what is unsound."""
        if not isinstance(item, Trajectory):
            return parts_of_episode(item, self._boundaries, episode=episode, first=not episode, last=last)
        if episode or not last:
            raise RecordError(f"trajectory {item.uid!r}: its spans say what goes on; leave episode and last out")
        return parts_of_trajectory(item, self._boundaries)

    def check(self, parts: Sequence[EpisodePart]) -> None:
        """Raises RecordError for parts that differ from what is stored, or have names that samples use."""
        for part in parts:
            taken = {LENGTHS, MASK} & part.leaves.keys()
            if taken:
                raise RecordError(f"arrays {sorted(taken)} have names that samples use; rename them")
        with self._lock:
            self._store.check(parts)

    def add_parts(self, parts: Sequence[EpisodePart], *, at: tuple[int, int] | None = None) -> bool:
        """Put in what `cut` gave; as `add`."""
        with self._lock:
            if self._has(at):
                return False
            self.check(parts)
            self._store.add(parts, at)
            return True

    def skip(self, at: tuple[int, int]) -> bool:
        """Move the position past a record that was refused; False where it is there already."""
        return self.add_parts((), at=at)

    # ------------------------------------------------------------------ out

    def sample(self, batch_size: int) -> dict[str, Any]:
        """`batch_size` slices, with replacement: a tree of [batch_size, slice_len, ...] arrays.

        Each is drawn from an episode, all that are long enough being as likely, and from a start, all in it being as
        likely. The last step of a slice is marked under `truncated_key`: bool [batch_size, slice_len], or what is
        stored there.

        Without `strict_length` there are `lengths` int64 [batch_size] too, and slices lie one after another, so arrays
        are [sum of lengths, ...]; with `pad_output` they are [batch_size, slice_len, ...] and zero where `mask`, bool
        [batch_size, slice_len], is False.

        Raises NothingToDraw where no episode is long enough, and ConfigurationError for less than one slice.
        """
        if self.slice_len is None:
            raise ConfigurationError("the length of slices follows from how many steps are drawn; call sample_steps")
        return self.draw(batch_size, self.slice_len)

    def sample_steps(self, steps: int, /) -> dict[str, Any]:
        """As `sample`, for a number of steps in all, which `slice_len` or `num_slices` must divide."""
        return self.draw(*self.slices_in(steps))

    def slices_in(self, steps: int) -> tuple[int, int]:
        """How many slices a number of steps makes, and how long they are. Raises ConfigurationError."""
        divisor = self.slice_len or self.num_slices or 1
        if steps < 1 or steps % divisor:
            name = "num_slices" if self.slice_len is None else "slice_len"
            raise ConfigurationError(f"{steps} steps cannot be cut by {name} {divisor}; ask for a multiple of it")
        other = steps // divisor
        return (divisor, other) if self.slice_len is None else (other, divisor)

    def draw(self, count: int, length: int) -> dict[str, Any]:
        """As `sample`, for slices of any length."""
        if count < 1:
            raise ConfigurationError(f"a sample of {count} slices; draw at least 1")
        with self._lock:
            for _attempt in range(_TRIES):
                self._store.refresh()
                drawn = draw(self._store.state, self._seed, count, length, self._least(length))
                leaves = gather(self._store.files, drawn, length, padded=self._padded)
                # Who only reads looks whether the writer came by; for the writer itself this is always so.
                self._store.refresh()
                if drawn.oldest >= self._store.state.low:
                    return nest(self._completed(leaves, drawn, length))
            raise StoreError(
                f"the writer overwrote what was drawn {_TRIES} times; the ring is too small for its writers"
            )

    def check_drawable(self, length: int) -> None:
        """Raises NothingToDraw where no episode is long enough for a slice of so many steps."""
        with self._lock:
            check_drawable(self._store.state, length, self._least(length))

    def size(self) -> int:
        """Steps held."""
        with self._lock:
            self._store.refresh()
            return self._store.state.index.size

    def __len__(self) -> int:
        return self.size()

    def is_open(self, episode: str) -> bool:
        """Whether an episode of this uid goes on, of which steps are held."""
        with self._lock:
            return episode in self._store.state.open

    @property
    def position(self) -> dict[int, int]:
        """Next offset to be read, by partition; empty where nothing came from the log."""
        with self._lock:
            return dict(self._store.state.position)

    def stats(self) -> dict[str, Any]:
        """Figures: steps held and ever added, episodes, those long enough for a slice and those open, draws."""
        with self._lock:
            self._store.refresh()
            state = self._store.state
            least = self._least(self.slice_len or 1)
            return {
                "size": state.index.size,
                "capacity": state.capacity,
                "total_steps_added": state.head,
                "num_episodes": state.index.episodes,
                "num_episodes_to_draw_from": len(state.index.with_length(least)),
                "num_open_episodes": len(state.open),
                "draws": state.draws,
            }

    # ------------------------------------------------------------------ on disk

    def flush(self) -> None:
        """Have everything that was added on disk, for when the machine stops. Raises StoreError."""
        with self._lock:
            self._store.flush()

    def save(self, directory: str | Path, /) -> None:
        """Have everything on disk, as a copy where `directory` is another. Raises StoreError, and nothing changed."""
        with self._lock:
            self._store.save(Path(directory))

    def load(self, directory: str | Path, /) -> None:
        """Become what was saved there, of the same capacity; settings stay. Raises StoreError, and nothing changed."""
        with self._lock:
            self._store.load(Path(directory))

    def close(self) -> None:
        """Flush and close, so that another process may write. Raises StoreError."""
        with self._lock:
            self._store.close()

    # ------------------------------------------------------------------ within

    def _has(self, at: tuple[int, int] | None) -> bool:
        return at is not None and at[1] < self._store.state.position.get(at[0], 0)

    @property
    def _padded(self) -> bool:
        """Whether all slices of a sample have one length, filled up or not."""
        return self._strict or self._pad

    def _least(self, length: int) -> int:
        """Steps an episode must have for a slice."""
        return length if self._strict else 1

    def _completed(self, leaves: dict[str, NDArray[Any]], drawn: Drawn, length: int) -> dict[str, NDArray[Any]]:
        """With what says where slices end."""
        mark_last(leaves, self._truncated_key, drawn, length, padded=self._padded)
        if not self._strict:
            leaves[LENGTHS] = drawn.lengths
        if self._pad:
            leaves[MASK] = np.arange(length) < drawn.lengths[:, None]
        return leaves

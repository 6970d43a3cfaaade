"""The trajectory buffer: [T, B, ...] arrays in memory or files; samples are single steps of the newest trajectories.

It is filled by hand or from the log; position and content change together. Two buffers of the same seed that are filled
to the same position of one partition give the same samples; see `rollstream.consumers.buffers.protocol` for several
partitions. Adding, drawing and saving are thread-safe: a sample sees each change completely or not at all.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollstream.consumers.buffers.storage.fork_safe_locks import fork_safe_lock
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.consumers.buffers.storage.segments import Layout, refuse_other
from rollstream.consumers.buffers.trajectories.checkpoint import (
    read_checkpoint,
    shard,
    write_checkpoint,
    write_documents,
)
from rollstream.consumers.buffers.trajectories.formats import DEFAULT, format_named, with_plain_fields
from rollstream.consumers.buffers.trajectories.index import TrajectoryEntry
from rollstream.consumers.buffers.trajectories.journal import DrawRecord, JournalContent, PositionRecord
from rollstream.consumers.buffers.trajectories.memory_store import TrajectoryMemory
from rollstream.consumers.buffers.trajectories.rows import CheckedTrajectory, check_trajectory
from rollstream.consumers.buffers.trajectories.shelf import TrajectoryShelf
from rollstream.consumers.buffers.trajectories.store import (
    AddOperation,
    DropOperation,
    TrajectoryStore,
)
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, RecordError, RollstreamError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.logs import event
from rollstream.topics.wire.trajectory_arrays import Trajectory, as_trajectory, nest

logger = logging.getLogger(__name__)


class NothingToSample(RollstreamError):
    """The buffer is empty."""


class NotYetOnDisk(StoreError):
    """A buffer that writes synchronously has trajectories in memory that it could not write to disk."""


class TrajectoryReplayBuffer(Closing):
    """Trajectories in memory or files; samples are single steps from a window of the newest trajectories.

    With `auto_save` every trajectory is a file below `auto_save_path`, written by a background thread (or, with
    `synchronous`, before `add` returns), and a cache keeps the newest `cache_size` in memory. Everything added before a
    `flush` survives any crash. A buffer opened on the trajectories of an earlier buffer continues with them.

    Without `auto_save` the cache holds all trajectories of the window; older ones are removed, as they cannot be drawn.
    `max_trajectories` and `max_bytes` (of arrays) limit memory and disk; 0 is no limit.

    `like` is a trajectory with the arrays that every trajectory must have. Without it, the first two trajectories with
    the same arrays decide: a single trajectory is removed when the next one has other arrays.
    """

    def __init__(
        self,
        seed: int = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        auto_save: bool = False,
        auto_save_path: str | Path = "",
        trajectory_format: str = DEFAULT,
        *,
        max_trajectories: int = 0,
        max_bytes: int = 0,
        allow_pickle: bool = False,
        synchronous: bool = False,
        max_pending_bytes: int = 2**28,
        like: Trajectory | None = None,
    ) -> None:
        """Open the buffer. Raises ConfigurationError for invalid settings, StoreError if the directory is unusable."""
        if auto_save and not str(auto_save_path):
            raise ConfigurationError("auto_save needs a directory to save to; give auto_save_path")
        bounds = {
            "sample_window_size": sample_window_size,
            "max_trajectories": max_trajectories,
            "max_bytes": max_bytes,
            "cache_size": cache_size,
        }
        for name, value in bounds.items():
            if value < 0:
                raise ConfigurationError(f"{name} is {value}; give 0 or more")
        if max_pending_bytes < 1:
            raise ConfigurationError(
                f"max_pending_bytes is {max_pending_bytes}, which leaves no room for pending writes; give at least "
                "1, or set synchronous=True if `add` must return only once its trajectories are on disk"
            )
        self.seed = seed
        self.sample_window_size = sample_window_size
        self.trajectory_format = trajectory_format
        self.auto_save = auto_save
        self._layout = None if like is None else _layout_of(like)
        self._formats = lru_cache(lambda name: format_named(name, allow_pickle=allow_pickle))
        self._formats(trajectory_format)  # An unknown format is refused now, not at the first save.
        self._max_trajectories, self._max_bytes = max_trajectories, max_bytes
        self._synchronous = synchronous
        self._lock = fork_safe_lock()
        self._saving = threading.Lock()
        """Held while a checkpoint is written; acquired before `_lock`."""
        self._documenting = threading.Lock()
        """Held while the RLinf documents are written; acquired after `_saving` and before `_lock`."""
        self._documented = False
        """Whether the RLinf documents are up to date."""
        self._position: dict[int, int] = {}
        self._draws = self._draws_saved = self._without_rewards = 0
        self._left_out: dict[Path, int] = {}
        """Number of trajectories of a checkpoint that were not loaded, by directory."""
        self._store: TrajectoryStore | TrajectoryMemory
        if auto_save:
            self._store = store = TrajectoryStore(
                Path(auto_save_path),
                seed=seed,
                formats=self._formats,
                format_name=trajectory_format,
                max_pending_bytes=max_pending_bytes,
            )
            self._shelf = TrajectoryShelf(cache_size if enable_cache and cache_size else None, store.arrays)
            self._refuse_layout(store.content)
            self._load_content(store.content)
        else:
            # Trajectories outside the window cannot be drawn and are not kept.
            self._max_trajectories = min(filter(None, (sample_window_size, max_trajectories)), default=0)
            self._store = memory = TrajectoryMemory()
            self._shelf = TrajectoryShelf(self._max_trajectories, memory.arrays)

    # ------------------------------------------------------------------ in

    def add_trajectories(self, trajectories: Iterable[Trajectory | Mapping[str, Any]]) -> int:
        """Add all trajectories or none, and return how many were added: a trajectory with neither prev_logprobs nor
        rewards is skipped. Arrays are copied. A plain dict contains the fields of a trajectory and its arrays, by name.

        Raises RecordError if a trajectory is invalid or its arrays differ from those of the buffer. Raises StoreError
        if an earlier write failed: the write is tried again, and this call adds nothing. If the buffer writes
        synchronously, raises NotYetOnDisk when a write of this call fails: the buffer keeps the trajectories in memory
        and writes them before any later operation, so do not add them again. Raises MemoryError if memory is
        exhausted: the trajectories before the failing one are added.
        """
        sound = map(as_trajectory, trajectories)
        parts = [part for trajectory in sound if (part := self._checked(trajectory)) is not None]
        self._make_ready()
        with self._lock:
            for part in parts:
                self._refuse_other(part, parts[0])
            ids = [self._put(part, None) for part in parts]
        self._write_if_synchronous(ids)
        return len(parts)

    def add(self, trajectory: Trajectory | Mapping[str, Any], /, *, at: tuple[int, int] | None = None) -> bool:
        """Add a trajectory and return whether it was added. Raises the errors of `add_trajectories`.

        `at` is its partition and offset in the log. The position moves past it atomically, and a trajectory below the
        position is skipped, because the buffer already has it.
        """
        if at is None:
            return bool(self.add_trajectories([trajectory]))
        if at[1] < self.position.get(at[0], 0):
            return False
        part = self._checked(as_trajectory(trajectory))
        self._make_ready()
        with self._lock:
            if at[1] < self._position.get(at[0], 0):
                return False
            if part is None:
                self.skip(at)
                return False
            self._refuse_other(part, part)
            number = self._put(part, (at[0], at[1] + 1))
        self._write_if_synchronous([number])
        return True

    def skip(self, at: tuple[int, int], /) -> None:
        """Move the position past a record that the buffer does not accept."""
        partition, offset = at
        with self._lock:
            if offset < self._position.get(partition, 0):
                return
            self._store.open()
            self._position[partition] = offset + 1
            self._store.put(PositionRecord(partition, offset + 1))

    def clear(self) -> None:
        """Delete all trajectories and their files, and reset the next id; the position stays. Raises StoreError."""
        with self._saving, self._lock:
            content = JournalContent(position=dict(self._position), seed=self.seed, draws=self._draws)
            self._store.open()
            self._store.replace(content)
            self._load_content(content)

    # ------------------------------------------------------------------ out

    def sample(self, num_chunks: int) -> dict[str, Any]:
        """Draw min(`num_chunks`, N) steps as a nested dict of arrays [n, ...], uniformly with replacement from the N
        steps of the window: the newest `sample_window_size` trajectories, or all if that is 0. Each trajectory is
        fetched once.

        Raises ConfigurationError if `num_chunks` is below 1, NothingToSample if the buffer is empty, StoreError if a
        file is gone.
        """
        if num_chunks < 1:
            raise ConfigurationError(f"a sample of {num_chunks} steps; draw at least 1")
        with self._lock:
            generator = generator_at(self.seed, self._draws)
            drawn = self._shelf.draw(self.sample_window_size, num_chunks, generator)
            if drawn is None:
                raise NothingToSample("the trajectory buffer is empty; wait until is_ready(1) is true")
            self._draws += 1
        return nest(drawn)

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to read, by partition; empty if nothing is from the log."""
        with self._lock:
            return dict(self._position)

    @property
    def total_samples(self) -> int:
        """Number of steps of all trajectories held, including those outside the window."""
        with self._lock:
            return self._shelf.index.samples

    @property
    def window_samples(self) -> int:
        """Number of steps in the window, which can be drawn."""
        with self._lock:
            return self._shelf.index.window(self.sample_window_size).samples

    @property
    def trajectory_counter(self) -> int:
        """The id of the next trajectory."""
        return self._shelf.index.counter

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of the trajectories held, oldest first."""
        with self._lock:
            return [int(number) for number in self._shelf.index.ids]

    def __len__(self) -> int:
        return len(self._shelf.index)

    def size(self) -> int:
        """Number of steps that can be drawn."""
        return self.window_samples

    def is_ready(self, min_size: int) -> bool:
        """Whether at least `min_size` trajectories are held. Raises ConfigurationError if the bounds exclude that."""
        if self._max_trajectories and min_size > self._max_trajectories:
            bound = "max_trajectories" if self.auto_save else "sample_window_size and max_trajectories"
            raise ConfigurationError(
                f"is_ready({min_size}) is never true: the buffer holds at most {self._max_trajectories} trajectories; "
                f"raise {bound}, or wait for fewer"
            )
        return len(self) >= min_size

    def get_stats(self) -> dict[str, int]:
        """Return num_trajectories held, their total_samples, and cache_size, the number of cached trajectories."""
        with self._lock:
            return {
                "num_trajectories": len(self._shelf.index),
                "total_samples": self.total_samples,
                "cache_size": self._shelf.cached,
            }

    def stats(self) -> dict[str, int]:
        """Return the values of get_stats, and the numbers of steps that can be drawn, bytes held, samples drawn, and
        trajectories skipped because they have neither rewards nor prev_logprobs."""
        with self._lock:
            return {
                **self.get_stats(),
                "window_samples": self.window_samples,
                "stored_bytes": self._shelf.index.size_bytes,
                "draws": self._draws,
                "without_rewards": self._without_rewards,
            }

    # ------------------------------------------------------------------ on disk

    def flush(self) -> None:
        """Wait until everything added is on disk, with position and random state, and listed in trajectory_index.json
        and metadata.json. Raises StoreError if writing fails.

        Without auto_save it does nothing.
        """
        with self._documenting:
            with self._lock:
                content = None if self._documented else self._content()
                self._documented = True
            try:
                self._write()
                self._document(content)
            except BaseException:
                self._documented = False
                raise

    def close(self) -> None:
        """Flush, and release the directory. Drawing still works; adding reopens the directory. Raises StoreError."""
        with self._saving, self._documenting, self._lock:
            if self._store.is_open:
                self._write()
                self._document(None if self._documented else self._content())
                self._documented = True
                self._store.close()

    def save_checkpoint(self, save_path: str | Path) -> None:
        """Save content, position and random state in a directory, atomically: a kill leaves the earlier checkpoint or
        this one. Files are linked if the file system supports links.

        Other threads can add and draw during the save; the checkpoint has the state of one moment. Without auto_save
        that state is copied in memory.

        Raises StoreError if writing fails, or if the directory contains trajectories that this buffer did not load from
        it, because of its bounds or its rank: saving would delete them.
        """
        left_out = self._left_out.get(Path(save_path).resolve())
        if left_out:
            raise StoreError(
                f"{save_path} contains {left_out} trajectories that this buffer did not load, and saving would delete "
                "them; save to another directory, or load all of them (without is_distributed, and with "
                "sample_window_size and max_trajectories of 0)"
            )
        with self._saving:
            self._write()
            with self._lock:
                self._write()  # The first write, without the lock, left little to write while other threads wait.
                content = self._content()
                sources = self._store.sources(content, self._shelf.cached_rows)
            try:
                write_checkpoint(Path(save_path), content, sources, self._formats, self.trajectory_format)
            finally:
                self._store.unpin()

    def load_checkpoint(
        self, load_path: str | Path, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Replace the content by a checkpoint of this program or of RLinf. Settings stay, except the seed. If
        `is_distributed`, load the share of one rank; the shares are contiguous and disjoint, and cover the content.

        The newest `cache_size` trajectories are read into the cache; the number of trajectories not loaded is logged.
        Raises FileNotFoundError (also a StoreError) if there is no checkpoint, StoreError if it is damaged, ValueError
        (also a ConfigurationError) if the rank is out of range, and ConfigurationError if `like` has other arrays; the
        buffer is then unchanged.
        """
        checkpoint = read_checkpoint(Path(load_path), self._formats)
        stored = len(checkpoint.content)
        if is_distributed:
            checkpoint = shard(checkpoint, local_rank, world_size)
        if checkpoint.content.seed is None:
            checkpoint.content.seed = self.seed
        if not self.auto_save:
            checkpoint = checkpoint.newest(self._max_trajectories or len(checkpoint.content))
        with self._saving, self._lock:
            self._refuse_layout(checkpoint.content)
            if self.auto_save:
                # Loading deletes the earlier files, so the files that the cache will read are checked first.
                count = len(checkpoint.content)
                for place in range(count - self._shelf.caches(count), count):
                    checkpoint.read(place)
            self._store.open()
            self._load_content(self._store.load(checkpoint))
            self._left_out[Path(load_path).resolve()] = left_out = stored - len(self)
        if left_out:
            event(logger, "trajectories_not_loaded", directory=str(load_path), count=left_out, loaded=stored - left_out)

    def save(self, directory: Path, /) -> None:
        """Call save_checkpoint. Every buffer has a method of this name."""
        self.save_checkpoint(directory)

    def load(self, directory: Path, /) -> None:
        """Call load_checkpoint. Every buffer has a method of this name."""
        self.load_checkpoint(directory)

    # ------------------------------------------------------------------ within

    def _checked(self, trajectory: Trajectory) -> CheckedTrajectory | None:
        part = check_trajectory(trajectory)
        if part is None:
            self._without_rewards += 1
            return None
        if self._max_bytes and part.size_bytes > self._max_bytes:
            raise RecordError(
                f"trajectory {trajectory.uid!r} has {part.size_bytes:,} bytes, but the buffer holds at most "
                f"{self._max_bytes:,}; raise max_bytes, or use shorter trajectories"
            )
        return self._store.owned(part._replace(trajectory=with_plain_fields(part.trajectory)))

    def _refuse_other(self, part: CheckedTrajectory, first: CheckedTrajectory) -> None:
        layout = self._layout or (self._shelf.layout if len(self) > 1 else first.layout)
        refuse_other(layout, part.layout, f"trajectory {part.trajectory.uid!r}")

    def _make_ready(self) -> None:
        """Wait for room without the lock, so that other threads can draw."""
        with self._lock:
            self._store.open()
        try:
            self._store.ready()
        except StoreError as error:
            raise StoreError(
                f"an earlier write failed, and is tried again ({error}); this call added nothing, so repeat it when "
                "there is room"
            ) from error

    def _write_if_synchronous(self, ids: list[int]) -> None:
        """Write the trajectories of a call to disk if the buffer is synchronous."""
        if not self._synchronous:
            return
        try:
            self._write()
        except StoreError as error:
            wait = self._store.pending_count(ids)
            raise NotYetOnDisk(
                f"{len(ids) - wait} of the {len(ids)} trajectories of this call are on disk, and {wait} wait in "
                f"memory, from which they can be drawn ({error}); make room and call flush; do not add them again"
            ) from error

    def _write(self) -> None:
        """Write everything added to disk, with position and random state."""
        with self._lock:
            self._store.open()
            if self._draws != self._draws_saved:
                self._store.put(DrawRecord(self._shelf.index.counter, str(self.seed), self._draws))
                self._draws_saved = self._draws
        self._store.flush()

    def _content(self) -> JournalContent:
        return replace(self._shelf.content(), position=dict(self._position), seed=self.seed, draws=self._draws)

    def _document(self, content: JournalContent | None) -> None:
        """Write the RLinf documents if the content changed; without auto_save do nothing."""
        if content is not None and isinstance(self._store, TrajectoryStore):
            write_documents(self._store.directory, content, self.trajectory_format)

    def _put(self, part: CheckedTrajectory, at: tuple[int, int] | None) -> int:
        """Add a trajectory, move the position to `at`, and return its id."""
        self._store.open()  # Another thread may have closed the store since `_make_ready`.
        if len(self) and part.layout != self._shelf.layout:
            # The only other trajectory has different arrays, and either may be wrong: the new trajectory replaces it.
            self._drop(self._shelf.drop(1))
        entry = self._shelf.put(part, self._store.format_name)
        if at is not None:
            self._position[at[0]] = at[1]
        self._documented = False
        self._store.put(AddOperation(entry, part, at))
        self._prune()
        return entry.trajectory_id

    def _prune(self) -> None:
        self._drop(self._shelf.prune(self._max_trajectories, self._max_bytes))

    def _drop(self, gone: list[TrajectoryEntry]) -> None:
        if gone:
            self._store.put(DropOperation(gone[-1].trajectory_id + 1, tuple(gone)))

    def _refuse_layout(self, content: JournalContent) -> None:
        if self._layout is not None and len(content):
            try:
                refuse_other(self._layout, content.layout, "the saved content")
            except RecordError as error:
                raise ConfigurationError(f"{error}; or give another `like`") from error

    def _load_content(self, content: JournalContent) -> None:
        self._documented = False
        self._shelf.load(content)
        self._position = dict(content.position)
        self.seed = self.seed if content.seed is None else content.seed
        self._draws = self._draws_saved = content.draws
        self._prune()


def _layout_of(like: Trajectory) -> Layout:
    part = check_trajectory(like)
    if part is None:
        raise ConfigurationError("`like` has neither rewards nor prev_logprobs; give a trajectory that has one of them")
    return part.layout

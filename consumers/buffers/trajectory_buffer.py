"""The trajectory buffer: [T, B, ...] trajectories, drawn by single steps from a window of the newest; memory or files.

Filled by hand, or from the log, position and content as one fact. Filled to the same position of one partition and
drawn from as often, two buffers of a seed give the same; see `consumers.buffers.protocol` for several. Safe to add to,
draw from and save in several threads: no sample is torn.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from consumers.buffers.draws import generator_at
from consumers.buffers.files import StoreError
from consumers.buffers.trajectory_checkpoint import read_checkpoint, shard, write_checkpoint
from consumers.buffers.trajectory_documents import write_documents
from consumers.buffers.trajectory_formats import DEFAULT, format_named
from consumers.buffers.trajectory_index import Entry
from consumers.buffers.trajectory_journal import Content
from consumers.buffers.trajectory_memory import TrajectoryMemory
from consumers.buffers.trajectory_rows import Checked, Layout, checked, refuse_other
from consumers.buffers.trajectory_shelf import TrajectoryShelf
from consumers.buffers.trajectory_store import Add, Drop, Skip, State, TrajectoryStore
from consumers.closing import Closing
from topics.errors import ConfigurationError, RecordError, RollstreamError
from topics.logs import event
from topics.trajectories import Trajectory, as_trajectory, nest

logger = logging.getLogger(__name__)


class NothingToSample(RollstreamError):
    """A buffer is asked for samples, and holds none."""


class NotYetOnDisk(StoreError):
    """A buffer that writes synchronously has taken trajectories in, and cannot write them to disk at present."""


class TrajectoryReplayBuffer(Closing):
    """See the module.

    With `auto_save` every trajectory is a file below `auto_save_path`, written by one thread behind the caller's back
    (or before `add` returns: `synchronous`), and a cache of `cache_size` spares reading the newest. What `flush` has
    returned for is there after any crash. A directory that holds trajectories already is gone on with.

    Without it the cache is all there is, and holds as many as the window: what cannot be drawn is not kept.
    `max_trajectories` and `max_bytes` (of arrays) bound what is kept, on disk too; 0 is no bound.

    Which arrays trajectories have, `like` decides: one that has them. Without it the first two that agree do: one held
    alone goes where the next has others, as it may be the one that is wrong.
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
        """Raises ConfigurationError for settings that make no buffer, StoreError for a directory it cannot use."""
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
                f"max_pending_bytes is {max_pending_bytes}, which lets nothing wait to be written; give at least "
                "1, and synchronous=True for an add that returns when its trajectories are on disk"
            )
        self.seed = seed
        self.sample_window_size = sample_window_size
        self.trajectory_format = trajectory_format
        self.auto_save = auto_save
        self._layout = None if like is None else _layout_of(like)
        self._formats = lru_cache(lambda name: format_named(name, allow_pickle=allow_pickle))
        self._formats(trajectory_format)  # refused now, not when the first is saved
        self._max_trajectories, self._max_bytes = max_trajectories, max_bytes
        self._synchronous = synchronous
        self._lock = threading.RLock()
        self._saving = threading.Lock()
        """Held while a checkpoint is written, by one thread at a time; taken before `_lock`."""
        self._documenting = threading.Lock()
        """Held while the documents for others are written; taken after `_saving` and before `_lock`."""
        self._documented = False
        """Whether these name what is held."""
        self._position: dict[int, int] = {}
        self._draws = self._draws_saved = self._without_rewards = 0
        self._left_out: dict[Path, int] = {}
        """Trajectories of a checkpoint that were not loaded with the rest, by directory."""
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
            self._become(store.content)
        else:
            # What cannot be drawn is not kept.
            self._max_trajectories = min(filter(None, (sample_window_size, max_trajectories)), default=0)
            self._store = memory = TrajectoryMemory()
            self._shelf = TrajectoryShelf(self._max_trajectories, memory.arrays)

    # ------------------------------------------------------------------ in

    def add_trajectories(self, trajectories: Iterable[Trajectory | Mapping[str, Any]]) -> int:
        """Put trajectories in, all or none, and return how many are: one that has neither prev_logprobs nor rewards is
        passed over. Arrays are copied. A plain dict is taken for the fields of a trajectory and its arrays, by name.

        Raises RecordError for one that is unsound, or has other arrays than those before; StoreError for an earlier
        write that failed: it is tried again, and nothing of this call is in. NotYetOnDisk, where the buffer writes
        synchronously, for a write of this call that failed: all of the call is in, to be drawn from memory, and is
        written before whatever comes next; it must not be added again. MemoryError where they do not fit into memory:
        those before the one that did not are in.
        """
        sound = map(as_trajectory, trajectories)
        parts = [part for trajectory in sound if (part := self._checked(trajectory)) is not None]
        self._make_ready()
        with self._lock:
            for part in parts:
                self._refuse_other(part, parts[0])
            ids = [self._put(part, None) for part in parts]
        self._settle(ids)
        return len(parts)

    def add(self, trajectory: Trajectory | Mapping[str, Any], /, *, at: tuple[int, int] | None = None) -> bool:
        """Put a trajectory in, and return whether it is. Raises as `add_trajectories`.

        With `at`, its partition and offset on the log, the position moves past it in the same step; what lies below the
        position is in already, and is passed over.
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
        self._settle([number])
        return True

    def skip(self, at: tuple[int, int], /) -> None:
        """Move the position past a record that is not for this buffer, or that it refused."""
        partition, offset = at
        with self._lock:
            if offset < self._position.get(partition, 0):
                return
            self._store.open()
            self._position[partition] = offset + 1
            self._store.put(Skip(partition, offset + 1))

    def clear(self) -> None:
        """Hold nothing: index, counter, cache and files are gone; the position stays. Raises StoreError."""
        with self._saving, self._lock:
            content = Content(position=dict(self._position), seed=self.seed, draws=self._draws)
            self._store.open()
            self._store.replace(content)
            self._become(content)

    # ------------------------------------------------------------------ out

    def sample(self, num_chunks: int) -> dict[str, Any]:
        """min(`num_chunks`, N) steps as a nested dict of arrays [n, ...], drawn uniformly with replacement from the N
        of the window: the newest `sample_window_size` trajectories, or all where that is 0. Each is fetched once.

        Raises ConfigurationError for fewer than 1, NothingToSample where the buffer is empty, StoreError where a file
        is gone.
        """
        if num_chunks < 1:
            raise ConfigurationError(f"a sample of {num_chunks}; draw at least 1")
        with self._lock:
            generator = generator_at(self.seed, self._draws)
            drawn = self._shelf.draw(self.sample_window_size, num_chunks, generator)
            if drawn is None:
                raise NothingToSample(
                    "the trajectory buffer is empty; wait until is_ready says that there is something"
                )
            self._draws += 1
        return nest(drawn)

    @property
    def position(self) -> Mapping[int, int]:
        """Next offset to be read, by partition; empty where nothing came from the log."""
        with self._lock:
            return dict(self._position)

    @property
    def total_samples(self) -> int:
        """Steps of all trajectories held, those outside the window too."""
        with self._lock:
            return self._shelf.index.samples

    @property
    def window_samples(self) -> int:
        """Steps that can be drawn: those of the window."""
        with self._lock:
            return self._shelf.index.window(self.sample_window_size).samples

    @property
    def trajectory_counter(self) -> int:
        """The next id."""
        return self._shelf.index.counter

    @property
    def trajectory_ids(self) -> list[int]:
        """Ids of what is held, oldest first."""
        with self._lock:
            return [int(number) for number in self._shelf.index.ids]

    def __len__(self) -> int:
        return len(self._shelf.index)

    def size(self) -> int:
        """Steps that can be drawn."""
        return self.window_samples

    def is_ready(self, min_size: int) -> bool:
        """Whether at least so many trajectories are held. Raises ConfigurationError for more than may ever be."""
        if self._max_trajectories and min_size > self._max_trajectories:
            bound = "max_trajectories" if self.auto_save else "sample_window_size and max_trajectories"
            raise ConfigurationError(
                f"is_ready({min_size}) is never true: the buffer holds at most {self._max_trajectories} trajectories; "
                f"raise {bound}, or wait for fewer"
            )
        return len(self) >= min_size

    def get_stats(self) -> dict[str, int]:
        """num_trajectories held, total_samples of them, cache_size in trajectories."""
        with self._lock:
            return {
                "num_trajectories": len(self._shelf.index),
                "total_samples": self.total_samples,
                "cache_size": self._shelf.cached,
            }

    def stats(self) -> dict[str, int]:
        """get_stats, and the steps that can be drawn, the bytes held, samples drawn, and trajectories passed over for
        want of rewards."""
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
        """Return when everything added is on disk, with position and random state, and trajectory_index.json and
        metadata.json say so. Raises StoreError where it is not.

        Without auto_save there is nothing to do.
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
        """Flush, and let go of the directory; one may still draw, and adding opens it again. Raises StoreError."""
        with self._saving, self._documenting, self._lock:
            if self._store.is_open:
                self._write()
                self._document(None if self._documented else self._content())
                self._documented = True
                self._store.close()

    def save_checkpoint(self, save_path: str | Path) -> None:
        """Keep content, position and random state in a directory, atomically: who is killed leaves the one before, or
        this. Files are linked where the file system can.

        Adding and drawing go on meanwhile: what is saved is of one moment. Without auto_save that is copied in memory.

        Raises StoreError; also where the directory has trajectories that this buffer left out when it loaded from
        there, as its bounds or its rank did not let them in: they would be gone.
        """
        left_out = self._left_out.get(Path(save_path).resolve())
        if left_out:
            raise StoreError(
                f"{save_path} holds {left_out} trajectories that this buffer did not load, and saving deletes them; "
                "save to another directory, or load all of them (sample_window_size and max_trajectories of 0)"
            )
        with self._saving:
            self._write()
            with self._lock:
                self._write()  # what came since: little, as others wait for it
                content = self._content()
                sources = self._store.sources(content, self._shelf.cached_rows)
            try:
                write_checkpoint(Path(save_path), content, sources, self._formats, self.trajectory_format)
            finally:
                self._store.unpin()

    def load_checkpoint(
        self, load_path: str | Path, is_distributed: bool = False, local_rank: int = 0, world_size: int = 1
    ) -> None:
        """Become what was saved there, by this program or by RLinf; settings stay, but for the seed. Distributed:
        become the share of one rank. Shares are contiguous, and together they are the whole.

        The newest `cache_size` are read into the cache; how many the bounds leave out is logged. Raises
        FileNotFoundError (a StoreError too) where nothing was saved, StoreError for what is damaged, ValueError (a
        ConfigurationError too) for a rank out of range; the buffer is then as it was.
        """
        found = read_checkpoint(Path(load_path), self._formats)
        stored = len(found.content)
        if is_distributed:
            found = shard(found, local_rank, world_size)
        if found.content.seed is None:
            found.content.seed = self.seed
        if not self.auto_save:
            found = found.newest(self._max_trajectories or len(found.content))
        with self._saving, self._lock:
            self._store.open()
            self._become(self._store.load(found))
            self._left_out[Path(load_path).resolve()] = left_out = stored - len(self)
        if left_out:
            event(logger, "trajectories_not_loaded", directory=str(load_path), count=left_out, loaded=stored - left_out)

    def save(self, directory: Path, /) -> None:
        """save_checkpoint, under the name every buffer has for it."""
        self.save_checkpoint(directory)

    def load(self, directory: Path, /) -> None:
        """load_checkpoint, under the name every buffer has for it."""
        self.load_checkpoint(directory)

    # ------------------------------------------------------------------ within

    def _checked(self, trajectory: Trajectory) -> Checked | None:
        part = checked(trajectory)
        if part is None:
            self._without_rewards += 1
            return None
        if self._max_bytes and part.size_bytes > self._max_bytes:
            raise RecordError(
                f"trajectory {trajectory.uid!r} has {part.size_bytes:,} bytes, and the buffer holds at most "
                f"{self._max_bytes:,}; raise max_bytes, or cut shorter trajectories"
            )
        return self._store.owned(part)

    def _refuse_other(self, part: Checked, first: Checked) -> None:
        layout = self._layout or (self._shelf.layout if len(self) > 1 else first.layout)
        refuse_other(layout, part.layout, f"trajectory {part.trajectory.uid!r}")

    def _make_ready(self) -> None:
        """Wait for room before the lock is taken: others go on drawing meanwhile."""
        with self._lock:
            self._store.open()
        try:
            self._store.ready()
        except StoreError as error:
            raise StoreError(
                f"an earlier write failed, and is tried again ({error}); nothing of this call is in: call again when "
                "there is room"
            ) from error

    def _settle(self, ids: list[int]) -> None:
        """Have trajectories that were put in on disk, where this is to be before the call returns."""
        if not self._synchronous:
            return
        try:
            self._write()
        except StoreError as error:
            wait = self._store.waiting(ids)
            raise NotYetOnDisk(
                f"{len(ids) - wait} of the {len(ids)} trajectories of this call are on disk, and {wait} wait in "
                f"memory, where they are drawn from ({error}); make room and call flush, and do not add them again"
            ) from error

    def _write(self) -> None:
        """Have everything added on disk, with position and random state."""
        with self._lock:
            self._store.open()
            if self._draws != self._draws_saved:
                self._store.put(State(self._shelf.index.counter, self.seed, self._draws))
                self._draws_saved = self._draws
        self._store.flush()

    def _content(self) -> Content:
        return replace(self._shelf.content(), position=dict(self._position), seed=self.seed, draws=self._draws)

    def _document(self, content: Content | None) -> None:
        """Say for others what is on disk, where that has changed; without auto_save nothing is."""
        if content is not None and isinstance(self._store, TrajectoryStore):
            write_documents(self._store.directory, content, self.trajectory_format)

    def _put(self, part: Checked, at: tuple[int, int] | None) -> int:
        """Add a trajectory and move to the position behind it; returns its id."""
        self._store.open()  # another thread may have closed it since there was room
        if len(self) and part.layout != self._shelf.layout:
            self._drop(self._shelf.drop(1))  # It was alone, and is outvoted.
        entry = self._shelf.put(part, self._store.format_name)
        if at is not None:
            self._position[at[0]] = at[1]
        self._documented = False
        self._store.put(Add(entry, part, at))
        self._prune()
        return entry.trajectory_id

    def _prune(self) -> None:
        self._drop(self._shelf.prune(self._max_trajectories, self._max_bytes))

    def _drop(self, gone: list[Entry]) -> None:
        if gone:
            self._store.put(Drop(gone[-1].trajectory_id + 1, tuple(gone)))

    def _become(self, content: Content) -> None:
        if self._layout is not None and len(content):
            try:
                refuse_other(self._layout, content.layout, "what was saved")
            except RecordError as error:
                raise ConfigurationError(f"{error}; or give it another `like`") from error
        self._documented = False
        self._shelf.become(content)
        self._position = dict(content.position)
        self.seed = self.seed if content.seed is None else content.seed
        self._draws = self._draws_saved = content.draws
        self._prune()


def _layout_of(like: Trajectory) -> Layout:
    part = checked(like)
    if part is None:
        raise ConfigurationError(
            "trajectories are to be like one without rewards and prev_logprobs, which none may lack"
        )
    return part.layout

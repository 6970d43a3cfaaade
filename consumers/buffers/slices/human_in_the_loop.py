"""Two slice buffers, one for the policy's episodes and one for human episodes; samples take half from each.

The control mode of the first step decides the side of an episode. So human episodes are half of each
sample even if they are few, and policy episodes do not displace them.
"""

import shutil
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer, NothingToDraw
from rollstream.consumers.buffers.slices.directory import LOCK
from rollstream.consumers.buffers.slices.episode_cuts import AUTO, CONTROL_MODE, HUMAN, EpisodePart
from rollstream.consumers.buffers.slices.options import (
    CAPACITY,
    SLICE_LEN,
    EpisodeOptions,
    SizedSliceOptions,
    SliceOptions,
)
from rollstream.consumers.buffers.storage.fork_safe_locks import fork_safe_lock
from rollstream.consumers.files.atomic_files import (
    DirectoryLock,
    StoreError,
    lock_directory,
    make_directory,
    read_json,
    write_json,
)
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.wire.trajectory_arrays import Trajectory, Tree, flatten, nest

MANIFEST = "sides.json"
_SIDES = {AUTO: "auto", HUMAN: "hil"}
_OTHER_SEED = 2**64


def open_episode_buffer(
    directory: str | Path, *, use_hil_buffer: bool = False, **options: Unpack[SizedSliceOptions]
) -> "EpisodeSliceBuffer | HilEpisodeBuffer":
    """Open one buffer for all episodes, or one for each side; `options` are as in EpisodeSliceBuffer."""
    return (HilEpisodeBuffer if use_hil_buffer else EpisodeSliceBuffer)(directory, **options)


class HilEpisodeBuffer(Closing):
    """Two slice buffers with the methods of one EpisodeSliceBuffer; each side has the full capacity.

    The position is the lower of the two sides' positions. After a kill between the writes to the two sides, a record is
    added only to the side that lacks it.
    """

    def __init__(
        self,
        directory: str | Path,
        capacity: int = CAPACITY,
        slice_len: int | None = SLICE_LEN,
        **options: Unpack[SliceOptions],
    ) -> None:
        """Open or create a directory. `options` and errors are those of EpisodeSliceBuffer."""
        self._directory = Path(directory)
        self._options: SizedSliceOptions = {**options, "capacity": capacity, "slice_len": slice_len}
        self._threads = fork_safe_lock()
        self._lock: DirectoryLock | None = None
        if not options.get("read_only"):
            self._lock = lock_directory(self._directory, LOCK)
        try:
            self._open()
        except BaseException:
            self._unlock()
            raise

    def _open(self) -> None:
        path = self._directory / MANIFEST
        if self._holds_lock and not path.exists():
            _name_folder(self._directory, _new_folder())
        folder = self._folder = _named_folder(self._directory)
        seed = int(self._options.get("seed", 0))
        auto: SizedSliceOptions = {**self._options, "seed": seed}
        human: SizedSliceOptions = {**self._options, "seed": seed + _OTHER_SEED}
        self._auto = EpisodeSliceBuffer(folder / _SIDES[AUTO], **auto)
        self._human = EpisodeSliceBuffer(folder / _SIDES[HUMAN], **human)
        if self._holds_lock:
            _remove_all_but(self._directory, folder)

    @property
    def auto(self) -> EpisodeSliceBuffer:
        """Episodes that began with control mode 0."""
        return self._auto

    @property
    def hil(self) -> EpisodeSliceBuffer:
        """Episodes that began with control mode 1."""
        return self._human

    # ------------------------------------------------------------------ adding

    def add(
        self, item: Tree | Trajectory, /, *, at: tuple[int, int] | None = None, **episode: Unpack[EpisodeOptions]
    ) -> bool:
        """Like EpisodeSliceBuffer.add; the control mode of an episode's first step decides its side.

        The mode is read from the span, or else from the array `control_mode` [T, ...]. Also raises RecordError if
        neither exists, or the mode is neither 0 nor 1. If the disk fails, one side may have its part already; with
        `at`, adding the record again gives the other side its part.
        """
        with self._threads:
            if at is not None and at[1] < self.position.get(at[0], 0):
                return False
            parts = self._auto.cut(item, **episode)
            for side in (self._auto, self._human):
                side.check(parts)
            added = False
            for side, mine in zip((self._auto, self._human), self._routed(parts, at, item), strict=True):
                if mine or at is not None:
                    added |= side.add_parts(mine, at=at)
            return added

    def skip(self, at: tuple[int, int]) -> bool:
        """Move the position past a refused record; return False if it is already past the record."""
        with self._threads:
            return any([self._auto.skip(at), self._human.skip(at)])

    # ------------------------------------------------------------------ drawing

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Like EpisodeSliceBuffer.sample: the first half of the slices is from the policy, the second half from humans.

        If `batch_size` is odd, the sample has one slice fewer. Raises NothingToDraw, naming the side, if a side has no
        episode that is long enough.
        """
        if self._auto.slice_len is None:
            raise ConfigurationError("num_slices is set, so slices have no fixed length; call sample_steps")
        return self.draw(batch_size, self._auto.slice_len)

    def sample_steps(self, steps: int, /) -> dict[str, Any]:
        """Like `sample`, for a total number of steps, a multiple of `slice_len` or `num_slices`."""
        return self.draw(*self._auto.slices_in(steps))

    def draw(self, count: int, length: int) -> dict[str, Any]:
        """Like `sample`, for slices of any length."""
        if count < 2:
            raise ConfigurationError(f"a sample of {count} slices, half from each side; draw at least 2")
        with self._threads:
            self._follow()
            for mode, side in ((AUTO, self._auto), (HUMAN, self._human)):
                try:
                    side.check_drawable(length)
                except NothingToDraw as error:
                    raise NothingToDraw(f"the {_SIDES[mode]} side ({CONTROL_MODE} {mode}): {error}") from error
            auto, human = (flatten(side.draw(count // 2, length)) for side in (self._auto, self._human))
            return nest({path: np.concatenate([leaf, human[path]]) for path, leaf in auto.items()})

    def size(self) -> int:
        """Number of steps held on both sides together."""
        with self._threads:
            self._follow()
            return self._auto.size() + self._human.size()

    def __len__(self) -> int:
        return self.size()

    @property
    def position(self) -> dict[int, int]:
        """Next offset to read, by partition; both sides have everything below it."""
        with self._threads:
            self._follow()
            human = self._human.position
            return {p: min(offset, human[p]) for p, offset in self._auto.position.items() if p in human}

    def stats(self) -> dict[str, Any]:
        """Return the number of steps held on both sides, and the statistics of each side by name."""
        with self._threads:
            return {"size": self.size(), _SIDES[AUTO]: self._auto.stats(), _SIDES[HUMAN]: self._human.stats()}

    # ------------------------------------------------------------------ on disk

    def flush(self) -> None:
        """Write all added steps to disk, so that they survive a crash of the machine. Raises StoreError."""
        with self._threads:
            self._auto.flush()
            self._human.flush()

    def save(self, directory: str | Path, /) -> None:
        """Write everything to disk, or copy it to another `directory`. If it raises StoreError, nothing changes."""
        target = Path(directory)
        with self._threads:
            if target.resolve() == self._directory.resolve():
                self.flush()
                return
            with lock_directory(target, LOCK):
                self._copy_to(target)

    def load(self, directory: str | Path, /) -> None:
        """Replace the content by a saved buffer; settings stay. Raises StoreError, or ConfigurationError if the
        capacity differs; nothing changes then."""
        source = Path(directory)
        with self._threads:
            if not self._holds_lock:
                raise StoreError(f"the buffer in {self._directory} is closed or read-only; open it to write")
            if source.resolve() == self._directory.resolve():
                return
            options: SizedSliceOptions = {**self._options, "read_only": True}
            with closing(HilEpisodeBuffer(source, **options)) as other:
                other._copy_to(self._directory)
            self._close_sides()
            self._open()

    def close(self) -> None:
        """Flush and close, so that another process may write. Raises StoreError."""
        with self._threads:
            try:
                self._close_sides()
            finally:
                self._unlock()

    # ------------------------------------------------------------------ helpers

    def _routed(
        self, parts: Sequence[EpisodePart], at: tuple[int, int] | None, item: Tree | Trajectory
    ) -> tuple[list[EpisodePart], list[EpisodePart]]:
        """Return the parts of each side. A continued episode stays on the side where it began. Raises RecordError."""
        sides: dict[int, list[EpisodePart]] = {AUTO: [], HUMAN: []}
        first_modes: dict[str, int] = {}
        for part in parts:
            mode = part.control_mode
            if not part.first and part.uid:
                mode = first_modes[part.uid] if part.uid in first_modes else self._side_of(part, at, item)
            if mode not in sides:
                problem = f"it has no {CONTROL_MODE}" if mode is None else f"its {CONTROL_MODE} is {mode}"
                raise RecordError(
                    f"an episode of {part.steps} steps: {problem}; it must be 0 (the policy) or 1 (a human) at the "
                    "first step"
                )
            if part.uid:
                first_modes[part.uid] = mode
            sides[mode].append(part)
        return sides[AUTO], sides[HUMAN]

    def _side_of(self, part: EpisodePart, at: tuple[int, int] | None, item: Tree | Trajectory) -> int | None:
        """Return the control mode of the side of a part that may continue an episode.

        After a kill between the sides, one has the record already. The episode may have ended with it, and be open
        nowhere, but that side knows whether it took the part. If it has later records, too, because the machine
        stopped between two flushes, an end without a beginning is not added to the other side.
        """
        sides = ((AUTO, self._auto), (HUMAN, self._human))
        held = [mode for mode, side in sides if side.is_open(part.uid)]
        for mode, side in sides:
            if at is not None and at[1] < side.position.get(at[0], 0):
                taken = side.taken(at)
                if taken is not None:
                    return mode if part.uid in taken else HUMAN - mode
                # A tree does not tell whether it continues or begins an episode.
                held += [mode] * isinstance(item, Trajectory)
        return held[0] if held else part.control_mode

    def _copy_to(self, directory: Path) -> None:
        folder = _new_folder()
        try:
            self._auto.save(directory / folder / _SIDES[AUTO])
            self._human.save(directory / folder / _SIDES[HUMAN])
            _name_folder(directory, folder)
        except BaseException:
            shutil.rmtree(directory / folder, ignore_errors=True)
            raise
        if directory != self._directory:
            _remove_all_but(directory, directory / folder)

    def _follow(self) -> None:
        """Open the folder that the writer uses now, if this is a reader."""
        if self._lock is not None and not self._lock.held:
            # This process was forked from the writer, and only reads; so do its sides.
            self._lock, self._options["read_only"] = None, True
        if not self._holds_lock and self._options.get("read_only") and _named_folder(self._directory) != self._folder:
            self._close_sides()
            self._open()

    def _close_sides(self) -> None:
        try:
            self._auto.close()
        finally:
            self._human.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def _holds_lock(self) -> bool:
        return self._lock is not None and self._lock.held


def _new_folder() -> str:
    return f"sides-{uuid.uuid4().hex[:12]}"


def _name_folder(directory: Path, folder: str) -> None:
    """Write the name of the folder of both sides to the manifest. Raises StoreError."""
    make_directory(directory / folder)
    write_json(directory / MANIFEST, {"version": 1, "folder": folder})


def _named_folder(directory: Path) -> Path:
    """Return the folder of both sides. Raises StoreError."""
    try:
        return directory / str(read_json(directory / MANIFEST)["folder"])
    except FileNotFoundError as error:
        raise StoreError(f"{directory} contains no {MANIFEST}; nothing was stored there") from error
    except (KeyError, TypeError) as error:
        raise StoreError(
            f"{directory / MANIFEST} was not written by this program; fill another directory from the log"
        ) from error


def _remove_all_but(directory: Path, folder: Path) -> None:
    for other in directory.glob("sides-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)

"""The store of a slice buffer: segments of steps and a journal in a directory, written by one process at a time.

The journal names the segments, and replacing it replaces the whole buffer. After a kill at any instruction, the store
contains everything for which `add` had returned, and nothing from other calls. After a crash of the machine, it
contains everything that was flushed, except steps whose segments were dropped since.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import count
from pathlib import Path
from typing import TypeVar

from rollstream.consumers.buffers.slices.episode_cuts import EpisodePart
from rollstream.consumers.buffers.slices.state import (
    DECODER,
    DropRecord,
    FlushRecord,
    OpenRecord,
    Record,
    SliceState,
    SnapshotRecord,
)
from rollstream.consumers.buffers.storage.journal import Journal, JournalFollower, read_journal, write_journal
from rollstream.consumers.buffers.storage.segments import Layout, SegmentFiles, SegmentGone, layout_of, refuse_other
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.files.atomic_files import DirectoryLock, StoreError, lock_directory, remove_unfinished

NAME, LOCK = "slices.journal", "lock"
_FILE = re.compile(r"[0-9a-f]{12}-\d+-\d+\.rows", re.ASCII)
"""Names of segments; other files in a directory belong to the user."""
_SEGMENTS = 16
"""Number of segments of a full ring."""
_LEAST_ROWS = 256
_TRIES = 20
T = TypeVar("T")


class SliceStore:
    """Files of a slice buffer in a directory. Not thread-safe."""

    def __init__(self, directory: Path, capacity: int | None, sides: int = 1, *, read_only: bool = False) -> None:
        """Open or create a directory; without a capacity, use that of the existing buffer.

        Raises ConfigurationError if the buffer has another capacity or number of sides, StoreError if another process
        writes to the directory, or files are missing or damaged.
        """
        self._directory, self._read_only = directory, read_only
        self._journal_path = directory / NAME
        self._why_read_only = "was opened read-only; open it to write"
        self._lost = False
        """Whether the state is that of the last flush, because a writer of another boot or machine wrote the rest."""
        self._journal: Journal | None = None
        self._followed: JournalFollower[Record] | None = None
        """In a reader, the journal that `state` is read from."""
        self._files: list[SegmentFiles] = []
        """Segments of each side."""
        self._closed = False
        self._lock: DirectoryLock | None = None if read_only else lock_directory(directory, LOCK)
        try:
            self._open(capacity, sides)
        except BaseException:
            self._close_files()
            self._unlock()
            raise

    def _open(self, capacity: int | None, sides: int) -> None:
        if not self._journal_path.exists():
            if self._read_only or capacity is None:
                raise StoreError(f"{self._directory} contains no {NAME}; nothing was stored there")
            write_journal(self._journal_path, SliceState(capacity, sides).snapshot(uuid.uuid4().hex[:12]))
        self._recover()
        state = self.state
        if (len(state.sides), capacity or state.capacity) != (sides, state.capacity):
            raise ConfigurationError(
                f"{self._directory} is a ring of {state.capacity} steps with {len(state.sides)} sides, not "
                f"{capacity or state.capacity} with {sides}; open it with that capacity and use_hil_buffer, or fill "
                "another directory"
            )
        if not self._read_only:
            named = set()
            for files, side in zip(self._files, state.sides, strict=True):
                named |= files.open(files.numbers(side.low, side.head))
            _remove(self._directory, lambda name: name not in named)

    # ------------------------------------------------------------------ writing

    def add(self, parts: Sequence[Sequence[EpisodePart]], at: tuple[int, int] | None) -> None:
        """Write the parts of each side, which passed `check`, and move the position, atomically.

        Raises StoreError if writing fails; nothing is added then.
        """
        journal = self._short_journal()
        arrays: Layout = ()
        if any(parts):
            if not self.state.arrays:
                arrays = layout_of(next(part.leaves for own in parts for part in own))
                self._use_arrays(arrays)
            self._drop_segments(journal)
            for files, side, own in zip(self._files, self.state.sides, parts, strict=True):
                if own:
                    files.write(side.head, [part.leaves for part in own])
        record = self.state.add_record(parts, at, arrays)
        journal.append(record)
        self.state.apply(record)

    def check(self, parts: Sequence[EpisodePart]) -> None:
        """Raise RecordError if arrays differ from those stored, or there are more steps than the capacity."""
        steps = sum(part.steps for part in parts)
        if steps > self.state.capacity:
            raise RecordError(
                f"{steps} steps at once do not fit into a ring of {self.state.capacity}; raise its capacity"
            )
        if self.state.arrays:
            for part in parts:
                refuse_other(self.state.arrays, layout_of(part.leaves), "an episode")

    def flush(self) -> None:
        """Write all added steps to disk. Raises StoreError."""
        journal = self._short_journal()
        for files in self._files:
            files.sync()
        journal.append(FlushRecord(self.state.draws), sync=True)

    def save(self, directory: Path, alone: AbstractContextManager[object]) -> None:
        """Write everything to disk, or copy it to another directory, where it replaces any buffer.

        `alone` excludes other threads; they can add and draw while the arrays are copied. If it raises StoreError, the
        other directory is unchanged.
        """
        if directory.resolve() == self._directory.resolve():
            with alone:
                self.flush()
            return
        with lock_directory(directory, LOCK):
            self._copy_to(directory, alone)

    def load(self, directory: Path) -> None:
        """Replace the content by the content of another directory. If it raises StoreError, the store is unchanged."""
        self._writable()
        if directory.resolve() == self._directory.resolve():
            return
        capacity, sides = self.state.capacity, len(self.state.sides)
        with closing(SliceStore(directory, None, sides, read_only=True)) as other:
            if other.state.capacity != capacity:
                raise StoreError(
                    f"{directory} is a ring of {other.state.capacity} steps, but this ring has {capacity}; load "
                    "it into a ring of the same capacity"
                )
            other._copy_to(self._directory, nullcontext())
        self._close_files()
        self._open(capacity, sides)

    def close(self) -> None:
        """Write all added steps to disk, and close. Raises StoreError."""
        if self._closed:
            return
        self._become_reader_if_forked()
        self._closed = True
        try:
            if self._journal is not None:
                self.flush()
                self._journal.append_closed()
        finally:
            self._close_files()
            self._unlock()

    # ------------------------------------------------------------------ reading

    def files(self, side: int) -> SegmentFiles:
        """Segments of a side. Raises StoreError after `close`."""
        if self._closed:
            raise StoreError(f"the buffer in {self._directory} is closed; open it again")
        return self._files[side]

    def reading(self, read: Callable[[], T]) -> T:
        """Return what `read` returns, from the newest state. It is called again if the writer has dropped a segment
        that it reads."""
        for attempt in count(1):
            self.refresh()
            try:
                return read()
            except SegmentGone:
                if not self._read_only or attempt == _TRIES:
                    raise
        raise AssertionError

    def refresh(self) -> None:
        """Apply the changes of the writer; do nothing in the writer itself, and after `close`. Raises StoreError if the
        buffer is gone."""
        self._become_reader_if_forked()
        if not self._read_only or self._closed:
            return
        records = []
        if self._followed is not None and not self._followed.replaced:
            records = self._followed.read().records
        if self._followed is None or self._followed.replaced or (self._lost and records):
            # In a lost journal, the records may include a flush.
            draws = self.state.draws
            self._close_files()
            self._open(None, len(self.state.sides))
            # The journal has only the writer's draws, but this reader does not repeat its own.
            self.state.apply(FlushRecord(draws))
            return
        for record in records:
            self.state.apply(record)
        self._use_arrays(self.state.arrays)
        for files, side in zip(self._files, self.state.sides, strict=True):
            files.drop(files.below(side.low))

    # ------------------------------------------------------------------ helpers

    def _become_reader_if_forked(self) -> None:
        """In a process that was forked from the writer, read from now on: the parent remains the writer, and this
        process has only its state at the time of the fork."""
        if self._lock is None or self._lock.held or self._closed:
            return
        self._lock, self._read_only = None, True
        self._why_read_only = (
            "is written only by the process from which this one was forked; add there, or open another buffer with "
            "another directory"
        )
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _recover(self) -> None:
        """Read the journal, but only up to the last flush if the machine has restarted since a writer opened it."""
        boot = boot_id()
        if self._read_only:
            self._followed = JournalFollower(self._journal_path, DECODER)
        reading = read_journal(self._journal_path, DECODER) if self._followed is None else self._followed.read()
        records = reading.records
        lost = next((record.boot for record in reversed(records) if isinstance(record, OpenRecord)), boot) != boot
        self._lost = lost
        if (
            not records
            or not isinstance(records[0], SnapshotRecord)
            or (reading.damaged and (reading.closed or not lost))
        ):
            raise StoreError(
                f"{self._journal_path} is damaged at byte {reading.stop}; fill the buffer from the log again"
            )
        if lost:
            last = max(n for n, record in enumerate(records) if isinstance(record, FlushRecord | SnapshotRecord))
            dropped = [record for record in records[last:] if isinstance(record, DropRecord)]
            records = [*records[: last + 1], *dropped]
        self.state = SliceState(1)
        try:
            for record in records:
                self.state.apply(record)
        except (KeyError, ValueError) as error:
            raise StoreError(
                f"{self._journal_path} is damaged ({error}); fill the buffer from the log again"
            ) from error
        self._use_arrays(self.state.arrays)
        if self._read_only:
            return
        self._journal = Journal(self._journal_path, reading.stop)
        if lost:
            self._compact(self._journal)
        else:
            self._journal.append(OpenRecord(boot))

    def _use_arrays(self, arrays: Layout) -> None:
        """Read and write these arrays from now on."""
        if len(self._files) == len(self.state.sides) and self._files[0].layout == arrays:
            return
        for files in self._files:
            files.close()
        state, writable = self.state, not self._read_only
        self._files = [
            _segments(self._directory, state.name, number, arrays, state.capacity, writable=writable)
            for number in range(len(state.sides))
        ]

    def _drop_segments(self, journal: Journal) -> None:
        """Delete the segments whose steps are forgotten. The journal says so first, in case the machine crashes."""
        for number, (files, side) in enumerate(zip(self._files, self.state.sides, strict=True)):
            if dropped := files.below(side.low):
                journal.append(DropRecord(number, (max(dropped) + 1) * files.rows), sync=True)
                files.drop(dropped)

    def _short_journal(self) -> Journal:
        """Return the journal, after compacting it if it has grown long."""
        journal = self._writable()
        if journal.long:
            self._compact(journal)
        return journal

    def _compact(self, journal: Journal) -> None:
        """Replace the journal by one that begins with a snapshot, so that it does not grow without limit."""
        for files in self._files:
            files.sync()
        journal.replace(self.state.snapshot(), OpenRecord(boot_id()))

    def _copy_to(self, directory: Path, alone: AbstractContextManager[object]) -> None:
        """Write everything to new files in a directory, and replace its journal by one that names them."""

        with alone:
            snapshot, pieces = self.reading(
                lambda: (
                    self.state.snapshot(uuid.uuid4().hex[:12]),
                    [f.pieces(s.low, s.head) for f, s in zip(self._files, self.state.sides, strict=True)],
                )
            )
        try:
            for number, own in enumerate(pieces):
                with closing(_segments(directory, snapshot.name, number, snapshot.arrays, snapshot.capacity)) as files:
                    for at, arrays in own:
                        files.write(at, [arrays])
                    files.sync()
        except BaseException:
            for path in directory.glob(f"{snapshot.name}-*.rows"):
                path.unlink()
            raise
        write_journal(directory / NAME, snapshot)
        _remove(directory, lambda name: not name.startswith(snapshot.name))

    def _writable(self) -> Journal:
        self._become_reader_if_forked()
        if self._journal is None or self._lock is None or not self._lock.held:
            closed = "is closed, or another process writes to it; open it to write"
            raise StoreError(f"the buffer in {self._directory} {self._why_read_only if self._read_only else closed}")
        return self._journal

    def _close_files(self) -> None:
        for files in self._files:
            files.close()
        self._files = []
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._followed is not None:
            self._followed.close()
            self._followed = None

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _segments(
    directory: Path, name: str, side: int, arrays: Layout, capacity: int, *, writable: bool = True
) -> SegmentFiles:
    rows = max(_LEAST_ROWS, -(-capacity // _SEGMENTS))
    return SegmentFiles(directory, f"{name}-{side}", arrays, rows, writable=writable)


def _remove(directory: Path, unnamed: Callable[[str], bool]) -> None:
    """Delete segments left by a kill or by earlier content. Only the directory's one writer may call this."""
    remove_unfinished(directory)
    for path in directory.iterdir():
        if _FILE.fullmatch(path.name) and unnamed(path.name):
            path.unlink(missing_ok=True)


def boot_id() -> str:
    """Id of this boot of the machine; "" if the system does not report one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

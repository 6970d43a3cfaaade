"""A slice buffer's directory: arrays, journal and a small JSON file that names them, written by one process at a time.

Who is killed at any instruction finds everything that `add` had returned for, and nothing of what it had not. After the
machine stopped it is everything that was flushed, less what was being overwritten.
"""

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from consumers.buffers import slice_directory
from consumers.buffers.episode_cuts import EpisodePart, Leaves
from consumers.buffers.files import DirectoryLock, StoreError, lock_directory, sync_directory
from consumers.buffers.slice_directory import (
    LOCK,
    NAME,
    Manifest,
    new_name,
    read_manifest,
    remove_all_but,
    write_manifest,
)
from consumers.buffers.slice_files import RingFiles, check, specs_of
from consumers.buffers.slice_journal import (
    Ahead,
    Closed,
    Flushed,
    Journal,
    Opened,
    Reserved,
    Whole,
    read_journal,
    write_journal,
)
from consumers.buffers.slice_state import SliceState
from topics.errors import ConfigurationError, RecordError

_AHEAD = 16
"""A ring is overwritten in as many parts, each of which is announced on disk."""
_LEAST_JOURNAL_BYTES = 2**20
"""A journal is begun anew when it has grown by so much and a sixteenth: who opens it has no more to go through."""


class SliceStore:
    """See the module. Not for several threads at once; `state` says what is held."""

    def __init__(self, directory: Path, capacity: int | None, *, read_only: bool = False) -> None:
        """Open a directory, or begin one; without a capacity, what is there says it.

        Raises ConfigurationError for another capacity than that of the ring there, StoreError where another process
        writes there, or nothing whole is there to read.
        """
        self._directory, self._read_only = directory, read_only
        self._journal: Journal | None = None
        self._read_to = 0
        self._closed = False
        self._lock: DirectoryLock | None = None if read_only else lock_directory(directory, LOCK)
        try:
            self._open(capacity)
        except BaseException:
            self._unlock()
            raise

    def _open(self, capacity: int | None) -> None:
        manifest = read_manifest(self._directory)
        if manifest is None:
            if self._read_only or capacity is None:
                raise StoreError(f"{self._directory} holds no {NAME}; nothing was stored there")
            manifest = self._begin(capacity)
        if capacity not in (None, manifest.capacity):
            raise ConfigurationError(
                f"{self._directory} is a ring of {manifest.capacity} steps, not {capacity}; open it with that "
                "capacity, or fill another directory"
            )
        self._manifest = manifest
        self._journal_path = self._directory / manifest.journal
        self._files = RingFiles(self._directory, manifest.arrays, manifest.capacity, writable=not self._read_only)
        try:
            self._recover()
        except BaseException:
            self._close_files()
            raise
        if not self._read_only:
            remove_all_but(self._directory, manifest)
        elif manifest != read_manifest(self._directory):
            self._close_files()
            self._open(capacity)

    # ------------------------------------------------------------------ writing

    def add(self, parts: Sequence[EpisodePart], at: tuple[int, int] | None) -> None:
        """Write parts of episodes that pass `check` one after another, and move the position; all of it or nothing.

        Raises StoreError where it cannot be written; what had to make room is gone then.
        """
        journal = self._short_journal()
        if parts:
            self._begin_with(parts[0].leaves)
            self._make_room(journal, self.state.head + sum(part.steps for part in parts))
            self._files.write(self.state.head, [part.leaves for part in parts])
        record = self.state.added(list(parts), at)
        journal.append(record)
        self.state.apply(record)

    def check(self, parts: Sequence[EpisodePart]) -> None:
        """Raises RecordError for arrays other than those stored, or more steps than the ring has."""
        steps = sum(part.steps for part in parts)
        if steps > self.capacity:
            raise RecordError(f"{steps} steps at once do not fit a ring of {self.capacity}; raise its capacity")
        if self.state.head:
            for part in parts:
                check(self._files.specs, part.leaves)

    def flush(self) -> None:
        """Have everything that was added on disk. Raises StoreError."""
        journal = self._short_journal()
        self._files.sync()
        journal.append(Flushed(self.state.draws))
        journal.sync()

    def save(self, directory: Path) -> None:
        """Have everything on disk: here, or as a copy in another directory, in place of a buffer that is there.

        Raises StoreError; what was there is then as it was.
        """
        if directory.resolve() == self._directory.resolve():
            self.flush()
            return
        with lock_directory(directory, LOCK):
            self._copy_to(directory)

    def load(self, directory: Path) -> None:
        """Become what was saved in another directory. Raises StoreError, and is then as it was."""
        self._writable()
        if directory.resolve() == self._directory.resolve():
            return
        with closing(SliceStore(directory, None, read_only=True)) as other:
            if other.capacity != self.capacity:
                raise StoreError(
                    f"{directory} is a ring of {other.capacity} steps, this one of {self.capacity}; load it into "
                    "one of the same capacity"
                )
            other._copy_to(self._directory)
        self._close_files()
        self._open(self.capacity)

    def close(self) -> None:
        """Close; everything that was added is on disk then. Raises StoreError."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._journal is not None:
                self.flush()
                self._journal.append(Closed())
                self._journal.sync()
        finally:
            self._close_files()
            self._unlock()

    # ------------------------------------------------------------------ reading

    @property
    def capacity(self) -> int:
        """Steps of the ring."""
        return self._manifest.capacity

    @property
    def files(self) -> RingFiles:
        """The arrays. Raises StoreError once it is closed."""
        if self._closed:
            raise StoreError(f"the buffer in {self._directory} is closed; open it again")
        return self._files

    def refresh(self) -> None:
        """For readers: know what the writer has done since. Raises StoreError where it is no more there."""
        if not self._read_only:
            return
        try:
            replaced = os.stat(self._journal_path).st_ino != self._journal_inode
        except OSError:
            replaced = True
        if replaced or not self.state.head:  # Arrays are settled with the first step.
            self._close_files()
            self._open(None)
            return
        read = read_journal(self._journal_path, self._read_to)
        for record in read.records:
            self.state.apply(record)
        self._read_to = read.stop

    # ------------------------------------------------------------------ within

    def _begin(self, capacity: int) -> Manifest:
        """Write an empty buffer of no arrays."""
        manifest = Manifest(journal=f"{new_name()}.journal", capacity=capacity)
        write_journal(self._directory / manifest.journal, SliceState(capacity).whole())
        write_manifest(self._directory, manifest)
        return manifest

    def _recover(self) -> None:
        """Read the journal, as this process and this start of the machine find it."""
        boot = slice_directory.boot()
        self._journal_inode = self._journal_path.stat().st_ino if self._journal_path.exists() else -1
        read = read_journal(self._journal_path)
        records = read.records
        lost = next((record.boot for record in reversed(records) if isinstance(record, Opened)), boot) != boot
        if not records or not isinstance(records[0], Whole) or (read.damaged and (read.was_on_disk or not lost)):
            raise StoreError(f"{self._journal_path} is damaged at byte {read.stop}; fill the buffer from the log again")
        self._ahead = max((record.stop for record in records if isinstance(record, Ahead)), default=0)
        if lost:
            last = max(n for n, record in enumerate(records) if isinstance(record, Flushed | Whole))
            records = records[: last + 1]
        self.state = SliceState(self.capacity)
        try:
            for record in records:
                self.state.apply(record)
        except (KeyError, ValueError) as error:
            raise StoreError(f"{self._journal_path} is not whole ({error}); fill the buffer from the log") from error
        if lost:
            self.state.forget(self._ahead - self.capacity)
        self._read_to = read.stop
        self._whole_bytes = 0
        if self._read_only:
            return
        self._journal = Journal(self._journal_path, read.stop)
        if lost:
            self._compact()
        else:
            self._journal.append(Opened(boot))

    def _begin_with(self, leaves: Leaves) -> None:
        """The arrays of the very first step are those that are stored."""
        if self.state.head:
            return
        specs = specs_of(leaves, new_name())
        if [spec.kind for spec in specs] == [spec.kind for spec in self._manifest.arrays]:
            return
        files = RingFiles(self._directory, specs, self.capacity, writable=True, new=True)
        try:
            sync_directory(self._directory)
            write_manifest(self._directory, replace(self._manifest, arrays=specs))
        except BaseException:
            files.close()
            raise
        self._files.close()
        self._files, self._manifest = files, replace(self._manifest, arrays=specs)
        remove_all_but(self._directory, self._manifest)

    def _make_room(self, journal: Journal, stop: int) -> None:
        """Forget what the steps up to counter `stop` will overwrite, on record before a byte of it is."""
        if stop <= self.capacity:
            return
        if stop > self._ahead:
            ahead = stop + self.capacity // _AHEAD
            journal.append(Ahead(ahead))
            journal.sync()
            self._ahead = ahead
        record = Reserved(stop)
        journal.append(record)
        self.state.apply(record)

    def _short_journal(self) -> Journal:
        """The journal, begun anew if it has grown long."""
        if self._writable().size_bytes > _LEAST_JOURNAL_BYTES + self._whole_bytes + self._whole_bytes // 16:
            self._compact()
        return self._writable()

    def _compact(self) -> None:
        """Begin the journal anew with what is held, so that it does not grow with what is gone."""
        self._files.sync()
        before, self._journal = self._journal, None
        try:
            write_journal(self._journal_path, self.state.whole(), Ahead(self._ahead), Opened(slice_directory.boot()))
            self._whole_bytes = self._journal_path.stat().st_size
        finally:
            # Also where it failed: whether the new one had its name by then is not known.
            self._journal = Journal(self._journal_path, self._journal_path.stat().st_size)
            if before is not None:
                before.close()

    def _copy_to(self, directory: Path) -> None:
        """Write everything to new files there, name them, and delete those that are not named any more."""
        low, whole = self.state.low, self.state.whole()
        name = new_name()
        arrays = tuple(replace(spec, file=f"{name}-{n:03}.bin") for n, spec in enumerate(self._manifest.arrays))
        manifest = Manifest(journal=f"{name}.journal", capacity=self.capacity, arrays=arrays)
        try:
            with closing(RingFiles(directory, arrays, self.capacity, writable=True, new=True)) as files:
                self._files.copy_to(files, min(low, whole.head), whole.head)
                files.sync()
            before = self._manifest
            self.refresh()
            if before != self._manifest or self.state.low > low:
                raise StoreError(f"{self._directory} is being written by another buffer; copy it once that is closed")
            write_journal(directory / manifest.journal, whole)
        except BaseException:
            for file in (manifest.journal, *(spec.file for spec in arrays)):
                (directory / file).unlink(missing_ok=True)
            raise
        write_manifest(directory, manifest)
        remove_all_but(directory, manifest)

    def _writable(self) -> Journal:
        if self._journal is None or self._lock is None or not self._lock.held:
            why = "was opened to be read only" if self._read_only else "is closed, or another process has it"
            raise StoreError(f"the buffer in {self._directory} {why}; open it to write")
        return self._journal

    def _close_files(self) -> None:
        self._files.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

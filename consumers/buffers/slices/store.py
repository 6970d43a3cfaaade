"""The store of a slice buffer: arrays, a journal and a manifest in a directory, written by one process at a time.

After a kill at any instruction, it contains everything for which `add` had returned, and nothing from other calls.
After a crash of the machine, it contains everything that was flushed, except steps that were being overwritten.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from rollstream.consumers.buffers.slices import directory as slice_directory
from rollstream.consumers.buffers.slices.directory import (
    LOCK,
    NAME,
    Manifest,
    new_name,
    read_manifest,
    remove_all_but,
    write_manifest,
)
from rollstream.consumers.buffers.slices.episode_cuts import EpisodePart, Leaves
from rollstream.consumers.buffers.slices.journal import (
    DECODER,
    FlushRecord,
    OpenRecord,
    Record,
    ReserveOnDiskRecord,
    ReserveRecord,
    SnapshotRecord,
)
from rollstream.consumers.buffers.slices.ring_files import RingFiles, check, specs_of
from rollstream.consumers.buffers.slices.state import SliceState
from rollstream.consumers.buffers.storage.journal import Journal, JournalFollower, read_journal, write_journal
from rollstream.consumers.files.atomic_files import DirectoryLock, StoreError, lock_directory, sync_directory
from rollstream.topics.errors import ConfigurationError, RecordError

_AHEAD = 16
"""Number of parts in which a ring is overwritten; each part is announced on disk first."""


class _Overwritten(StoreError):
    """Steps were overwritten while they were being copied."""


class SliceStore:
    """Files of a slice buffer in a directory. Not thread-safe. `state` is the state of the ring."""

    def __init__(self, directory: Path, capacity: int | None, *, read_only: bool = False) -> None:
        """Open or create a directory; without a capacity, use that of the existing ring.

        Raises ConfigurationError if the ring has another capacity, StoreError if another process writes to the
        directory, or files are missing or damaged.
        """
        self._directory, self._read_only = directory, read_only
        self._why_read_only = "was opened read-only; open it to write"
        self._lost = False
        """Whether the state is that of the last flush, because a writer of another boot or machine wrote the rest."""
        self._journal: Journal | None = None
        self._followed: JournalFollower[Record] | None = None
        """In a reader, the journal that `state` is read from."""
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
                raise StoreError(f"{self._directory} contains no {NAME}; nothing was stored there")
            manifest = self._create(capacity)
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
        """Write parts of episodes, which passed `check`, and move the position, atomically.

        Raises StoreError if writing fails; the steps that were to be overwritten are lost then.
        """
        journal = self._short_journal()
        if parts:
            self._create_arrays(parts[0].leaves)
            self._make_room(journal, self.state.head + sum(part.steps for part in parts))
            self._files.write(self.state.head, [part.leaves for part in parts])
        record = self.state.add_record(list(parts), at)
        journal.append(record)
        self.state.apply(record)

    def check(self, parts: Sequence[EpisodePart]) -> None:
        """Raise RecordError if arrays differ from those stored, or there are more steps than the capacity."""
        steps = sum(part.steps for part in parts)
        if steps > self.capacity:
            raise RecordError(f"{steps} steps at once do not fit into a ring of {self.capacity}; raise its capacity")
        if self.state.head:
            for part in parts:
                check(self._files.specs, part.leaves)

    def flush(self) -> None:
        """Write all added steps to disk. Raises StoreError."""
        journal = self._short_journal()
        self._files.sync()
        journal.append(FlushRecord(self.state.draws), sync=True)

    def save(self, directory: Path, alone: AbstractContextManager[object]) -> None:
        """Write everything to disk, or copy it to another directory, where it replaces any buffer.

        `alone` is a reentrant lock that excludes other threads. They can add and draw while the arrays are copied; if
        they overwrite steps that are being copied, the copy is repeated under the lock. If it raises StoreError, the
        other directory is unchanged.
        """
        if directory.resolve() == self._directory.resolve():
            with alone:
                self.flush()
            return
        with lock_directory(directory, LOCK):
            # A reader copies under the lock, because other threads may open new files once the writer replaces them.
            if not self._read_only:
                with suppress(_Overwritten):
                    self._copy_to(directory, alone)
                    return
            with alone:
                self._copy_to(directory, alone)

    def load(self, directory: Path) -> None:
        """Replace the content by the content of another directory. If it raises StoreError, the store is unchanged."""
        self._writable()
        if directory.resolve() == self._directory.resolve():
            return
        with closing(SliceStore(directory, None, read_only=True)) as other:
            if other.capacity != self.capacity:
                raise StoreError(
                    f"{directory} is a ring of {other.capacity} steps, but this ring has {self.capacity}; load "
                    "it into a ring of the same capacity"
                )
            other._copy_to(self._directory, nullcontext())
        self._close_files()
        self._open(self.capacity)

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

    @property
    def capacity(self) -> int:
        """Number of steps in the ring."""
        return self._manifest.capacity

    @property
    def files(self) -> RingFiles:
        """Files of the arrays. Raises StoreError after `close`."""
        if self._closed:
            raise StoreError(f"the buffer in {self._directory} is closed; open it again")
        return self._files

    def refresh(self) -> None:
        """Apply the changes of the writer; do nothing in the writer itself, and after `close`. Raises StoreError if the
        buffer is gone."""
        self._become_reader_if_forked()
        if not self._read_only or self._closed:
            return
        # The arrays are known only once there is a step.
        if self._followed is None or self._followed.replaced or not self.state.head:
            self._reopen()
            return
        records = self._followed.read().records
        if self._lost and records:
            # They may include a flush, and what they overwrite counts at once.
            self._reopen()
            return
        for record in records:
            self.state.apply(record)

    def _reopen(self) -> None:
        """Read the files again, as they are now."""
        draws = self.state.draws
        self._close_files()
        self._open(None)
        # The journal has only the writer's draws, but this reader does not repeat its own.
        self.state.draws = max(self.state.draws, draws)

    # ------------------------------------------------------------------ helpers

    def _create(self, capacity: int) -> Manifest:
        """Write an empty buffer without arrays."""
        manifest = Manifest(journal=f"{new_name()}.journal", capacity=capacity)
        write_journal(self._directory / manifest.journal, SliceState(capacity).snapshot())
        write_manifest(self._directory, manifest)
        return manifest

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
        boot = slice_directory.boot_id()
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
        self._ahead = max((record.stop for record in records if isinstance(record, ReserveOnDiskRecord)), default=0)
        if lost:
            last = max(n for n, record in enumerate(records) if isinstance(record, FlushRecord | SnapshotRecord))
            records = records[: last + 1]
        self.state = SliceState(self.capacity)
        try:
            for record in records:
                self.state.apply(record)
        except (KeyError, ValueError) as error:
            raise StoreError(
                f"{self._journal_path} is damaged ({error}); fill the buffer from the log again"
            ) from error
        if lost:
            self.state.forget(self._ahead - self.capacity)
            # The next step is not below the steps to forget, or it would count as overwritten.
            self.state.head = max(self.state.head, self.state.low)
        if self._read_only:
            return
        self._journal = Journal(self._journal_path, reading.stop)
        if lost:
            self._compact(self._journal)
        else:
            self._journal.append(OpenRecord(boot))

    def _create_arrays(self, leaves: Leaves) -> None:
        """Create the files of the arrays if this is the first step."""
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
        """Forget the steps that writing up to counter `stop` overwrites, first in the journal and then in memory."""
        if stop <= self.capacity:
            return
        if stop > self._ahead:
            ahead = stop + self.capacity // _AHEAD
            journal.append(ReserveOnDiskRecord(ahead), sync=True)
            self._ahead = ahead
        record = ReserveRecord(stop)
        journal.append(record)
        self.state.apply(record)

    def _short_journal(self) -> Journal:
        """Return the journal, after compacting it if it has grown long."""
        journal = self._writable()
        if journal.long:
            self._compact(journal)
        return journal

    def _compact(self, journal: Journal) -> None:
        """Replace the journal by one that begins with a snapshot, so that it does not grow without limit."""
        self._files.sync()
        boot = OpenRecord(slice_directory.boot_id())
        journal.replace(self.state.snapshot(), ReserveOnDiskRecord(self._ahead), boot)

    def _copy_to(self, directory: Path, alone: AbstractContextManager[object]) -> None:
        """Write everything to new files in a directory, name them in its manifest, and delete its other files."""
        with alone:
            low, snapshot, source, before = self.state.low, self.state.snapshot(), self._files, self._manifest
        name = new_name()
        arrays = tuple(replace(spec, file=f"{name}-{n:03}.bin") for n, spec in enumerate(before.arrays))
        manifest = Manifest(journal=f"{name}.journal", capacity=self.capacity, arrays=arrays)
        try:
            with closing(RingFiles(directory, arrays, self.capacity, writable=True, new=True)) as files:
                source.copy_to(files, min(low, snapshot.head), snapshot.head)
                files.sync()
            with alone:
                self.refresh()
                if before != self._manifest or self.state.low > low:
                    raise _Overwritten(
                        f"{self._directory} is being written by another buffer; copy it once that buffer is closed"
                    )
            write_journal(directory / manifest.journal, snapshot)
        except BaseException:
            for file in (manifest.journal, *(spec.file for spec in arrays)):
                (directory / file).unlink(missing_ok=True)
            raise
        write_manifest(directory, manifest)
        remove_all_but(directory, manifest)

    def _writable(self) -> Journal:
        self._become_reader_if_forked()
        if self._journal is None or self._lock is None or not self._lock.held:
            closed = "is closed, or another process writes to it; open it to write"
            raise StoreError(f"the buffer in {self._directory} {self._why_read_only if self._read_only else closed}")
        return self._journal

    def _close_files(self) -> None:
        self._files.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._followed is not None:
            self._followed.close()
            self._followed = None

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

"""A directory of trajectories, one file for each, with one writer: a thread that performs operations in order.

A file is on disk before the journal names it, and is deleted only after the journal records its removal. The error of a
failed write is raised at the next call, and the write is tried again. After a kill the directory contains everything
that was flushed; files that the journal does not name are moved to a separate folder.
"""

import copy
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rollstream.consumers.buffers.trajectories.folder import (
    FILE,
    LOCK,
    Formats,
    SavedCheckpoint,
    path_of,
    place_files,
    put_aside,
    store_errors,
    sweep,
)
from rollstream.consumers.buffers.trajectories.index import TrajectoryEntry
from rollstream.consumers.buffers.trajectories.journal import (
    NAME,
    AddRecord,
    DrawRecord,
    DropRecord,
    JournalContent,
    PositionRecord,
    Record,
    TrajectoryJournal,
)
from rollstream.consumers.buffers.trajectories.rows import CheckedTrajectory, FetchedArrays, owned
from rollstream.topics.files.atomic_files import (
    DirectoryLock,
    StoreError,
    lock_directory,
    replacing,
    sync_directory,
)
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_GROUP = 64
"""Maximum number of operations in one append to the journal."""


class AddOperation(NamedTuple):
    """Store a trajectory; `at` is the position after its log record, if any."""

    entry: TrajectoryEntry
    part: CheckedTrajectory
    at: tuple[int, int] | None


class DropOperation(NamedTuple):
    """Remove all trajectories below an id."""

    first_kept: int
    entries: tuple[TrajectoryEntry, ...]


Operation = AddOperation | DropOperation | PositionRecord | DrawRecord


class TrajectoryStore:
    """The single writer of a directory.

    `content` is what the directory held when it was opened, or after the latest `replace`; additions do not change it.
    """

    def __init__(
        self, directory: Path, *, seed: int, formats: Formats, format_name: str, max_pending_bytes: int = 2**28
    ) -> None:
        """Open a directory. Raises StoreError if it is in use, damaged, or was written by another program."""
        self.directory = directory
        self.format_name = format_name
        """Format of new files."""
        self._formats = formats
        self._max_pending_bytes = max_pending_bytes
        self._seed = seed
        self._turn = threading.Condition()
        self._queue: deque[Operation] = deque()
        self._pending: dict[int, CheckedTrajectory] = {}
        self._pending_bytes = 0
        self._failure: Exception | None = None
        self._writing = False
        self._executor: ThreadPoolExecutor | None = None
        self._pinned = False
        self._unpinned: list[Path] = []
        """Files to delete once they are no longer pinned."""
        self._lock: DirectoryLock | None = None
        self._closed_bytes = 0
        """Size of the journal when this store closed it."""
        self._process = os.getpid()
        self.open()

    def open(self) -> None:
        """Open the directory again after `close`. Raises StoreError if it is in use, if it was changed after
        `close`, or in a forked child, whose copy of the index may be out of date."""
        if self.is_open:
            return
        if os.getpid() != self._process:
            raise StoreError(
                f"the buffer in {self.directory} is written only by the process that opened it; open another buffer "
                "with another directory in this process"
            )
        # The lock is also released when the store is garbage-collected, for example when a notebook cell is run again.
        self._lock = lock_directory(self.directory, LOCK)
        try:
            if not (self.directory / NAME).exists() and any(
                FILE.fullmatch(name) for name in os.listdir(self.directory)
            ):
                raise StoreError(
                    f"{self.directory} contains trajectories of another program; give an empty directory, and load the "
                    "trajectories into it (load_checkpoint)"
                )
            self._journal = TrajectoryJournal(self.directory, self._seed)
            if self._closed_bytes not in (0, self._journal.size_bytes):
                raise StoreError(f"{self.directory} was written by another process since it was closed; open it again")
            self.content = self._journal.content
            put_aside(self.directory, self.content)
        except BaseException:
            self._lock.release()
            raise
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trajectory-writer")

    @property
    def is_open(self) -> bool:
        """Whether the store accepts writes."""
        return self._lock is not None and self._lock.held

    # ------------------------------------------------------------------ in

    def owned(self, part: CheckedTrajectory) -> CheckedTrajectory:
        """Return a trajectory that cannot change before it is written. Raises RecordError if the format rejects it."""
        self._formats(self.format_name).check(part)
        return part._replace(arrays={path: owned(array) for path, array in part.arrays.items()})

    def ready(self) -> None:
        """Wait until there is room for more. Raises the error of a failed write, which is then tried again."""
        with self._turn:
            self._turn.wait_for(lambda: self._failure or self._pending_bytes < self._max_pending_bytes)
            self._raise()

    def put(self, operation: Operation) -> None:
        """Queue an operation; its arrays must not change any more."""
        with self._turn:
            self._queue.append(operation)
            if isinstance(operation, AddOperation):
                self._pending[operation.entry.trajectory_id] = operation.part
                self._pending_bytes += operation.part.size_bytes
            self._work()

    def flush(self) -> None:
        """Wait until every operation is on disk; a failed operation is tried again first. Raises StoreError if writing
        fails; a further call tries again."""
        with self._turn:
            if self._queue:
                self._failure = None
            self._raise()
            self._work()
            self._turn.wait_for(lambda: self._failure or not self._queue)
            self._raise()

    def pending_count(self, ids: Iterable[int]) -> int:
        """Number of these trajectories that are not on disk yet."""
        with self._turn:
            return sum(number in self._pending for number in ids)

    def load(self, checkpoint: SavedCheckpoint) -> JournalContent:
        """Replace the content by a checkpoint, atomically, and return it. The old journal names only the old files, and
        the new journal only the new files. No operation may be queued during the call."""
        self.flush()
        has_others = any(FILE.fullmatch(name) for name in os.listdir(self.directory))
        content, source = checkpoint.content, checkpoint.source
        kept = None if has_others else ()
        self.replace(place_files(self.directory, content, source, checkpoint.formats, kept=kept))
        return self.content

    def replace(self, content: JournalContent) -> None:
        """Replace the content atomically; its files must exist. No operation may be queued during the call."""
        self.flush()
        self._journal.replace(content)
        self.content = self._journal.content
        sweep(self.directory, self.content)

    def close(self) -> None:
        """Flush, and let another process open the directory. If it raises StoreError, the store stays open."""
        if not self.is_open:
            return
        self.flush()
        assert self._executor is not None
        assert self._lock is not None
        self._journal.close()
        self._executor.shutdown()
        self._closed_bytes = self._journal.size_bytes
        self._lock.release()

    # ------------------------------------------------------------------ out

    def path(self, entry: TrajectoryEntry) -> Path:
        """Path of the file of a trajectory, written or not."""
        return path_of(self.directory, entry, self._formats)

    def arrays(self, entry: TrajectoryEntry) -> FetchedArrays:
        """Return the arrays of a trajectory, read-only. Raises StoreError if the file is gone or damaged."""
        part = self._pending.get(entry.trajectory_id)
        if part is not None:
            return FetchedArrays(part.arrays, mapped=False)
        path = self.path(entry)
        kind = self._formats(entry.description.format)
        try:
            return FetchedArrays(kind.arrays(path), kind.mapped)
        except FileNotFoundError as error:
            remedy = "restore it, or fill a new directory from the log"
            if os.getpid() != self._process:
                remedy = (
                    "the process from which this one was forked has removed it since; fork again, or keep more "
                    "trajectories there (max_trajectories, max_bytes)"
                )
            raise StoreError(f"{path} is gone; {remedy}") from error

    def sources(self, content: JournalContent, rows: object) -> Callable[[int], Path]:
        """Return the files of trajectories by place, for one checkpoint at a time; no file is deleted until `unpin`."""
        with self._turn:
            self._pinned = True
        return lambda place: self.path(content[place])

    def unpin(self) -> None:
        """Delete the files whose trajectories were removed since `sources`, and allow deletion again."""
        with self._turn:
            self._pinned, gone, self._unpinned = False, self._unpinned, []
        try:
            for path in gone:
                path.unlink(missing_ok=True)
        except OSError as error:  # Opening the directory again deletes them.
            event(logger, "trajectories_not_deleted", level=logging.WARNING, why=str(error))

    # ------------------------------------------------------------------ within

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._work()
            # A copy is raised, because an error that is raised twice collects both tracebacks.
            raise copy.copy(failure) from failure

    def _work(self) -> None:
        if self._queue and not self._writing and self._failure is None:
            assert self._executor is not None
            self._writing = True
            self._executor.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._turn:
                operations = list(islice(self._queue, _GROUP))
                if not operations:
                    self._writing = False
                    self._turn.notify_all()
                    return
            try:
                self._write(operations)
            except Exception as error:  # The error is raised at the next call.
                with self._turn:
                    self._failure, self._writing = error, False
                    self._turn.notify_all()
                return
            failure = self._tidy(operations)
            with self._turn:
                for operation in operations:
                    self._queue.popleft()
                    if isinstance(operation, AddOperation):
                        del self._pending[operation.entry.trajectory_id]
                        self._pending_bytes -= operation.part.size_bytes
                self._failure = failure
                self._turn.notify_all()

    def _write(self, operations: list[Operation]) -> None:
        """Write operations to disk, all of them or none."""
        for operation in operations:
            if isinstance(operation, AddOperation):
                with replacing(self.path(operation.entry), sync_name=False) as file:
                    self._formats(operation.entry.description.format).write(file, operation.part)
        with store_errors(self.directory):
            sync_directory(self.directory)
        layouts = [operation.part.layout for operation in operations if isinstance(operation, AddOperation)]
        self._journal.append(list(map(_record, operations)), layouts[-1] if layouts else None)

    def _tidy(self, operations: list[Operation]) -> Exception | None:
        """Delete the files of removed trajectories, and compact the journal if it has too many records.

        The operations stay on disk if this fails; the error is logged, or returned if it is unexpected.
        """
        try:
            for operation in operations:
                if isinstance(operation, DropOperation):
                    paths = [self.path(entry) for entry in operation.entries]
                    with self._turn:
                        if self._pinned:
                            self._unpinned += paths
                            continue
                    for path in paths:
                        path.unlink(missing_ok=True)
            self._journal.shorten()
        except OSError as error:  # Opening the directory again deletes them.
            event(logger, "trajectories_not_deleted", level=logging.WARNING, why=str(error))
        except StoreError as error:  # The journal stays long until the next attempt.
            event(logger, "journal_not_shortened", level=logging.WARNING, why=str(error))
        except Exception as error:
            return error
        return None


def _record(operation: Operation) -> Record:
    match operation:
        case AddOperation(entry, _part, at):
            return AddRecord(entry, at)
        case DropOperation(first_kept):
            return DropRecord(first_kept)
        case _:
            return operation

"""A directory of trajectories, a file each, with one writer: a thread that writes what it is handed, in order.

A file is on disk before the journal names it, and gone only after the journal says that it left. A failed write raises
at the next call, and waits to be written again. Who opens the directory after a kill finds all that was flushed; files
that the journal knows nothing of are put aside.
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

from consumers.buffers.files import DirectoryLock, StoreError, lock_directory, replacing, sync_directory
from consumers.buffers.trajectory_folder import FILE, LOCK, Formats, Found, bring, path_of, put_aside, said_of, sweep
from consumers.buffers.trajectory_index import Entry
from consumers.buffers.trajectory_journal import NAME, Content, Encoder, Journal
from consumers.buffers.trajectory_rows import Checked, Fetched, owned
from topics.logs import event

logger = logging.getLogger(__name__)
_GROUP = 64
"""Most operations that share one append to the journal."""
_COMPACT_RECORDS = 4096


class Add(NamedTuple):
    """A trajectory to be stored, with the position behind it."""

    entry: Entry
    part: Checked
    at: tuple[int, int] | None


class Skip(NamedTuple):
    """A position that moves without a trajectory."""

    partition: int
    offset: int


class Drop(NamedTuple):
    """Trajectories that leave: all below an id."""

    first_kept: int
    entries: tuple[Entry, ...]


class State(NamedTuple):
    """The next id, and where random draws stand."""

    counter: int
    seed: int
    draws: int


Operation = Add | Skip | Drop | State


class TrajectoryStore:
    """See the module. `content` is what the directory held when it was opened."""

    def __init__(
        self, directory: Path, *, seed: int, formats: Formats, format_name: str, max_pending_bytes: int = 2**28
    ) -> None:
        """Raises StoreError where the directory is in use, damaged, or of another program."""
        self.directory = directory
        self.format_name = format_name
        """Of new files."""
        self._formats = formats
        self._max_pending_bytes = max_pending_bytes
        self._seed = seed
        self._turn = threading.Condition()
        self._queue: deque[Operation] = deque()
        self._pending: dict[int, Checked] = {}
        self._pending_bytes = 0
        self._failure: Exception | None = None
        self._writing = False
        self._executor: ThreadPoolExecutor | None = None
        self._pinned = False
        self._unpinned: list[Path] = []
        """Files to be deleted when they are pinned no more."""
        self._lock: DirectoryLock | None = None
        self._records = 0
        self._process = os.getpid()
        self.open()

    def open(self) -> None:
        """Go on after `close`. Raises StoreError where the directory is in use, or was changed since, and in a forked
        child: what it knows of the index is of when it was forked."""
        if self.is_open:
            return
        if os.getpid() != self._process:
            raise StoreError(
                f"the buffer in {self.directory} is written only by the process that opened it; open a buffer in this "
                "one, with a directory of its own"
            )
        # Also given back when nobody refers to the store any more, as when a notebook's cell is run again.
        self._lock = lock_directory(self.directory, LOCK)
        try:
            if not (self.directory / NAME).exists() and any(
                FILE.fullmatch(name) for name in os.listdir(self.directory)
            ):
                raise StoreError(
                    f"{self.directory} holds trajectories of another program; give an empty directory, and load these "
                    "into it (load_checkpoint)"
                )
            self._journal = Journal(self.directory, self._seed)
            if self._records not in (0, self._journal.records):
                raise StoreError(f"{self.directory} was written to by others since it was closed here; open it anew")
            self.content = self._journal.content
            put_aside(self.directory, self.content)
        except BaseException:
            self._lock.release()
            raise
        self._encoder = self._journal.encoder()
        self._held = len(self.content.entries)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trajectory-writer")

    @property
    def is_open(self) -> bool:
        """Whether it may be written to."""
        return self._lock is not None and self._lock.held

    # ------------------------------------------------------------------ in

    def owned(self, part: Checked) -> Checked:
        """A trajectory that nobody can change until it is written. Raises RecordError for what no file can hold."""
        self._formats(self.format_name).check(part)
        return part._replace(arrays={path: owned(array) for path, array in part.arrays.items()})

    def ready(self) -> None:
        """Wait until more may be handed over. Raises what failed since the last call; the writer then tries again."""
        with self._turn:
            self._turn.wait_for(lambda: self._failure or self._pending_bytes < self._max_pending_bytes)
            self._raise()

    def put(self, operation: Operation) -> None:
        """Hand over, in order; arrays may not change any more."""
        with self._turn:
            self._queue.append(operation)
            if isinstance(operation, Add):
                self._pending[operation.entry.trajectory_id] = operation.part
                self._pending_bytes += operation.part.size_bytes
            self._work()

    def flush(self) -> None:
        """Return when everything handed over is on disk: what failed is tried again first. Raises StoreError where it
        is not; call again."""
        with self._turn:
            if self._queue:
                self._failure = None
            self._raise()
            self._work()
            self._turn.wait_for(lambda: self._failure or not self._queue)
            self._raise()

    def waiting(self, ids: Iterable[int]) -> int:
        """How many of these trajectories are not on disk yet."""
        with self._turn:
            return sum(number in self._pending for number in ids)

    def load(self, found: Found) -> Content:
        """Hold what a checkpoint does instead, in one step, and return that: before it nothing refers to the files that
        are brought, after it nothing to those that were there. Nothing may be handed over meanwhile."""
        self.flush()
        self.replace(bring(found, self.directory))
        return self.content

    def replace(self, content: Content) -> None:
        """Hold this instead, atomically; its files are there. Nothing may be handed over meanwhile."""
        self.flush()
        self._journal.replace(content)
        self.content = self._journal.content
        self._encoder = self._journal.encoder()
        self._held = len(content.entries)
        sweep(self.directory, self.content)

    def close(self) -> None:
        """Flush, and let others open the directory. Raises StoreError, and stays open, where that fails."""
        if not self.is_open:
            return
        self.flush()
        assert self._executor is not None
        assert self._lock is not None
        self._journal.seal()
        self._executor.shutdown()
        self._records = self._journal.records
        self._journal.close()
        self._lock.release()

    # ------------------------------------------------------------------ out

    def path(self, entry: Entry) -> Path:
        """Where the file of a trajectory is, or is going to be."""
        return path_of(self.directory, entry, self._formats)

    def arrays(self, entry: Entry) -> Fetched:
        """Arrays not to be written to. Raises StoreError where the file is not as it was."""
        part = self._pending.get(entry.trajectory_id)
        if part is not None:
            return Fetched(part.arrays, mapped=False)
        path = self.path(entry)
        kind = self._formats(entry.about.format)
        try:
            return Fetched(kind.arrays(path), kind.mapped)
        except FileNotFoundError as error:
            raise StoreError(f"{path} is gone; restore it, or fill a new directory from the log") from error

    def sources(self, content: Content, rows: object) -> Callable[[int], Path]:
        """What a checkpoint has trajectories from, by place: their files, which stay until `unpin`. One at a time."""
        with self._turn:
            self._pinned = True
        return lambda place: self.path(content[place])

    def unpin(self) -> None:
        """Files may go again; those that were to go meanwhile do."""
        with self._turn:
            self._pinned, gone, self._unpinned = False, self._unpinned, []
        try:
            for path in gone:
                path.unlink(missing_ok=True)
        except OSError as error:  # the next process that opens the directory deletes them
            event(logger, "trajectories_not_deleted", level=logging.WARNING, why=str(error))

    # ------------------------------------------------------------------ within

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._work()
            # A copy: the same error raised twice would gather the tracebacks of both.
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
            except Exception as error:  # whatever it is, it is raised at the next call
                with self._turn:
                    self._failure, self._writing = error, False
                    self._turn.notify_all()
                return
            failure = self._tidy(operations)
            with self._turn:
                for operation in operations:
                    self._queue.popleft()
                    if isinstance(operation, Add):
                        del self._pending[operation.entry.trajectory_id]
                        self._pending_bytes -= operation.part.size_bytes
                self._failure = failure
                self._turn.notify_all()

    def _write(self, operations: list[Operation]) -> None:
        """Have operations on disk, all or none of them."""
        for operation in operations:
            if isinstance(operation, Add):
                with replacing(self.path(operation.entry), sync_name=False) as file:
                    self._formats(operation.entry.about.format).write(file, operation.part)
        with said_of(self.directory):
            sync_directory(self.directory)
        # What a failed append brings along is known to the file no more than before.
        encoder = self._encoder.copy()
        self._journal.append(b"".join(_record(encoder, operation) for operation in operations))
        self._encoder = encoder

    def _tidy(self, operations: list[Operation]) -> Exception | None:
        """Delete the files of what has left, and shorten the journal where most of it is about such.

        What fails here undoes nothing of what is on disk: it is logged, or returned where nobody foresaw it.
        """
        try:
            for operation in operations:
                if isinstance(operation, Drop):
                    self._held -= len(operation.entries)
                    paths = [self.path(entry) for entry in operation.entries]
                    with self._turn:
                        if self._pinned:
                            self._unpinned += paths
                            continue
                    for path in paths:
                        path.unlink(missing_ok=True)
                elif isinstance(operation, Add):
                    self._held += 1
            if self._journal.records > _COMPACT_RECORDS + 2 * self._held:
                self._journal.replace(self._journal.read())
                self._encoder = self._journal.encoder()
        except OSError as error:  # who opens the directory next deletes them
            event(logger, "trajectories_not_deleted", level=logging.WARNING, why=str(error))
        except StoreError as error:  # the journal stays as long as it is, until the next time
            event(logger, "journal_not_shortened", level=logging.WARNING, why=str(error))
        except Exception as error:
            return error
        return None


def _record(encoder: Encoder, operation: Operation) -> bytes:
    match operation:
        case Add(entry, part, at):
            return encoder.entry(*entry, at, part.layout)
        case Skip(partition, offset):
            return encoder.position(partition, offset)
        case Drop(first_kept):
            return encoder.drop(first_kept)
        case State(counter, seed, draws):
            return encoder.state(counter, seed, draws)

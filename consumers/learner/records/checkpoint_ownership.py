"""CheckpointOwnership: the right of one process to write a learner's checkpoints to a file system.

A new owner waits for a save in progress, though not for ever; after that, the process before it saves no more. Without
locks, as at a URL, nothing is promised.
"""

import logging
import time
import uuid
from pathlib import Path

from rollstream.consumers.files.atomic_files import DirectoryLock, StoreError, lock_directory
from rollstream.topics.errors import Fenced
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
PATIENCE_S = 90.0
"""Less than supervisor.ready_timeout_s, because the learner reports no progress meanwhile."""
_POLL_S = 0.1


class CheckpointOwnership:
    """Lets the newest owner of a directory save. A lock is held during each save, and its file names the owner."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Next to the directory, in which orbax expects checkpoints; no learner has a name that begins with a dot.
        self._file = directory.with_name(f".{directory.name}.lock")
        self._id = uuid.uuid4().hex

    def take(self) -> DirectoryLock | None:
        """Become the owner once no process is saving, or after `PATIENCE_S`; return the lock, None without one. Raises
        StoreError if the file cannot be written."""
        lock = self._lock()
        try:
            self._file.write_text(self._id)
        except OSError as error:
            if lock is not None:
                lock.release()
            raise StoreError(
                f"{self._file} cannot be written ({error.strerror or error}); check the free space and the permissions "
                "there, or set learner.checkpoint.directory to another disk"
            ) from error
        return lock

    def lock(self) -> DirectoryLock | None:
        """Return the lock to hold during a save, None without one. Raises Fenced if another process is the owner."""
        lock = self._lock()
        if lock is not None and self._file.read_text() != self._id:
            lock.release()
            raise Fenced(
                f"another process of this name has begun to write the checkpoints in {self._directory}, so this one "
                "saves none; start it again if it is the only learner of this name, or give each learner a name"
            )
        return lock

    def _lock(self) -> DirectoryLock | None:
        """Take the lock once it is free. A process that was suspended during a save may hold it for ever, so after
        `PATIENCE_S` this process goes on without it, as on a file system without locks."""
        deadline, waits = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return lock_directory(self._file.parent, self._file.name)
            except StoreError as error:
                if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() > deadline:
                    event(logger, "checkpoints_without_lock", level=logging.WARNING, error=str(error))
                    return None
            if not waits:
                event(logger, "checkpoints_locked", directory=str(self._directory))
                waits = True
            time.sleep(_POLL_S)

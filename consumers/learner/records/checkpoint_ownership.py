"""CheckpointOwnership: the right of one process to write a learner's checkpoints to a file system.

A new owner waits for a save in progress; after that, the process before it saves no more. Without locks, as at a URL,
nothing is promised.
"""

import logging
import uuid
from pathlib import Path

from rollstream.consumers.files.atomic_files import DirectoryLock, StoreError, lock_directory
from rollstream.topics.errors import Fenced
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class CheckpointOwnership:
    """Lets the newest owner of a directory save. A lock is held during each save, and its file names the owner."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Next to the directory, in which orbax expects checkpoints; no learner has a name that begins with a dot.
        self._file = directory.with_name(f".{directory.name}.lock")
        self._id = uuid.uuid4().hex

    def take(self) -> DirectoryLock | None:
        """Become the owner once no process is saving; return the lock, None if the file system has no locks. Raises
        StoreError if the file cannot be written."""
        lock = self._lock()
        if lock is not None:
            try:
                self._file.write_text(self._id)
            except OSError as error:
                lock.release()
                raise StoreError(
                    f"{self._file} cannot be written ({error.strerror or error}); check the free space and the "
                    "permissions there, or set learner.checkpoint.directory to another disk"
                ) from error
        return lock

    def lock(self) -> DirectoryLock | None:
        """Return the lock to hold during a save, as `take` does. Raises Fenced if another process is the owner now."""
        lock = self._lock()
        if lock is not None and self._file.read_text() != self._id:
            lock.release()
            raise Fenced(
                f"another process of this name has begun to write the checkpoints in {self._directory}, so this one "
                "saves none; start it again if it is the only learner of this name, or give each learner a name"
            )
        return lock

    def _lock(self) -> DirectoryLock | None:
        place = (self._file.parent, self._file.name)
        try:
            return lock_directory(*place)
        except StoreError:
            event(logger, "checkpoints_locked", directory=str(self._directory))
        try:
            return lock_directory(*place, wait=True)
        except StoreError as error:
            event(logger, "checkpoints_without_lock", level=logging.WARNING, error=str(error))
        return None

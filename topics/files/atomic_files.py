"""Atomic files, for processes that may be killed at any instruction.

A file gets its name only once its bytes are on disk, and the name is on disk before the call returns. So an index
written after the files it names never names a missing file. A write that fails raises an error with its cause.
"""

import contextlib
import fcntl
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

from rollstream.topics.errors import RollstreamError

UNFINISHED = ".unfinished"
"""Suffix of files that are being written; no reader opens them."""
_PIECE_BYTES = 2**20


class StoreError(RollstreamError):
    """A store does not answer or cannot be read or written, or its files are incomplete or damaged."""


@contextlib.contextmanager
def replacing(path: Path, *, sync_name: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically, and is on disk, when the block ends without an error.

    A caller that writes many files can pass `sync_name=False` and call `sync_directory` once for all of them.

    Raises StoreError, with the cause, if the file cannot be written; `path` is then unchanged, as after an error in the
    block. Also raises StoreError if `path` is written, but its directory cannot be synced.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex}{UNFINISHED}")
    try:
        make_directory(path.parent)
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror or error}); nothing was stored. Check the "
            "free space and the permissions there, then write again"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    if sync_name:
        try:
            sync_directory(path.parent)
        except OSError as error:
            raise StoreError(
                f"{path} is written, but its directory cannot be synced ({error.strerror or error}), so the file may "
                "be missing if the machine stops now. Check the disk, then write again"
            ) from error


def copy_file(source: Path, target: Path, *, sync_name: bool = True) -> None:
    """Copy a file as `replacing` writes one. Raises FileNotFoundError if there is no source, and otherwise StoreError,
    which names the file that cannot be read or written."""
    with _opened(source) as original, replacing(target, sync_name=sync_name) as file:
        while piece := _piece(source, original):
            file.write(piece)


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _piece(path: Path, file: BinaryIO) -> bytes:
    try:
        return file.read(_PIECE_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be read ({error.strerror or error}); check the disk and the permissions there")


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, with their names on disk. Raises OSError."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def write_bytes(path: Path, *pieces: bytes | memoryview) -> None:
    """Write pieces one after another, as one file, atomically. Raises StoreError."""
    with replacing(path) as file:
        for piece in pieces:
            file.write(piece)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document atomically. Raises StoreError, or TypeError if it cannot be expressed in JSON."""
    write_bytes(path, json.dumps(value, ensure_ascii=False, indent=1).encode())


def read_json(path: Path) -> Any:
    """Read a JSON document. Raises FileNotFoundError, or StoreError if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}); it was not written by this program, restore it") from error


def remove(path: Path) -> None:
    """Delete a file, if it exists, and sync its directory. Raises StoreError."""
    try:
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be deleted ({error.strerror or error}); check the permissions there"
        ) from error


def remove_unfinished(directory: Path) -> int:
    """Delete unfinished files and folders left by killed writers of a directory, and return their number.

    Only the directory's one writer may call this: it would also delete the unfinished files of another writer.
    """
    unfinished = list(directory.glob(f"*{UNFINISHED}")) if directory.is_dir() else []
    for path in unfinished:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return len(unfinished)


class DirectoryLock:
    """The right to be the only writer of a directory, held until `release`, garbage collection or the end of this
    process. A forked child does not hold it and does not block others."""

    def __init__(self, descriptor: int) -> None:
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        _locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this process may write."""
        return self._finalizer.alive

    def release(self) -> None:
        """Let another process write; later calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks: "weakref.WeakSet[DirectoryLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def lock_directory(directory: Path, name: str) -> DirectoryLock:
    """Become the only writer of a directory, which is created if needed. `name` is the lock file in it.

    Raises StoreError, with BlockingIOError as its cause, if there is another writer; and StoreError if the directory
    cannot be written or locked.
    """
    try:
        make_directory(directory)
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written ({error.strerror or error}); check the permissions there"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(
            f"{directory} is being written by another buffer; close that buffer, open this one read-only if "
            "possible, or give it another directory"
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"{directory} cannot be locked ({error.strerror or error}), so nothing would keep a second writer out: its "
            "file system has no locks, or they are turned off; mount it with locks, or choose a directory on another "
            "file system, such as a local disk"
        ) from error
    return DirectoryLock(descriptor)


def sync_directory(directory: Path) -> None:
    """Write the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

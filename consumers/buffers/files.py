"""Files that are whole or not there, for stores that may be killed at any instruction.

A file gets its name only once its bytes are on disk, and the name is on disk before the call returns: so an index that
is written after the files it names never names what is not there. A write that fails raises with its cause.
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

from topics.errors import RollstreamError

UNFINISHED = ".unfinished"
"""End of the names of files that are being written; nobody reads them."""


class StoreError(RollstreamError):
    """A store cannot be written, or what lies there is not whole."""


@contextlib.contextmanager
def replacing(path: Path, *, sync_name: bool = True) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path`, whole and on disk, when the block ends without an error.

    Who writes many calls `sync_directory` once for all of their names, instead of for each (`sync_name`).

    Raises StoreError, with the cause, where it cannot be written; `path` is then as it was before, as it is after
    an error of the block.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex}{UNFINISHED}")
    try:
        make_directory(path.parent)
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        if sync_name:
            sync_directory(path.parent)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror or error}); nothing of it is stored. Look at the space and the "
            "rights there, then write again"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """Make a directory, and those above it, so that their names are on disk. Raises OSError."""
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
    """Write a JSON document atomically. Raises StoreError, and TypeError for what is no JSON."""
    write_bytes(path, json.dumps(value, ensure_ascii=False, indent=1).encode())


def read_json(path: Path) -> Any:
    """A JSON document. Raises FileNotFoundError, and StoreError for what is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreError(f"{path} is no JSON ({error}); it was not written by this program, restore it") from error


def remove(path: Path) -> None:
    """Delete a file, if it is there, so that it stays deleted. Raises StoreError."""
    try:
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be deleted ({error.strerror or error}); look at the rights there") from error


def remove_unfinished(directory: Path) -> int:
    """Delete what killed writers of a directory left, and return how many files and folders that were.

    Only for who alone writes there: another's file in the making would be gone.
    """
    found = list(directory.glob(f"*{UNFINISHED}")) if directory.is_dir() else []
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return len(found)


class DirectoryLock:
    """The right to be the only writer of a directory: until `release`, until nobody refers to it any more, or until
    this process ends. A forked child does not have it, and does not keep it from others."""

    def __init__(self, descriptor: int) -> None:
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        _locks.add(self)

    @property
    def held(self) -> bool:
        """Whether this process may write."""
        return self._finalizer.alive

    def release(self) -> None:
        """Let others write; again, do nothing."""
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
    """Be the only writer of a directory, which is made. `name` is that of the file in it that is locked.

    Raises StoreError where there is another writer.
    """
    try:
        make_directory(directory)
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written ({error.strerror or error}); look at the rights there"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"{directory} is being written by another buffer; close that one, open this one to read only where it can "
            "be, or give it another directory"
        ) from error
    return DirectoryLock(descriptor)


def sync_directory(directory: Path) -> None:
    """Have the names of a directory on disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

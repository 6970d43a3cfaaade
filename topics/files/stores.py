"""Stores of archives and weights: a local directory, or any object store whose URL fsspec supports.

Objects are written completely and never changed. `create` writes only new objects; commits use it because object stores
have no rename. Accepted objects survive a crash of this machine. A store that cannot be reached, or refuses the
credentials, raises StoreError, whichever error its file system raises.
"""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from rollstream.topics.errors import ConfigurationError, RollstreamError, StateRefused
from rollstream.topics.files.atomic_files import UNFINISHED, StoreError, sync_directory, write_bytes

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")
_QUERY = re.compile(r"(://[^\s?]*)\?[^\s'\"),;]*")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class ObjectMissing(StateRefused):
    """An object that a manifest names is not in the store."""


class StoredFile(NamedTuple):
    """Size and modification time of an object, as its store reports them."""

    size_bytes: int
    modified: float | None
    """Seconds since the Unix epoch; None if the store does not report it."""


class Store(Protocol):
    """Objects by name; names may contain slashes. Every call raises StoreError if the store cannot be used."""

    url: str

    def names(self, under: str) -> list[str]:
        """Names of all objects below a folder, sorted."""

    def listing(self, under: str) -> dict[str, StoredFile]:
        """All objects below a folder, by name."""

    def size_bytes(self, name: str) -> int:
        """Size of an object. Raises FileNotFoundError if there is none."""

    def read(self, name: str) -> bytes:
        """Read an object. Raises FileNotFoundError if there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Store an object atomically."""

    def create(self, name: str, data: bytes) -> bool:
        """Store a new object; return False and change nothing if one exists."""

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""


def open_store(url: str) -> Store:
    """Open the store at a path or URL. Raises ConfigurationError if fsspec is missing or does not support the URL."""
    parts = urlsplit(url)
    if len(parts.scheme) < 2:  # No scheme, or the drive letter of a Windows path.
        return LocalStore(Path(url))
    if parts.scheme == "file":
        return LocalStore(Path(parts.path))
    return FsspecStore(url)


class LocalStore:
    """A local directory. Files get their names only when their bytes are on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)

    def names(self, under: str) -> list[str]:
        top = self.root / under

        def failed(error: OSError) -> None:
            # A folder may be deleted while it is listed, and one below that is closed to us, like lost+found, is not
            # ours. Without this, os.walk passes over every error.
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                return
            if error.filename == str(top) or not isinstance(error, PermissionError):
                raise error

        with self._reporting(under, "listed"):
            paths = (Path(folder, file) for folder, _folders, files in os.walk(top, onerror=failed) for file in files)
            return sorted(path.relative_to(self.root).as_posix() for path in paths if path.is_file())

    def listing(self, under: str) -> dict[str, StoredFile]:
        listed = {}
        for name in self.names(under):
            try:
                with self._reporting(name, "read"):
                    status = (self.root / name).stat()
            except FileNotFoundError:  # It was deleted after it was listed.
                continue
            listed[name] = StoredFile(status.st_size, status.st_mtime)
        return listed

    def size_bytes(self, name: str) -> int:
        with self._reporting(name, "read"):
            return (self.root / name).stat().st_size

    def read(self, name: str) -> bytes:
        with self._reporting(name, "read"):
            return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        write_bytes(self.root / name, data)

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        written = path.with_name(f".{uuid.uuid4().hex}{UNFINISHED}")
        write_bytes(written, data)
        try:
            # Unlike a rename, a link fails if the file exists.
            os.link(written, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror}); the file system must support hard links"
            ) from error
        finally:
            written.unlink()
        sync_directory(path.parent)
        return True

    def delete(self, name: str) -> None:
        path = self.root / name
        with self._reporting(name, "deleted"):
            path.unlink(missing_ok=True)
        for folder in path.relative_to(self.root).parents[:-1]:
            try:
                (self.root / folder).rmdir()
            except OSError:  # The directory holds other files.
                return

    @contextmanager
    def _reporting(self, name: str, done: str) -> Iterator[None]:
        """Raise StoreError in place of an error of the disk, except FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # ValueError for a name with a NUL
            fault = getattr(error, "strerror", None) or error
            raise StoreError(
                f"{self.root / name} cannot be {done} ({fault}); check the disk and the permissions there"
            ) from error


def check_mounted(store: Store, folder: str) -> None:
    """Raise StoreError if a store is a directory without a folder that must be in it.

    A mount point is an empty directory until the store is mounted.
    """
    if isinstance(store, LocalStore) and not (store.root / folder).is_dir():
        raise StoreError(f"{store.url}/{folder} is not on this machine; is it mounted?")


class FsspecStore:
    """A folder of an fsspec file system: s3://, gs://, memory:// and others.

    `create` is exclusive if the file system supports that: s3fs, gcsfs and memory:// refuse to replace an object. For
    other file systems it first checks that the object is missing; two archivers might pass this check at the same time.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigurationError(f'{shown(url)}: URLs need fsspec: pip install "rollstream[archive]"') from error
        try:
            # Listings are not cached, because another process may write.
            self.files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except Exception as error:  # Some file systems look for credentials at once.
            raise ConfigurationError(f"{shown(url)}: fsspec cannot open it: {fault_of(error)}") from error
        self.url = url.rstrip("/")

    def path(self, name: str) -> str:
        """Path of an object in the file system."""
        return f"{self._root.rstrip('/')}/{name}"

    def names(self, under: str) -> list[str]:
        return sorted(self._find(under, detail=False))

    def listing(self, under: str) -> dict[str, StoredFile]:
        return {
            name: StoredFile(int(details.get("size") or 0), _modified(details))
            for name, details in self._find(under, detail=True).items()
        }

    def _find(self, under: str, *, detail: bool) -> dict[str, Any]:
        """Return the objects below a folder, by name, with their details if wanted."""
        before = len(self.path(""))
        try:
            with self._reporting(under, "listed", FileNotFoundError):
                self.files.invalidate_cache()
                listed = self.files.find(self.path(under), detail=detail)
        except FileNotFoundError:
            return {}
        return {path[before:]: listed[path] if detail else None for path in listed}

    def size_bytes(self, name: str) -> int:
        with self._reporting(name, "read", FileNotFoundError):
            return int(self.files.size(self.path(name)) or 0)

    def read(self, name: str) -> bytes:
        with self._reporting(name, "read", FileNotFoundError):
            data: bytes = self.files.cat_file(self.path(name))
        return data

    def write(self, name: str, data: bytes) -> None:
        with self._reporting(name, "written"):
            self._put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        with self._reporting(name, "written"):
            try:
                self._put(name, data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError, ValueError):
                if self.files.exists(self.path(name)):
                    return False
                self._put(name, data)
        return True

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self._reporting(name, "deleted", FileNotFoundError):
            if self.files.exists(self.path(name)):
                self.files.rm_file(self.path(name))

    def _put(self, name: str, data: bytes, **mode: Any) -> None:
        path = self.path(name)
        try:
            # Object stores have no folders and ignore this.
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(path, data, **mode)
        except OSError as error:
            if mode and error.errno == errno.ENOSYS:
                raise NotImplementedError(str(error)) from error
            raise

    @contextmanager
    def _reporting(self, name: str, done: str, *passed: type[Exception]) -> Iterator[None]:
        """Raise StoreError in place of any error of the file system, except errors of the classes `passed`.

        The errors of many clients, such as botocore's, are no OSErrors.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, (RollstreamError, *passed)):
                raise
            raise StoreError(
                f"{shown(self.url)}/{name} cannot be {done} ({fault_of(error)}); check the store, and the credentials "
                "in the environment of this process"
            ) from error


def _modified(details: dict[str, Any]) -> float | None:
    """Time at which an object was written; each fsspec file system has its own name for it."""
    for key in _TIMES:
        match details.get(key):
            case datetime() as time:
                return time.timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                try:
                    return datetime.fromisoformat(text).timestamp()
                except ValueError:
                    continue
    return None


def shown(text: str) -> str:
    """Return a text without the passwords and queries of the URLs in it, which may be secrets."""
    return _QUERY.sub(r"\1", _CREDENTIALS.sub("", text))


def fault_of(error: Exception) -> str:
    """Return class and message of an error of a file system in one line, without secrets; for a StoreError of a store,
    of the error behind it."""
    cause = error.__cause__ if isinstance(error, StoreError) and error.__cause__ is not None else error
    text = " ".join(f"{type(cause).__name__}: {cause}".split())
    return shown(text)[:200]


def checked(store: Store, name: str, sha256: str) -> bytes:
    """Read an object and check its digest. Raises ObjectMissing if it is missing, and StateRefused if it differs."""
    import hashlib

    try:
        data = store.read(name)
    except FileNotFoundError:
        raise ObjectMissing(f"{store.url}/{name} is missing, but the archive's manifest names it") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StateRefused(f"{store.url}/{name} is not the archived file: its SHA-256 differs from the manifest's")
    return data

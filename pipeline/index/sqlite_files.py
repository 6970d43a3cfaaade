"""Opens SQLite files that are derived from a log: each can be deleted at any time, and is then rebuilt.

A file made from other topics, or with another version of its tables, is rebuilt from the start.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from rollstream.topics.errors import ConfigurationError

_OLDEST_SQLITE = (3, 35, 0)
_READER_CACHE_BYTES = 64 * 2**20
_WRITER_CACHE_BYTES = 256 * 2**20
_CHECKPOINT_PAGES = 16 * 1024
"""Pages in the write-ahead log before a checkpoint: many, because the rows of a transaction touch many index pages."""
_PRIMARY = 0xFF
"""Bits of an error code of SQLite without its details."""
_DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Errors of a damaged file, and of one that is not of SQLite."""
_META = "create table meta (name text primary key, value text not null) without rowid;"


def create(path: Path, identity: Mapping[str, str], tables: str) -> sqlite3.Connection:
    """Open a file for writing; if it has another identity, delete it and create it anew, with these tables.

    Raises ConfigurationError if this Python's SQLite is too old, and OperationalError if the file cannot be read or
    written, as on a full disk.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise ConfigurationError(
            f"the index of a run needs SQLite {'.'.join(map(str, _OLDEST_SQLITE))}, and this Python has "
            f"{sqlite3.sqlite_version}; use a newer Python"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (connection := existing(path, identity)) is not None:
        return connection
    remove(path)
    connection = _opened(path)
    # In one transaction, so that no reader finds a file without its identity.
    connection.executescript(f"begin; {_META} {tables}")
    connection.executemany("insert into meta values (?, ?)", identity.items())
    connection.execute("commit")
    return connection


def existing(path: Path, identity: Mapping[str, str]) -> sqlite3.Connection | None:
    """Open a file for writing; return None if it has another identity, is damaged, or is not a SQLite file."""
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(closing(_opened(path)))
            if identity_of(connection) == identity:
                stack.pop_all()
                return connection
        except sqlite3.DatabaseError as error:
            if not is_damage(error) and _code(error) != sqlite3.SQLITE_ERROR:  # of other tables
                raise
    return None


def identity_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the identity of a file, empty if it has none."""
    answer = connection.execute("select 1 from sqlite_master where name = 'meta'").fetchone()
    return dict(connection.execute("select name, value from meta")) if answer else {}


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether a file is damaged; an error of the system, such as a full disk, says nothing about it."""
    return _code(error) in _DAMAGES


def _code(error: sqlite3.DatabaseError) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY  # missing for text that is not UTF-8


def limit_cache(connection: sqlite3.Connection, size_bytes: int) -> None:
    """Limit the size of a connection's page cache."""
    connection.execute(f"pragma cache_size = -{size_bytes // 1024}")


def remove(path: Path) -> None:
    """Delete a file and the two files that SQLite keeps next to it."""
    for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        name.unlink(missing_ok=True)


def reader(path: Path) -> sqlite3.Connection:
    """Return a connection that cannot write."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60.0, check_same_thread=False)
    connection.execute("pragma query_only = on")
    limit_cache(connection, _READER_CACHE_BYTES)
    connection.execute(f"pragma mmap_size = {8 * 1024**3}")
    return connection


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("pragma journal_mode = wal")
    except BaseException:
        connection.close()
        raise
    # Transactions that a crash of the machine loses are read from the log again.
    connection.execute("pragma synchronous = normal")
    connection.execute(f"pragma wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    limit_cache(connection, _WRITER_CACHE_BYTES)
    connection.execute("pragma temp_store = memory")
    return connection

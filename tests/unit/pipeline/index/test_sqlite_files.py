"""Files derived from a log: damaged ones are made anew, and healthy ones survive errors of the system."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rollstream.pipeline.index import sqlite_files

IDENTITY, TABLES = {"version": "1"}, "create table places (place integer);"


def opened(path: Path) -> sqlite3.Connection:
    return sqlite_files.create(path, IDENTITY, TABLES)


def places(path: Path) -> list[int]:
    with closing(opened(path)) as db:
        return [row[0] for row in db.execute("select place from places")]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "index.sqlite"
    with closing(opened(path)) as db:
        db.execute("insert into places values (7)")
    assert places(path) == [7]
    return path


def overwritten(path: Path) -> None:
    path.write_bytes(b"x" * 5000)


def with_other_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("drop table meta; create table meta (other text);")


def with_another_identity(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("update meta set value = '0';")


@pytest.mark.parametrize("changed", [overwritten, with_other_tables, with_another_identity])
def test_a_file_that_is_of_no_use_is_made_anew(filled: Path, changed: Callable[[Path], None]) -> None:
    changed(filled)
    assert places(filled) == []


_ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tests.unit.pipeline.index.test_sqlite_files import opened
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
opened(Path(sys.argv[1]))
"""


def test_a_healthy_file_survives_a_full_disk(filled: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ON_A_FULL_DISK, str(filled)], stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert ended.stderr.splitlines()[-1].startswith("sqlite3.OperationalError")
    assert places(filled) == [7]

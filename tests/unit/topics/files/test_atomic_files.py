"""Files of buffers are whole or absent, whichever process is killed and whatever fails."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.topics.files import atomic_files
from rollstream.topics.files.atomic_files import (
    StoreError,
    copy_file,
    lock_directory,
    read_json,
    remove_unfinished,
    replacing,
    write_bytes,
    write_json,
)
from tests.support.paths import ROOT
from tests.support.waiting import eventually

WRITER = """
import sys
from pathlib import Path
from rollstream.topics.files.atomic_files import write_bytes
path = Path(sys.argv[1])
for number in range(10**9):
    write_bytes(path, number.to_bytes(8, "little") * 50_000)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    for round_number in range(3):
        process = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(path)], cwd=Path.cwd(), env=_environment())
        seen = path.read_bytes()[:8] if path.exists() else b""
        eventually(lambda s=seen: path.exists() and path.read_bytes()[:8] != s, 60, "a few files written")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        data = path.read_bytes()
        assert data == data[:8] * 50_000, round_number
    remove_unfinished(path.parent)
    assert os.listdir(path.parent) == ["file"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_name_that_may_not_survive_a_crash_is_not_called_stored_or_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_directory: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(atomic_files, "sync_directory", broken)
    with pytest.raises(StoreError, match=r"index\.json is written, but its directory cannot be synced \(Input/output"):
        write_json(tmp_path / "index.json", {"size": 1})
    assert read_json(tmp_path / "index.json") == {"size": 1}


def test_a_failed_write_says_why_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "index.json", {"size": 1})

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"index\.json cannot be written \(No space left on device\)") as raised:
        write_json(tmp_path / "index.json", {"size": 2})
    assert isinstance(raised.value.__cause__, OSError)
    assert read_json(tmp_path / "index.json") == {"size": 1}
    assert os.listdir(tmp_path) == ["index.json"]


def test_an_error_of_who_writes_leaves_what_was_there(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"before")

    def fail() -> None:
        with replacing(tmp_path / "file") as file:
            file.write(b"after")
            raise KeyError("what the writer met")

    with pytest.raises(KeyError, match="what the writer met"):
        fail()
    assert (tmp_path / "file").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_copy_names_the_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    source, unreadable, target = tmp_path / "source", tmp_path / "unreadable", tmp_path / "target"
    write_bytes(source, b"x" * 3_000_000)
    unreadable.mkdir()
    copy_file(source, target)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(StoreError, match=r"unreadable cannot be read \(Is a directory\)"):
        copy_file(unreadable, target)
    with pytest.raises(StoreError, match=r"source/below cannot be written \(File exists\)"):
        copy_file(target, source / "below")
    with pytest.raises(FileNotFoundError):
        copy_file(tmp_path / "absent", target)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["source", "target", "unreadable"]


def test_bytes_are_on_disk_before_a_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    synced, renamed = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("sync"), synced(descriptor)))
    monkeypatch.setattr(os, "replace", lambda one, other: (order.append("name"), renamed(one, other)))
    write_bytes(tmp_path / "file", b"x")
    assert order == ["sync", "name", "sync"]


def test_what_is_no_json_is_named(tmp_path: Path) -> None:
    write_bytes(tmp_path / "index.json", b"{")
    with pytest.raises(StoreError, match="is not JSON"):
        read_json(tmp_path / "index.json")


def test_a_file_system_without_locks_is_not_taken_for_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(StoreError, match=r"cannot be locked \(No locks available\).* mount it with locks"):
        lock_directory(tmp_path, "lock")


def test_a_directory_has_one_writer_and_a_forked_child_neither_writes_nor_keeps_others_from_it(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path, "lock")
    with pytest.raises(StoreError, match="is being written by another buffer"):
        lock_directory(tmp_path, "lock")
    goes_on, end = os.pipe()
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.write(begun, b"!")
        os.read(goes_on, 1)
        os._exit(int(lock.held))
    try:
        os.read(ready, 1)
        lock.release()
        with lock_directory(tmp_path, "lock") as again:
            assert (lock.held, again.held) == (False, True), "while the child lives"
    finally:
        os.close(end)
        _, status = os.waitpid(child, 0)
        for descriptor in (goes_on, ready, begun):
            os.close(descriptor)
    assert os.waitstatus_to_exitcode(status) == 0, "the child holds it"
    lock_directory(tmp_path, "lock")

"""Journals of buffers: what is left of one that was cut or damaged, and what fails without harm."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollstream.consumers.buffers.storage import journal as journals
from rollstream.consumers.buffers.storage.journal import Journal, NoJournal, read_journal, write_journal
from rollstream.topics.files import atomic_files
from rollstream.topics.files.atomic_files import StoreError

DECODER = msgspec.msgpack.Decoder(str)
RECORDS = [f"record {number} " + "x" * number for number in range(5)]


def written(path: Path, *, closed: bool = False) -> list[int]:
    """Write a journal of all records, and return where each ends."""
    write_journal(path, RECORDS[0])
    journal, ends = Journal(path, path.stat().st_size), [path.stat().st_size]
    for record in RECORDS[1:]:
        journal.append(record, sync=True)
        ends.append(journal.size_bytes)
    if closed:
        journal.append_closed()
    journal.close()
    return ends


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


def test_a_journal_cut_anywhere_keeps_all_earlier_records_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "j"
    ends = written(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        reading = read_journal(path, DECODER)
        count = sum(end <= length for end in ends)
        assert reading == (RECORDS[:count], ends[count - 1] if count else 0, False, False)
        journal = Journal(path, reading.stop)
        journal.append("next")
        journal.close()
        assert read_journal(path, DECODER).records == [*RECORDS[:count], "next"]


@pytest.mark.parametrize("closed", [False, True])
def test_one_bit_anywhere_before_the_last_record_is_damage(tmp_path: Path, closed: bool) -> None:
    """Otherwise acknowledged records would be lost. After a clean close this is so for every record."""
    path = tmp_path / "j"
    ends = written(path, closed=closed)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(flipped(data, place))
        reading = read_journal(path, DECODER)
        assert reading.damaged == (place < (ends[-1] if closed else ends[-2])), place
        assert reading.closed == (closed and place < ends[-1])


def test_bytes_of_something_else_have_no_record_and_none_is_none(tmp_path: Path) -> None:
    for content in (b"", b"x" * 200, bytes(200)):
        (tmp_path / "j").write_bytes(content)
        assert read_journal(tmp_path / "j", DECODER) == ([], 0, False, False)
    write_journal(tmp_path / "j", 5)
    with pytest.raises(StoreError, match="unknown record at byte 0"):
        read_journal(tmp_path / "j", DECODER)
    with pytest.raises(NoJournal):
        read_journal(tmp_path / "other", DECODER)


@pytest.mark.parametrize("synced", [False, True])
def test_a_record_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    path = tmp_path / "j"
    write_journal(path, "first")
    journal, pwrite = Journal(path, path.stat().st_size), os.pwrite
    with monkeypatch.context() as patch:

        def failing(descriptor: int, data: Any = b"", offset: int = 0) -> int:
            pwrite(descriptor, data[:5], offset)
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync" if synced else "pwrite", failing)
        with pytest.raises(StoreError, match="No space left on device"):
            journal.append("second", sync=True)
    assert read_journal(path, DECODER).records == ["first"]
    journal.append("third")
    journal.close()
    assert read_journal(path, DECODER).records == ["first", "third"]


@pytest.mark.parametrize("has_its_name", [False, True])
def test_a_replacement_that_fails_loses_no_later_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_its_name: bool
) -> None:
    path = tmp_path / "j"
    write_journal(path, "first")
    journal = Journal(path, path.stat().st_size)
    with monkeypatch.context() as patch:

        def failing(*_arguments: Any) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(*((atomic_files, "sync_directory") if has_its_name else (os, "replace")), failing)
        with pytest.raises(StoreError, match="Input/output error"):
            journal.replace("whole")
    journal.append("second")
    journal.close()
    assert read_journal(path, DECODER).records == ["whole" if has_its_name else "first", "second"]


def test_a_journal_is_long_when_it_has_grown_by_a_sixteenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LEAST_BYTES", 100)
    write_journal(tmp_path / "j", "")
    journal = Journal(tmp_path / "j", (tmp_path / "j").stat().st_size)
    journal.append("x" * 100)
    assert journal.long
    journal.replace("x" * 16000)
    journal.append("x" * 1000)
    assert not journal.long
    journal.append("x" * 200)
    assert journal.long
    journal.close()

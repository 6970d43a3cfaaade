"""A slice buffer's directory after a kill, a stop of the machine, or damage to its files."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.buffers.slices import directory as slice_directory
from rollstream.consumers.buffers.slices.directory import read_manifest
from rollstream.consumers.buffers.slices.journal import DECODER, ReserveOnDiskRecord
from rollstream.consumers.buffers.storage.journal import read_journal
from rollstream.consumers.files.atomic_files import StoreError
from tests.support.slice_rings import (
    CAPACITY,
    child_of,
    content,
    feed,
    journal_of,
    left_by_kill,
    never_killed,
    ring,
    stored,
)

WRITER = """
import sys
from tests.support.slice_rings import feed, ring
with ring(sys.argv[1]) as buffer:
    for offset in range(int(sys.argv[2]), 10**9):
        feed(buffer, offset)
        print(offset, flush=True)
"""


def test_a_writer_killed_at_any_moment_keeps_everything_added_and_continues_as_if_never_killed(
    tmp_path: Path,
) -> None:
    directory, read = tmp_path / "ring", 0
    for wanted in (0, 1, 300, 700):
        with child_of(WRITER, str(directory), str(read)) as child:
            assert child.stdout is not None
            acknowledged = -1
            for line in child.stdout:
                acknowledged = int(line)
                if acknowledged >= read + wanted:
                    break
            os.kill(child.pid, signal.SIGKILL)
            for line in child.stdout:
                acknowledged = int(line) if line.endswith("\n") else acknowledged
        with ring(directory) as buffer:
            read = buffer.position[0]
            assert read in (acknowledged + 1, acknowledged + 2)
            for offset in range(read - 5, read):
                assert not feed(buffer, offset)
    with ring(directory) as buffer:
        for offset in range(read - 5, read + 5):
            assert feed(buffer, offset) == (offset >= read)
        actual = content(buffer, directory)
    assert actual["head"] > 2 * CAPACITY
    assert actual == never_killed(tmp_path / "other", read + 5)


def test_damage_before_a_clean_close_is_not_a_lost_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(tmp_path) as buffer:
        for offset in range(5):
            feed(buffer, offset)
        journal = journal_of(tmp_path)
    data = journal.read_bytes()
    journal.write_bytes(b"")
    with pytest.raises(StoreError, match="damaged at byte 0"):
        ring(tmp_path)
    monkeypatch.setattr(slice_directory, "boot_id", lambda: "another")
    for place in np.random.default_rng(4).integers(0, len(data) - 18, 60).tolist():
        journal.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(StoreError, match=r"damaged at byte \d+; fill the buffer from the log again"):
            ring(tmp_path)
    journal.write_bytes(data[:-1] + b"x")
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 5}


def test_after_the_machine_stops_everything_flushed_is_there_except_steps_being_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown what the disk lost, so everything after the last flush is ignored."""
    directory = tmp_path / "ring"
    with ring(directory) as buffer:
        for offset in range(100):
            feed(buffer, offset)
        buffer.flush()
        flushed = content(buffer, directory)
        assert flushed["head"] < CAPACITY
        for offset in range(100, 280):
            feed(buffer, offset)
        records = read_journal(journal_of(directory), DECODER).records
        overwritten = max(r.stop for r in records if isinstance(r, ReserveOnDiskRecord)) - CAPACITY
        low = stored(directory).low
        assert 0 < low <= overwritten <= low + CAPACITY // 16
        left = left_by_kill(directory)
    monkeypatch.setattr(slice_directory, "boot_id", lambda: "another")
    with ring(left) as buffer:
        assert buffer.position == flushed["position"] == {0: 100}
        assert stored(left).head == flushed["head"]
        assert buffer.size() == flushed["head"] - overwritten
        for offset in range(100, 120):
            assert feed(buffer, offset)
        actual = content(buffer, left)
    with ring(left) as buffer:
        assert content(buffer, left) | {"drawn": 0} == actual | {"drawn": 0}


def test_a_ring_that_lost_everything_when_the_machine_stopped_is_filled_and_drawn_from_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring was overwritten almost whole since the last flush."""
    directory = tmp_path / "ring"
    with ring(directory) as buffer:
        for offset in range(100):
            feed(buffer, offset)
        buffer.flush()
        flushed = stored(directory).head
        for offset in range(100, 390):
            feed(buffer, offset)
        assert stored(directory).head - flushed > CAPACITY * 15 // 16
        left = left_by_kill(directory)
    monkeypatch.setattr(slice_directory, "boot_id", lambda: "another")
    with ring(left) as buffer:
        assert buffer.position == {0: 100}
        assert buffer.size() == 0
        for offset in range(100, 500):
            assert feed(buffer, offset)
            if offset in (110, 499):
                content(buffer, left)
        buffer.save(tmp_path / "saved")
        actual = content(buffer, left)
    with ring(tmp_path / "saved") as saved:
        assert content(saved, tmp_path / "saved") == actual
    with ring(left) as buffer:
        assert content(buffer, left) | {"drawn": 0} == actual | {"drawn": 0}


def test_a_machine_that_stops_before_anything_is_overwritten_loses_only_what_was_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring(tmp_path / "ring") as buffer:
        for offset in range(20):
            feed(buffer, offset)
        buffer.flush()
        flushed = content(buffer, tmp_path / "ring")
        feed(buffer, 20)
        left = left_by_kill(tmp_path / "ring")
    monkeypatch.setattr(slice_directory, "boot_id", lambda: "another")
    with ring(left) as buffer:
        assert content(buffer, left) | {"drawn": 0} == flushed | {"drawn": 0}


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_files_of_the_wrong_size_are_an_error_and_not_read_as_zeros(tmp_path: Path, damage: str) -> None:
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    path = tmp_path / manifest.arrays[1].file
    size = path.stat().st_size
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, size - 1)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"cannot be opened|is damaged"):
            ring(tmp_path, read_only=read_only)
    assert not path.exists() or path.stat().st_size == size - 1


def test_draws_are_stored_with_each_addition(tmp_path: Path) -> None:
    """A sample writes nothing; the next episode or flush does."""
    buffer = ring(tmp_path / "ring")
    for offset in range(8):
        feed(buffer, offset)
    first = buffer.sample(3)["offset"].tolist()
    buffer.skip((0, 8))
    left = left_by_kill(tmp_path / "ring")
    buffer.close()
    with ring(left) as buffer:
        second = buffer.sample(3)["offset"].tolist()
    with ring(left) as buffer:
        third = buffer.sample(3)["offset"].tolist()
    with ring(tmp_path / "other") as other:
        for offset in range(8):
            feed(other, offset)
        assert [other.sample(3)["offset"].tolist() for _ in range(3)] == [first, second, third]


@pytest.mark.parametrize(
    "damage",
    [
        {"capacity": float("inf")},
        {"journal": "../elsewhere.journal"},
        {"journal": "x" * 5000 + ".journal"},
        {"journal": "a\0.journal"},
        {"arrays": [{"path": "rewards", "dtype": "<f4", "shape": [], "file": "/tmp/elsewhere.bin"}]},
        {"arrays": [{"path": {}, "dtype": "<f4", "shape": [], "file": "a.bin"}]},
        {"arrays": [{"path": "a", "dtype": 1.5, "shape": [], "file": "a.bin"}]},
        {"arrays": [{"path": "a", "dtype": "<f4", "shape": [], "file": 7}]},
        {"arrays": [{"path": True, "dtype": "<f4", "shape": [], "file": "a.bin"}]},
        {"arrays": [{"path": "rewards", "dtype": "<f4", "shape": [True, -1], "file": "a.bin"}]},
        {"arrays": [{"path": path, "dtype": "<f4", "shape": [], "file": "a.bin"} for path in ("a", "a/b")]},
    ],
)
def test_a_manifest_that_no_buffer_wrote_is_refused_in_a_line(tmp_path: Path, damage: dict[str, object]) -> None:
    with ring(tmp_path) as slices:
        feed(slices, 0)
    path = tmp_path / slice_directory.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(StoreError, match="was not written by this program") as refused, ring(tmp_path):
        pass
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000

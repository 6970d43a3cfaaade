"""Writes of a slice buffer: in order, on a full disk, and interrupted at each write; what they take is bounded."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.directory import read_manifest
from rollstream.consumers.buffers.slices.journal import DECODER, FlushRecord
from rollstream.consumers.buffers.storage import journal as journals
from rollstream.consumers.buffers.storage.journal import read_journal
from rollstream.consumers.files.atomic_files import StoreError
from tests.support.slice_rings import (
    CAPACITY,
    content,
    feed,
    journal_of,
    left_by_kill,
    never_killed,
    ring,
)


def test_arrays_are_on_disk_before_the_journal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, order = os.fsync, []
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append(name_of(descriptor)), synced(descriptor)))
        buffer.flush()
        manifest = read_manifest(tmp_path)
        assert manifest is not None
        assert order == [*(spec.file for spec in manifest.arrays), manifest.journal]

        def failing(_descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            buffer.flush()
        monkeypatch.undo()
        records = read_journal(journal_of(tmp_path), DECODER).records
        assert sum(isinstance(record, FlushRecord) for record in records) == 1


def name_of(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


@pytest.mark.parametrize("fails_at", range(5))
def test_a_full_disk_is_an_error_and_nothing_of_the_episode_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Each write to the journal and the arrays fails in turn, with half of its bytes written."""
    written = os.pwrite
    with ring(tmp_path / "ring") as buffer:
        for offset in range(300):
            feed(buffer, offset)
        before, calls = content(buffer, tmp_path / "ring"), 0

        def full(descriptor: int, data: Any, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls <= fails_at:
                return written(descriptor, data, offset)
            if calls == fails_at + 1:
                return written(descriptor, memoryview(data)[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left on device") as raised:
            feed(buffer, 300)
        assert isinstance(raised.value.__cause__, OSError)
        monkeypatch.undo()
        after = content(buffer, tmp_path / "ring")
        assert after["position"] == before["position"]
        assert after["head"] == before["head"]
        assert after["columns"]["run_at"][-1] == before["columns"]["run_at"][-1]
        journal = journal_of(tmp_path / "ring")
        assert read_journal(journal, DECODER).stop == journal.stat().st_size
        assert feed(buffer, 300)
    with ring(tmp_path / "ring") as buffer:
        stored = content(buffer, tmp_path / "ring")
        assert stored["position"] == {0: 301}
    expected = never_killed(tmp_path / "other", 301)
    assert stored["columns"] == expected["columns"]


@pytest.mark.parametrize("killed_at", range(6))
def test_a_kill_during_a_write_leaves_none_of_it_and_the_item_can_be_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """The kill comes at each write of an episode that overwrites older ones, with half of its bytes written."""
    written, calls = os.pwrite, 0
    buffer = ring(tmp_path / "ring")
    for offset in range(300):
        feed(buffer, offset)

    def killed(descriptor: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls <= killed_at:
            return written(descriptor, data, offset)
        written(descriptor, memoryview(data)[: len(data) // 2], offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", killed)
    if killed_at < 5:
        with pytest.raises(KeyboardInterrupt):
            feed(buffer, 300)
    else:
        feed(buffer, 300)
    monkeypatch.undo()
    left = left_by_kill(tmp_path / "ring")
    with ring(left) as buffer:
        assert buffer.position == {0: 301 if killed_at == 5 else 300}
        content(buffer, left)
        assert feed(buffer, 300) == (killed_at < 5)
        stored = content(buffer, left)
    assert stored | {"drawn": 0} == never_killed(tmp_path / "other", 301) | {"drawn": 0}


def test_a_first_episode_that_could_not_be_written_does_not_decide_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with ring(tmp_path) as buffer, ring(tmp_path, read_only=True) as reader:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left on device"):
            buffer.add({"other": np.zeros(12)})
        monkeypatch.undo()
        assert reader.size() == 0
        assert feed(buffer, 12)
        assert len(list(tmp_path.glob("*.bin"))) == 3
        content(reader, tmp_path)
    with ring(tmp_path) as buffer:
        content(buffer, tmp_path)


def test_space_is_bounded_however_much_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LEAST_BYTES", 4096)
    directory = tmp_path / "ring"
    with ring(directory) as buffer:
        sizes = []
        for offset in range(1500):
            feed(buffer, offset)
            if offset % 150 == 149:
                sizes.append(sum(path.stat().st_blocks * 512 for path in directory.iterdir()))
        manifest = read_manifest(directory)
        assert manifest is not None
        row_bytes = sum(spec.row_bytes for spec in manifest.arrays)
        assert max(sizes) < CAPACITY * row_bytes + 64 * 1024
        assert journal_of(directory).stat().st_size < 64 * 1024
        stored = content(buffer, directory)
    assert stored["columns"] == never_killed(tmp_path / "other", 1500)["columns"]


def test_the_journal_is_bounded_when_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LEAST_BYTES", 300)
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
        for offset in range(200):
            buffer.skip((1, offset))
            buffer.flush()
        assert journal_of(tmp_path).stat().st_size < 1500
        monkeypatch.undo()
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 1, 1: 200}
        assert buffer.size() == 5


def test_an_empty_ring_takes_no_space_yet(tmp_path: Path) -> None:
    with EpisodeSliceBuffer(tmp_path) as buffer:
        buffer.add({"image": np.zeros((80, 64, 64, 3), np.uint8)})
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 2**21
        assert [path.stat().st_size for path in tmp_path.glob("*.bin")] == [10_000_000 * 64 * 64 * 3]

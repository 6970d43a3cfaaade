"""A slice buffer's directory: its one writer, its files, and what is left after a kill, a stop of the machine, a full
disk or damage."""

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rollstream.consumers.buffers.slices import store as slice_store
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer
from rollstream.consumers.buffers.slices.state import DECODER, FlushRecord
from rollstream.consumers.buffers.storage import journal as journals
from rollstream.consumers.buffers.storage.journal import read_journal
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
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
from tests.support.waiting import eventually

WRITER = """
import sys
from tests.support.slice_rings import feed, ring
with ring(sys.argv[1]) as buffer:
    for offset in range(int(sys.argv[2]), 10**9):
        feed(buffer, offset)
        print(offset, flush=True)
"""
HOLDER = """
import sys
from tests.support.slice_rings import ring
held = ring(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
ROW_BYTES = 8 + 8 * 8 * 3 + 8
SEGMENT_ROWS = 256


def full(*_arguments: Any) -> int:
    raise OSError(28, "No space left on device")


# ------------------------------------------------------------------ kills and stops


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


@pytest.mark.parametrize("killed_at", range(5))
def test_a_kill_during_a_write_leaves_none_of_it_and_the_item_can_be_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """The kill comes at each write of an episode, three to arrays and one to the journal, with half of its bytes."""
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
    if killed_at < 4:
        with pytest.raises(KeyboardInterrupt):
            feed(buffer, 300)
    else:
        feed(buffer, 300)
    monkeypatch.undo()
    left = left_by_kill(tmp_path / "ring")
    with ring(left) as buffer:
        assert buffer.position == {0: 301 if killed_at == 4 else 300}
        content(buffer, left)
        assert feed(buffer, 300) == (killed_at < 4)
        actual = content(buffer, left)
    assert actual | {"drawn": 0} == never_killed(tmp_path / "other", 301) | {"drawn": 0}


@pytest.mark.parametrize("added", [101, 330, 600], ids=["nothing dropped", "some dropped", "all dropped"])
def test_after_the_machine_stops_everything_flushed_is_there_except_dropped_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: int
) -> None:
    """It is unknown what the disk lost, so everything after the last flush is ignored."""
    directory = tmp_path / "ring"
    with ring(directory) as buffer:
        for offset in range(100):
            feed(buffer, offset)
        buffer.flush()
        flushed = content(buffer, directory)
        for offset in range(100, added):
            feed(buffer, offset)
        left = left_by_kill(directory)
    numbers = {int(path.stem.rsplit("-")[-1]) for path in left.glob("*.rows")}
    kept = max(0, flushed["head"] - SEGMENT_ROWS * min(numbers))
    monkeypatch.setattr(slice_store, "boot_id", lambda: "another")
    with ring(left) as buffer:
        assert buffer.position == {0: 100}
        assert buffer.size() == kept
        for offset in range(100, 700):
            assert feed(buffer, offset)
            if offset in (110, 699):
                content(buffer, left)
        buffer.save(tmp_path / "saved")
        actual = content(buffer, left)
    with ring(tmp_path / "saved") as saved:
        assert content(saved, tmp_path / "saved") == actual
    with ring(left) as buffer:
        assert content(buffer, left) | {"drawn": 0} == actual | {"drawn": 0}
    assert (kept > 0, kept == flushed["head"]) == (added < 600, added == 101)


def test_what_a_killed_writer_left_is_on_disk_after_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ring(tmp_path / "ring")
    feed(buffer, 0)
    left, synced, names = left_by_kill(tmp_path / "ring"), os.fsync, list[str]()
    buffer.close()

    def noted(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        synced(descriptor)

    with ring(left) as again:
        monkeypatch.setattr(os, "fsync", noted)
        again.flush()
        [segment] = left.glob("*.rows")
        assert names == [segment.name, left.name, "slices.journal"], "arrays are on disk before the journal says so"

        def failing(_descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", failing)
        feed(again, 1)
        with pytest.raises(StoreError, match="Input/output error"):
            again.flush()
        monkeypatch.undo()
        records = read_journal(journal_of(left), DECODER).records
        assert sum(isinstance(record, FlushRecord) for record in records) == 1


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


# ------------------------------------------------------------------ damage


def test_damage_before_a_clean_close_is_not_a_lost_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(tmp_path) as buffer:
        for offset in range(5):
            feed(buffer, offset)
        journal = journal_of(tmp_path)
    data = journal.read_bytes()
    journal.write_bytes(b"")
    with pytest.raises(StoreError, match="damaged at byte 0"):
        ring(tmp_path)
    monkeypatch.setattr(slice_store, "boot_id", lambda: "another")
    for place in np.random.default_rng(4).integers(0, len(data) - 18, 60).tolist():
        journal.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(StoreError, match=r"damaged at byte \d+; fill the buffer from the log again"):
            ring(tmp_path)
    journal.write_bytes(data[:-1] + b"x")
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 5}


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_files_of_the_wrong_size_are_an_error_and_not_read_as_zeros(tmp_path: Path, damage: str) -> None:
    with ring(tmp_path) as buffer:
        for offset in range(30):
            feed(buffer, offset)
    [path] = tmp_path.glob("*-0-0.rows")
    size = path.stat().st_size
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, size - 1)
    with pytest.raises(StoreError, match=r"is damaged"):
        ring(tmp_path)
    with ring(tmp_path, read_only=True) as reader, pytest.raises(StoreError, match=r"is damaged"):
        reader.sample(100)
    assert not path.exists() or path.stat().st_size == size - 1


# ------------------------------------------------------------------ a full disk, and the size of files


@pytest.mark.parametrize("fails_at", range(4))
def test_a_full_disk_is_an_error_and_nothing_of_the_episode_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Each write to the journal and the arrays fails in turn, with half of its bytes written."""
    written = os.pwrite
    with ring(tmp_path / "ring") as buffer:
        for offset in range(300):
            feed(buffer, offset)
        before, calls = content(buffer, tmp_path / "ring"), 0

        def fills(descriptor: int, data: Any, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls > fails_at + 1:
                full()
            return written(descriptor, data if calls <= fails_at else memoryview(data)[: len(data) // 2], offset)

        monkeypatch.setattr(os, "pwrite", fills)
        with pytest.raises(StoreError, match="No space left on device") as raised:
            feed(buffer, 300)
        assert isinstance(raised.value.__cause__, OSError)
        monkeypatch.undo()
        assert content(buffer, tmp_path / "ring") | {"drawn": 0} == before | {"drawn": 0}
        journal = journal_of(tmp_path / "ring")
        assert read_journal(journal, DECODER).stop == journal.stat().st_size
        assert feed(buffer, 300)
    with ring(tmp_path / "ring") as buffer:
        actual = content(buffer, tmp_path / "ring")
    assert actual | {"drawn": 0} == never_killed(tmp_path / "other", 301) | {"drawn": 0}


def test_a_first_episode_that_could_not_be_written_does_not_decide_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring(tmp_path) as buffer, ring(tmp_path, read_only=True) as reader:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left on device"):
            buffer.add({"other": np.zeros(12)})
        monkeypatch.undo()
        assert reader.size() == 0
        assert feed(buffer, 12)
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
            if offset % 50 == 49:
                sizes.append(sum(path.stat().st_blocks * 512 for path in directory.iterdir()))
        assert max(sizes) < (CAPACITY + 2 * SEGMENT_ROWS) * ROW_BYTES + 128 * 1024
        assert journal_of(directory).stat().st_size < 64 * 1024
        actual = content(buffer, directory)
    assert actual["columns"] == never_killed(tmp_path / "other", 1500)["columns"]


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


def test_a_segment_takes_only_the_space_of_its_written_rows(tmp_path: Path) -> None:
    with EpisodeSliceBuffer(tmp_path) as buffer:
        buffer.add({"image": np.zeros((80, 64, 64, 3), np.uint8)})
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 2**21
        assert [path.stat().st_size for path in tmp_path.glob("*.rows")] == [625_000 * 64 * 64 * 3]


# ------------------------------------------------------------------ content and directory


def test_arrays_of_any_dtype_come_back_as_they_were(tmp_path: Path) -> None:
    step = np.arange(6)
    tree = {
        "bfloat16": step.astype(ml_dtypes.bfloat16),
        "text": np.array(["a", "bc", "d", "e", "f", "g"]),
        "time": step.astype("datetime64[s]"),
        "complex": (step * 1j).astype(">c8"),
        "flags": np.stack([step > 2, step < 2], 1),
    }
    with EpisodeSliceBuffer(tmp_path, 6, 6) as buffer:
        for _time in range(43):  # The last one lies in two segments.
            buffer.add(tree)
    with EpisodeSliceBuffer(tmp_path, 6, 6) as buffer:
        drawn = buffer.sample(1)
        assert len(list(tmp_path.glob("*.rows"))) == 2
    for name, leaf in tree.items():
        assert drawn[name].dtype == leaf.dtype.newbyteorder("<"), name
        assert (drawn[name][0] == leaf).all(), name


def test_short_slices_of_several_segments_are_in_the_order_of_the_draw(tmp_path: Path) -> None:
    """Rows are looked up one by one, in each segment."""
    steps = np.arange(1000)
    with EpisodeSliceBuffer(tmp_path, 1000, 2) as buffer:
        buffer.add({"step": steps, "wide": np.stack([steps, -steps], 1)})
        drawn = buffer.sample(500)
    assert (np.diff(drawn["step"]) == 1).all()
    assert (drawn["wide"] == np.stack([drawn["step"], -drawn["step"]], 2)).all()
    assert len({*(drawn["step"] // SEGMENT_ROWS).ravel().tolist()}) == 4


@pytest.mark.parametrize("reopens", [False, True])
def test_an_open_episode_that_lost_all_its_steps_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopens: bool
) -> None:
    buffer = EpisodeSliceBuffer(tmp_path, 20, 4)
    buffer.add({"step": np.arange(5)}, episode="slow", last=False)
    if reopens:
        monkeypatch.setattr(journals, "LEAST_BYTES", 10)
        buffer.close()
        buffer = EpisodeSliceBuffer(tmp_path, 20, 4)
    assert buffer.is_open("slow")
    buffer.add({"step": np.arange(20)})
    assert not buffer.is_open("slow")
    buffer.add({"step": np.arange(5, 10)}, episode="slow")
    assert buffer.stats()["num_episodes"] == 2
    assert set(buffer.sample(200)["step"][:, 0].tolist()) == {*range(5, 17), 5, 6}
    buffer.close()


def test_a_directory_of_another_kind_is_refused(tmp_path: Path) -> None:
    with ring(tmp_path / "ring"):
        pass
    with pytest.raises(ConfigurationError, match="is a ring of 3000 steps with 1 sides, not 5 with 1"):
        EpisodeSliceBuffer(tmp_path / "ring", 5, 2)
    with pytest.raises(ConfigurationError, match="3000 steps with 1 sides, not 3000 with 2"):
        HilEpisodeBuffer(tmp_path / "ring", CAPACITY, 2)
    journal_of(tmp_path / "ring").write_bytes(b"{}")
    with pytest.raises(StoreError, match="is damaged"):
        ring(tmp_path / "ring")


def test_only_files_that_a_buffer_left_behind_are_deleted(tmp_path: Path) -> None:
    """A checkpoint's directory also has files of its trainer."""
    own = [tmp_path / name for name in ("pytorch_model.bin", "optimizer.rows", "model-0-1.rows", "training.journal")]
    left = [tmp_path / name for name in ("0123456789ab-0-0.rows", "0123456789ab-1-1000.rows")]
    for path in own:
        path.write_bytes(b"weights")

    def leave() -> None:
        for path in left:
            path.write_bytes(b"steps")

    leave()
    with ring(tmp_path) as buffer:
        assert not any(path.exists() for path in left)
        feed(buffer, 0)
    leave()
    with ring(tmp_path.parent / f"{tmp_path.name}-other") as buffer:
        feed(buffer, 0)
        buffer.save(tmp_path)
    assert not any(path.exists() for path in left)
    assert [path.read_bytes() for path in own] == [b"weights"] * 4
    assert stored(tmp_path).sides[0].head == 5


def test_a_closed_buffer_says_so(tmp_path: Path) -> None:
    buffer = ring(tmp_path)
    feed(buffer, 0)
    feed(buffer, 4)
    buffer.close()
    buffer.close()
    for act in (lambda: feed(buffer, 9), lambda: buffer.sample(1), buffer.flush):
        with pytest.raises(StoreError, match="is closed"):
            act()


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        with pytest.raises(StoreError, match="is being written by another buffer; close that buffer"):
            ring(tmp_path)
        with pytest.raises(StoreError, match="is being written by another buffer"):
            ring(tmp_path / "second").save(tmp_path)
    with child_of(HOLDER, str(tmp_path)) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(StoreError, match="is being written by another buffer"):
            ring(tmp_path)
        child.kill()
    eventually(lambda: ring(tmp_path).close() is None, 60, "the lock is free")
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

"""A slice buffer's directory: what is there after a kill, a stop of the machine, a full disk; who writes and reads."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from consumers.buffers import files, slice_buffer, slice_directory, slice_store
from consumers.buffers.files import StoreError, read_json
from consumers.buffers.slice_buffer import EpisodeSliceBuffer, NothingToDraw
from consumers.buffers.slice_files import RingFiles
from consumers.buffers.slice_journal import Flushed, read_journal
from tests.waiting import eventually
from topics.errors import ConfigurationError

CAPACITY = 3000
ROOT = Path(slice_store.__file__).parents[2]

WRITER = """
import sys
from tests.unit.consumers.buffers.test_slice_files import feed, ring
with ring(sys.argv[1]) as buffer:
    for offset in range(int(sys.argv[2]), 10**9):
        feed(buffer, offset)
        print(offset, flush=True)
"""


HOLDER = """
import sys
from tests.unit.consumers.buffers.test_slice_files import ring
held = ring(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


def child_of(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ring(directory: str | Path, **options: Any) -> EpisodeSliceBuffer:
    return EpisodeSliceBuffer(directory, CAPACITY, 10, seed=3, **options)


def tree_of(offset: int) -> dict[str, Any]:
    steps = 5 + offset % 13
    return {
        "offset": np.full(steps, offset),
        "image": np.full((steps, 8, 8, 3), offset % 251, np.uint8),
        "step": np.arange(steps),
    }


def feed(buffer: EpisodeSliceBuffer, offset: int) -> bool:
    """What lies at an offset: the next of four writers' episodes, which come in parts of different lengths."""
    writer, part = offset % 4, offset // 4
    return buffer.add(tree_of(offset), at=(0, offset), episode=f"{writer}-{part // 3}", last=part % 3 == 2)


def content(buffer: EpisodeSliceBuffer) -> dict[str, Any]:
    """Everything that can be told of a buffer."""
    state = buffer._store.state
    drawn = buffer.sample(30)
    assert (drawn["image"] == (drawn["offset"] % 251)[..., None, None, None]).all()
    episodes = 1000 * (drawn["offset"] % 4) + drawn["offset"] // 12
    assert (episodes == episodes[:, :1]).all()
    assert ((np.diff(drawn["step"]) == 1) | (np.diff(drawn["offset"]) == 4)).all()
    columns = {name: column.tolist() for name, column in state.index.columns().items()}
    return {
        "columns": columns,
        "open": dict(state.open),
        "position": buffer.position,
        "head": state.head,
        "drawn": drawn["offset"].tolist(),
    }


def killed_now(buffer: EpisodeSliceBuffer) -> None:
    """Leave it as a kill does: nothing flushed, the lock free."""
    buffer._store._close_files()
    buffer._store._unlock()


def never_killed(directory: Path, position: int) -> dict[str, Any]:
    with ring(directory) as buffer:
        for offset in range(position):
            feed(buffer, offset)
        return content(buffer)


def test_who_is_killed_at_any_moment_finds_all_that_was_added_and_goes_on_as_if_nothing_had_been(
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
        found = content(buffer)
    assert found["head"] > 2 * CAPACITY
    assert found == never_killed(tmp_path / "other", read + 5)


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 250, -1])
def test_a_tail_that_a_kill_tore_is_cut_off_wherever_it_is_torn(tmp_path: Path, left: int) -> None:
    """So much is left of the last record, which is longer than what is written when the buffer is opened."""
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        journal = buffer._store._journal_path
        before = read_journal(journal).stop
        buffer.add(tree_of(1), at=(0, 1), episode="x" * 300, last=False)
        whole = journal.read_bytes()
    journal.write_bytes(whole[: before + left] if left >= 0 else whole[:left])
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 1}
        assert read_journal(journal).stop == journal.stat().st_size
        assert buffer.skip((0, 1))
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 2}


def _whole_before(journal: Path, data: bytes) -> int:
    """Where the last whole record of a journal of these bytes ends."""
    journal.write_bytes(data)
    return read_journal(journal).stop


def test_damage_within_the_journal_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        feed(buffer, 1)
        journal = buffer._store._journal_path
    data = journal.read_bytes()
    begin = max(n for n in range(len(data)) if _whole_before(journal, data[:n]) == n)
    for place in range(begin):
        journal.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(StoreError, match=r"damaged at byte \d+; fill the buffer from the log again"):
            ring(tmp_path)
    journal.write_bytes(b"")
    with pytest.raises(StoreError, match="damaged at byte 0"):
        ring(tmp_path)


def test_damage_before_a_clean_close_is_no_tail_that_a_machine_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring(tmp_path) as buffer:
        for offset in range(5):
            feed(buffer, offset)
        journal = buffer._store._journal_path
    data = journal.read_bytes()
    monkeypatch.setattr(slice_directory, "boot", lambda: "another")
    for place in np.random.default_rng(4).integers(0, len(data) - 15, 60).tolist():
        journal.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(StoreError, match=r"damaged at byte \d+; fill the buffer from the log again"):
            ring(tmp_path)
    journal.write_bytes(data[:-1] + b"x")
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 5}


def test_after_the_machine_stopped_there_is_what_was_flushed_less_what_was_being_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk lost is not known, so nothing is believed that was written after the last flush."""
    buffer = ring(tmp_path)
    for offset in range(100):
        feed(buffer, offset)
    buffer.flush()
    flushed = content(buffer)
    written = buffer._store.state.head
    assert written < CAPACITY
    for offset in range(100, 280):
        feed(buffer, offset)
    overwritten = buffer._store._ahead - CAPACITY
    assert 0 < buffer._store.state.low <= overwritten <= buffer._store.state.low + CAPACITY // 16
    killed_now(buffer)
    monkeypatch.setattr(slice_directory, "boot", lambda: "another")
    with ring(tmp_path) as buffer:
        assert buffer.position == flushed["position"] == {0: 100}
        assert buffer._store.state.head == written
        assert buffer.size() == written - overwritten
        for offset in range(100, 120):
            assert feed(buffer, offset)
        found = content(buffer)
    with ring(tmp_path) as buffer:
        assert content(buffer) | {"drawn": 0} == found | {"drawn": 0}


def test_arrays_are_on_disk_before_the_journal_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, order = os.fsync, []
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append(name_of(descriptor)), synced(descriptor)))
        buffer.flush()
        assert order == [*(spec.file for spec in buffer._store.files.specs), buffer._store._journal_path.name]

        def failing(_descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            buffer.flush()
        monkeypatch.undo()
        records = read_journal(buffer._store._journal_path).records
        assert sum(isinstance(record, Flushed) for record in records) == 1


def name_of(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


@pytest.mark.parametrize("reopens", [False, True])
def test_an_open_episode_that_lost_all_its_steps_begins_anew(tmp_path: Path, reopens: bool) -> None:
    buffer = EpisodeSliceBuffer(tmp_path, 20, 4)
    buffer.add({"step": np.arange(5)}, episode="slow", last=False)
    if reopens:
        buffer._store._compact()
        buffer.close()
        buffer = EpisodeSliceBuffer(tmp_path, 20, 4)
    assert buffer.is_open("slow")
    buffer.add({"step": np.arange(20)})
    assert not buffer.is_open("slow")
    buffer.add({"step": np.arange(5, 10)}, episode="slow")
    assert buffer.stats()["num_episodes"] == 2
    assert set(buffer.sample(200)["step"][:, 0].tolist()) == {*range(5, 17), 5, 6}
    buffer.close()


def test_a_machine_that_stops_before_anything_is_overwritten_loses_only_what_was_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ring(tmp_path)
    for offset in range(20):
        feed(buffer, offset)
    buffer.flush()
    flushed = content(buffer)
    feed(buffer, 20)
    killed_now(buffer)
    monkeypatch.setattr(slice_directory, "boot", lambda: "another")
    with ring(tmp_path) as buffer:
        assert content(buffer) | {"drawn": 0} == flushed | {"drawn": 0}


@pytest.mark.parametrize("fails_at", range(5))
def test_a_full_disk_is_an_error_and_nothing_of_the_episode_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Each write in turn fails, half of its bytes written: those of the journal, and those of the arrays."""
    written = os.pwrite
    with ring(tmp_path) as buffer:
        for offset in range(300):
            feed(buffer, offset)
        before, calls = content(buffer), 0

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
        after = content(buffer)
        assert after["position"] == before["position"]
        assert after["head"] == before["head"]
        assert after["columns"]["run_at"][-1] == before["columns"]["run_at"][-1]
        journal = buffer._store._journal_path
        assert read_journal(journal).stop == journal.stat().st_size
        assert feed(buffer, 300)
    with ring(tmp_path) as buffer:
        found = content(buffer)
        assert found["position"] == {0: 301}
    expected = never_killed(tmp_path / "other", 301)
    assert found["columns"] == expected["columns"]


@pytest.mark.parametrize("killed_at", range(6))
def test_who_is_killed_within_a_write_finds_no_half_of_it_and_can_add_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """At each write of an episode that overwrites older ones, half of its bytes being there."""
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
    killed_now(buffer)
    with ring(tmp_path / "ring") as buffer:
        assert buffer.position == {0: 301 if killed_at == 5 else 300}
        content(buffer)
        assert feed(buffer, 300) == (killed_at < 5)
        found = content(buffer)
    assert found | {"drawn": 0} == never_killed(tmp_path / "other", 301) | {"drawn": 0}


def test_one_buffer_writes_and_another_is_told_so(tmp_path: Path) -> None:
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        with pytest.raises(StoreError, match="is being written by another buffer; close that one"):
            ring(tmp_path)
        with pytest.raises(StoreError, match="is being written by another buffer"):
            ring(tmp_path / "second").save(tmp_path)
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 1}


def test_a_reader_follows_the_writer_and_never_sees_what_is_being_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="nothing was stored there"):
        ring(tmp_path, read_only=True)
    with ring(tmp_path) as writer, ring(tmp_path, read_only=True) as reader:
        with pytest.raises(NothingToDraw):
            reader.sample(1)
        offset = 0
        for target in (10, 400, 460):
            while offset < target:
                feed(writer, offset)
                offset += 1
            if target == 400:
                writer._store._compact()
            assert reader.size() == writer.size()
            assert reader._store.state.index.columns().keys() == writer._store.state.index.columns().keys()
            content(reader)
        with pytest.raises(StoreError, match="was opened to be read only"):
            feed(reader, offset)
        gather, behind = slice_buffer.gather, []

        def slow(*arguments: Any, **options: Any) -> Any:
            """The writer overwrites the whole ring while the first sample is read."""
            nonlocal offset
            if not behind:
                behind.append(offset)
                while offset < behind[0] + 400:
                    feed(writer, offset)
                    offset += 1
            return gather(*arguments, **options)

        monkeypatch.setattr(slice_buffer, "gather", slow)
        content(reader)
        assert offset > behind[0]


def test_a_reader_stays_with_a_buffer_that_became_another(tmp_path: Path) -> None:
    with ring(tmp_path / "other") as other:
        feed(other, 7)
        other.save(tmp_path / "saved")
    with ring(tmp_path / "ring") as writer, ring(tmp_path / "ring", read_only=True) as reader:
        feed(writer, 0)
        assert reader.size() == 5
        writer.load(tmp_path / "saved")
        assert reader.size() == 12
        assert reader.position == {0: 8}


def test_what_is_saved_is_a_copy_that_opens_by_itself_and_can_be_become_again(tmp_path: Path) -> None:
    with ring(tmp_path / "ring") as buffer:
        for offset in range(300):
            feed(buffer, offset)
        for _time in range(2):
            buffer.save(tmp_path / "saved")
            assert len(list((tmp_path / "saved").glob("*.journal"))) == 1
        draws = buffer._store.state.draws
        saved = content(buffer)
        for offset in range(300, 500):
            feed(buffer, offset)
        buffer.load(tmp_path / "saved")
        assert buffer._store.state.draws == draws
        assert content(buffer) == saved
        assert feed(buffer, 300)
        later = content(buffer)
    with ring(tmp_path / "saved") as copy:
        assert content(copy) == saved
        copy.save(tmp_path / "saved")
        assert feed(copy, 300)
        assert content(copy) == later
    with ring(tmp_path / "ring") as buffer:
        assert buffer.position == {0: 301}
        buffer.load(tmp_path / "ring")
        assert buffer.position == {0: 301}
    with EpisodeSliceBuffer(tmp_path / "small", 100) as small:
        with pytest.raises(StoreError, match="is a ring of 3000 steps, this one of 100"):
            small.load(tmp_path / "saved")
        with pytest.raises(StoreError, match="nothing was stored there"):
            small.load(tmp_path / "nowhere")
        assert small.size() == 0


def test_a_copy_of_a_ring_that_is_being_overwritten_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_to = RingFiles.copy_to
    with ring(tmp_path / "source") as writer, ring(tmp_path / "target") as target:
        for offset in range(300):
            feed(writer, offset)

        def slow(*arguments: Any) -> None:
            copy_to(*arguments)
            feed(writer, 300)

        monkeypatch.setattr(RingFiles, "copy_to", slow)
        with pytest.raises(StoreError, match="is being written by another buffer; copy it once that is closed"):
            target.load(tmp_path / "source")
        assert target.size() == 0
        monkeypatch.undo()
        target.load(tmp_path / "source")
        assert target.position == {0: 301}


def test_a_save_that_fails_leaves_what_was_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(tmp_path / "ring") as buffer:
        feed(buffer, 0)
        buffer.save(tmp_path / "saved")
        feed(buffer, 1)
        names = sorted(os.listdir(tmp_path / "saved"))

        def full(*_arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left on device"):
            buffer.save(tmp_path / "saved")
        monkeypatch.undo()
    with ring(tmp_path / "saved") as saved:
        assert saved.position == {0: 1}
        assert sorted(os.listdir(tmp_path / "saved")) == names


def test_space_is_bounded_however_much_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_store, "_LEAST_JOURNAL_BYTES", 4096)
    with ring(tmp_path) as buffer:
        sizes = []
        for offset in range(1500):
            feed(buffer, offset)
            if offset % 150 == 149:
                sizes.append(sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()))
        row_bytes = sum(spec.row_bytes for spec in buffer._store.files.specs)
        assert max(sizes) < CAPACITY * row_bytes + 64 * 1024
        assert buffer._store._journal_path.stat().st_size < 64 * 1024
        found = content(buffer)
    assert found["columns"] == never_killed(tmp_path / "other", 1500)["columns"]


@pytest.mark.parametrize("has_its_name", [False, True])
def test_a_journal_that_could_not_be_begun_anew_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_its_name: bool
) -> None:
    def failing(*_arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    buffer = ring(tmp_path)
    for offset in range(5):
        feed(buffer, offset)
    monkeypatch.setattr(slice_store, "_LEAST_JOURNAL_BYTES", 10)
    monkeypatch.setattr(*((files, "sync_directory") if has_its_name else (os, "replace")), failing)
    with pytest.raises(StoreError, match="Input/output error"):
        feed(buffer, 5)
    monkeypatch.undo()
    for offset in range(5, 9):
        assert feed(buffer, offset)
    killed_now(buffer)
    with ring(tmp_path) as buffer:
        found = content(buffer)
    assert found == never_killed(tmp_path / "other", 9)


def test_a_copy_whose_name_may_not_be_on_disk_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ring(tmp_path / "ring") as buffer:
        feed(buffer, 0)
        buffer.save(tmp_path / "saved")
        feed(buffer, 1)
        synced, calls = files.sync_directory, 0

        def failing(directory: Path) -> None:
            """Of the journal first, then of the manifest."""
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(5, "Input/output error")
            synced(directory)

        monkeypatch.setattr(files, "sync_directory", failing)
        with pytest.raises(StoreError, match=r"slices\.json cannot be written"):
            buffer.save(tmp_path / "saved")
        monkeypatch.undo()
    with ring(tmp_path / "saved") as saved:
        assert saved.position == {0: 2}


def test_the_journal_is_bounded_when_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_store, "_LEAST_JOURNAL_BYTES", 300)
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
        for offset in range(200):
            buffer.skip((1, offset))
            buffer.flush()
        assert buffer._store._journal_path.stat().st_size < 1500
        monkeypatch.undo()
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 1, 1: 200}
        assert buffer.size() == 5


def test_an_empty_ring_takes_no_space_yet(tmp_path: Path) -> None:
    with EpisodeSliceBuffer(tmp_path) as buffer:
        buffer.add({"image": np.zeros((80, 64, 64, 3), np.uint8)})
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 2**21
        assert [path.stat().st_size for path in tmp_path.glob("*.bin")] == [10_000_000 * 64 * 64 * 3]


def test_files_are_raw_little_endian_rows_that_the_manifest_names(tmp_path: Path) -> None:
    with EpisodeSliceBuffer(tmp_path, 100, 2) as buffer:
        buffer.add({"obs": {"position": np.arange(6, dtype=">i4").reshape(3, 2)}, "done": np.array([0, 0, 1], bool)})
        assert buffer.sample(1)["obs"]["position"].dtype == np.dtype("<i4")
    manifest = read_json(tmp_path / "slices.json")
    described = {spec["path"]: spec for spec in manifest["arrays"]}
    assert described["obs/position"]["dtype"] == "<i4"
    assert described["obs/position"]["shape"] == [2]
    raw = np.fromfile(tmp_path / described["obs/position"]["file"], "<i4")
    assert raw[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert len(raw) == 200


def test_arrays_of_any_dtype_come_back_as_they_were(tmp_path: Path) -> None:
    step = np.arange(6)
    tree = {
        "bfloat16": step.astype(ml_dtypes.bfloat16),
        "text": np.array(["a", "bc", "d", "e", "f", "g"]),
        "time": step.astype("datetime64[s]"),
        "complex": (step * 1j).astype(">c8"),
        "flags": np.stack([step > 2, step < 2], 1),
    }
    with EpisodeSliceBuffer(tmp_path, 8, 6) as buffer:
        buffer.add(tree)
        buffer.add(tree)  # Over the end of the ring.
    with EpisodeSliceBuffer(tmp_path, 8, 6) as buffer:
        drawn = buffer.sample(1)
    for name, leaf in tree.items():
        assert drawn[name].dtype == leaf.dtype.newbyteorder("<"), name
        assert (drawn[name][0] == leaf).all(), name


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_arrays_that_are_not_whole_are_an_error_and_no_zeros(tmp_path: Path, damage: str) -> None:
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        path = tmp_path / buffer._store.files.specs[1].file
    size = path.stat().st_size
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, size - 1)
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"cannot be opened|is not whole"):
            ring(tmp_path, read_only=read_only)
    assert not path.exists() or path.stat().st_size == size - 1


def test_a_first_episode_that_could_not_be_written_does_not_say_what_is_stored(
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
        content(reader)
    with ring(tmp_path) as buffer:
        content(buffer)


def test_what_is_no_directory_of_ours_is_refused(tmp_path: Path) -> None:
    with ring(tmp_path / "ring"):
        pass
    with pytest.raises(ConfigurationError, match="is a ring of 3000 steps, not 5"):
        EpisodeSliceBuffer(tmp_path / "ring", 5, 2)
    for number, text in enumerate(['{"version": 2}', "[]", "{"]):
        other = tmp_path / str(number)
        other.mkdir()
        (other / "slices.json").write_text(text)
        with pytest.raises(StoreError):
            ring(other)


def test_a_closed_buffer_says_so(tmp_path: Path) -> None:
    buffer = ring(tmp_path)
    feed(buffer, 0)
    feed(buffer, 4)
    buffer.close()
    buffer.close()
    for act in (lambda: feed(buffer, 9), lambda: buffer.sample(1), buffer.flush):
        with pytest.raises(StoreError, match="is closed"):
            act()


def test_draws_are_counted_on_disk_with_what_is_added(tmp_path: Path) -> None:
    """A sample by itself writes nothing; the next episode or flush does."""
    buffer = ring(tmp_path)
    for offset in range(8):
        feed(buffer, offset)
    first = buffer.sample(3)["offset"].tolist()
    buffer.skip((0, 8))
    killed_now(buffer)
    with ring(tmp_path) as buffer:
        second = buffer.sample(3)["offset"].tolist()
    with ring(tmp_path) as buffer:
        third = buffer.sample(3)["offset"].tolist()
    with ring(tmp_path / "other") as other:
        for offset in range(8):
            feed(other, offset)
        assert [other.sample(3)["offset"].tolist() for _ in range(3)] == [first, second, third]


def test_the_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    with child_of(HOLDER, str(tmp_path)) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(StoreError, match="is being written by another buffer"):
            ring(tmp_path)
        child.kill()
    eventually(lambda: ring(tmp_path).close() is None, 10, "the lock is free")
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

"""A slice buffer's directory: its files, the episodes in them, and the one writer that holds it."""

import fcntl
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.storage import journal as journals
from rollstream.consumers.files.atomic_files import StoreError, read_json
from rollstream.topics.errors import ConfigurationError
from tests.support.slice_rings import (
    child_of,
    feed,
    ring,
)
from tests.support.waiting import eventually

HOLDER = """
import sys
from tests.support.slice_rings import ring
held = ring(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


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
        buffer.add(tree)  # It wraps around the end of the ring.
    with EpisodeSliceBuffer(tmp_path, 8, 6) as buffer:
        drawn = buffer.sample(1)
    for name, leaf in tree.items():
        assert drawn[name].dtype == leaf.dtype.newbyteorder("<"), name
        assert (drawn[name][0] == leaf).all(), name


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


def test_a_directory_of_another_program_is_refused(tmp_path: Path) -> None:
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


def test_only_files_that_a_buffer_left_behind_are_deleted(tmp_path: Path) -> None:
    """A checkpoint's directory also has files of its trainer."""
    own = [tmp_path / name for name in ("pytorch_model.bin", "optimizer.bin", "model-001.bin", "training.journal")]
    left = [tmp_path / name for name in ("0123456789ab.journal", "0123456789ab-000.bin", "0123456789ab-1000.bin")]
    for path in own:
        path.write_bytes(b"weights")

    def leave() -> None:
        for path in left:
            path.write_bytes(b"steps")

    leave()
    with ring(tmp_path) as buffer:
        assert not any(path.exists() for path in left)
        leave()
        feed(buffer, 0)
        assert not any(path.exists() for path in left)
    leave()
    with ring(tmp_path.parent / f"{tmp_path.name}-other") as buffer:
        feed(buffer, 0)
        buffer.save(tmp_path)
    assert not any(path.exists() for path in left)
    assert [path.read_bytes() for path in own] == [b"weights"] * 4
    assert len(list(tmp_path.glob("*.journal"))) == 2


def test_a_closed_buffer_says_so(tmp_path: Path) -> None:
    buffer = ring(tmp_path)
    feed(buffer, 0)
    feed(buffer, 4)
    buffer.close()
    buffer.close()
    for act in (lambda: feed(buffer, 9), lambda: buffer.sample(1), buffer.flush):
        with pytest.raises(StoreError, match="is closed"):
            act()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with ring(tmp_path) as buffer:
        feed(buffer, 0)
        with pytest.raises(StoreError, match="is being written by another buffer; close that buffer"):
            ring(tmp_path)
        with pytest.raises(StoreError, match="is being written by another buffer"):
            ring(tmp_path / "second").save(tmp_path)
    with ring(tmp_path) as buffer:
        assert buffer.position == {0: 1}


def test_the_lock_ends_with_the_process_that_holds_it(tmp_path: Path) -> None:
    with child_of(HOLDER, str(tmp_path)) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(StoreError, match="is being written by another buffer"):
            ring(tmp_path)
        child.kill()
    eventually(lambda: ring(tmp_path).close() is None, 60, "the lock is free")
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

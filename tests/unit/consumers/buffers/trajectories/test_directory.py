"""A trajectory buffer's directory: its files and index, what bounds it, and damage that is refused."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories.buffer import NothingToSample, TrajectoryReplayBuffer
from rollstream.topics.files.atomic_files import StoreError
from tests.support.trajectory_batches import trajectory, untorn
from tests.support.trajectory_buffers import buffer, files
from tests.support.waiting import eventually


def test_files_have_the_documented_names(tmp_path: Path) -> None:
    with buffer(tmp_path, True) as replay:
        odd = "../../etc/x y"
        replay.add_trajectories([trajectory(0, weights="abc-1"), trajectory(1, weights=""), trajectory(2, weights=odd)])
        replay.add(trajectory(3, weights="ö" * 300))
        replay.flush()
        assert files(tmp_path)[:3] == [
            "trajectory_0_abc-1.npz",
            "trajectory_1_.npz",
            "trajectory_2_..%2F..%2Fetc%2Fx%20y.npz",
        ]
        assert len(files(tmp_path)[3]) < 100
    with buffer(tmp_path, True, enable_cache=False) as again:
        assert {row // 1000 for row in untorn(again.sample(32), 32)} == {0, 1, 2, 3}


def test_synchronous_writing_is_done_when_add_returns(tmp_path: Path) -> None:
    replay = buffer(tmp_path, True, synchronous=True)
    replay.add(trajectory(0))
    assert files(tmp_path) == ["trajectory_0_w.npz"]
    replay.close()


def test_trajectories_beyond_the_bounds_leave_index_and_disk_together(tmp_path: Path) -> None:
    with buffer(tmp_path, True, max_trajectories=3) as replay:
        replay.add_trajectories([trajectory(n) for n in range(8)])
        replay.flush()
        assert replay.trajectory_ids == [5, 6, 7]
        assert files(tmp_path) == [f"trajectory_{n}_w.npz" for n in (5, 6, 7)]
    with buffer(tmp_path, True, max_trajectories=2) as again:
        again.flush()
        assert again.trajectory_ids == [6, 7]
        assert files(tmp_path) == ["trajectory_6_w.npz", "trajectory_7_w.npz"]
        assert {row // 1000 for row in untorn(again.sample(16), 16)} == {6, 7}


def test_clear_forgets_everything_and_deletes_the_files(tmp_path: Path) -> None:
    replay = buffer(tmp_path, True)
    replay.add(trajectory(0), at=(0, 0))
    replay.add(trajectory(1, weights="other"), at=(0, 1))
    replay.clear()
    assert replay.get_stats() == {"num_trajectories": 0, "total_samples": 0, "cache_size": 0}
    assert (replay.trajectory_counter, files(tmp_path), dict(replay.position)) == (0, [], {0: 2})
    with pytest.raises(NothingToSample):
        replay.sample(1)
    replay.add(trajectory(7))
    replay.close()
    with buffer(tmp_path, True) as again:
        assert set(untorn(again.sample(8), 8)) <= set(range(7000, 7008))


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    replay = buffer(tmp_path, True)
    with pytest.raises(StoreError, match="another buffer"):
        buffer(tmp_path, True)
    replay.close()
    with buffer(tmp_path, True) as other:
        other.add(trajectory(0))
    with pytest.raises(StoreError, match="was written by another process"):
        replay.add(trajectory(1))


def test_a_garbage_collected_buffer_releases_its_directory(tmp_path: Path) -> None:
    replay = buffer(tmp_path, True)
    replay.add(trajectory(0))
    replay.flush()
    del replay

    def opened() -> TrajectoryReplayBuffer:
        gc.collect()
        return buffer(tmp_path, True)

    # The writer's thread may hold the last reference.
    with eventually(opened, 60, "the directory is free") as again:
        assert again.trajectory_ids == [0]


def test_a_directory_of_another_program_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer" / "trajectory_0_w.pt").write_bytes(b"x")
    with pytest.raises(StoreError, match="load_checkpoint"):
        buffer(tmp_path, True)
    assert files(tmp_path) == ["trajectory_0_w.pt"]


def test_a_path_that_cannot_be_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "buffer").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        buffer(tmp_path, True)


def test_files_that_the_index_does_not_name_are_moved_aside_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state after a kill between a file and the index."""
    with buffer(tmp_path, True) as replay:
        replay.add(trajectory(0))
    directory = tmp_path / "buffer"
    for name in ("trajectory_1_w.npz", "trajectory_1_w.npz.1-a.unfinished"):
        (directory / name).write_bytes(b"whole")
    with buffer(tmp_path, True) as again:
        assert files(tmp_path) == ["trajectory_0_w.npz"]
        again.add(trajectory(5))
        assert again.trajectory_ids == [0, 1]
    [aside] = directory.glob("not-in-index-*/*")
    assert (aside.name, aside.read_bytes()) == ("trajectory_1_w.npz", b"whole")
    assert "trajectories_not_in_index" in caplog.text
    buffer(tmp_path, True).close()
    assert list(directory.glob("not-in-index-*/*")) == [aside], "what was put aside stays"


def test_after_a_clean_close_one_bit_of_the_index_is_refused_and_no_file_is_deleted(tmp_path: Path) -> None:
    with buffer(tmp_path, True) as replay:
        replay.add_trajectories([trajectory(number) for number in range(60)])
    index = tmp_path / "buffer" / "trajectory_index.log"
    whole = index.read_bytes()
    # The last 18 bytes are the mark of the close: without it nothing is lost.
    for place in np.random.default_rng(3).integers(0, len(whole) - 18, 40).tolist():
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(StoreError, match=r"trajectory_index\.log is damaged at byte .*restore it, or fill"):
            buffer(tmp_path, True)
        assert len(files(tmp_path)) == 60
    index.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with buffer(tmp_path, True) as again:
        assert len(again) == len(files(tmp_path)) == 60
    assert len(index.read_bytes()) == len(whole), "opened and closed again it is no longer"


def test_an_index_that_lost_its_end_deletes_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with buffer(tmp_path, True) as replay:
        replay.add_trajectories([trajectory(number) for number in range(60)])
    index = tmp_path / "buffer" / "trajectory_index.log"
    os.truncate(index, index.stat().st_size // 2)
    before = files(tmp_path)
    with buffer(tmp_path, True) as again:
        held = files(tmp_path)
        assert len(held) == len(again) < 60
    aside = [path.name for path in (tmp_path / "buffer").glob("not-in-index-*/*")]
    assert sorted([*held, *aside]) == before
    [logged] = [record for record in caplog.records if "trajectories_not_in_index" in record.getMessage()]
    assert (logged.levelname, vars(logged)["rollstream_fields"]["count"]) == ("WARNING", len(aside))


def test_a_missing_or_truncated_file_is_an_error(tmp_path: Path) -> None:
    with buffer(tmp_path, True) as replay:
        replay.add(trajectory(0))
    [path] = (tmp_path / "buffer").glob("*.npz")
    os.truncate(path, path.stat().st_size // 2)
    with buffer(tmp_path, True, enable_cache=False) as again, pytest.raises(StoreError, match="not a complete"):
        again.sample(1)
    path.unlink()
    with buffer(tmp_path, True, enable_cache=False) as again, pytest.raises(StoreError, match="is gone"):
        again.sample(1)

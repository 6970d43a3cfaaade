"""The trajectory buffer as a user meets it, in memory and on disk."""

import contextlib
import gc
import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.buffers.files import StoreError
from consumers.buffers.trajectory_buffer import NothingToSample, NotYetOnDisk, TrajectoryReplayBuffer
from consumers.buffers.trajectory_dataset import MixedDataset
from tests.unit.consumers.buffers.trajectories import trajectory, untorn
from tests.waiting import eventually
from topics.errors import ConfigurationError, RecordError
from topics.trajectories import Trajectory

ROOT = Path(__file__).parents[4]
CHI_SQUARE_15_AT_1_IN_10000 = 44.3


def buffer(tmp_path: Path, auto_save: bool, **settings: Any) -> TrajectoryReplayBuffer:
    path = tmp_path / "buffer" if auto_save else ""
    return TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=path, **settings)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "buffer").glob("trajectory_*_*.*"))


both = pytest.mark.parametrize("auto_save", [False, True], ids=["in memory", "on disk"])


# ---------------------------------------------------------------------- by hand


def test_names_and_defaults_are_those_it_is_known_by() -> None:
    parameters = inspect.signature(TrajectoryReplayBuffer).parameters
    defaults = {name: parameters[name].default for name in list(parameters)[:7]}
    assert defaults == {
        "seed": 1234,
        "enable_cache": True,
        "cache_size": 5,
        "sample_window_size": 100,
        "auto_save": False,
        "auto_save_path": "",
        "trajectory_format": "npz",
    }


@both
def test_trajectories_count_by_steps_and_by_ids(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, cache_size=2) as of:
        assert not of.is_ready(1)
        assert of.add_trajectories([trajectory(0), trajectory(1, steps=5), trajectory(2)]) == 3
        cached = 2 if auto_save else 3
        assert of.get_stats() == {"num_trajectories": 3, "total_samples": 26, "cache_size": cached}
        assert (len(of), of.size(), of.trajectory_counter, of.trajectory_ids) == (3, 26, 3, [0, 1, 2])
        assert of.is_ready(3)
        assert not of.is_ready(4)


def test_one_with_neither_log_probabilities_nor_rewards_is_passed_over_and_takes_no_id() -> None:
    of = TrajectoryReplayBuffer()
    bare = Trajectory(arrays={"actions": np.zeros((4, 2, 3), "<f4")}, environment="env")
    assert of.add_trajectories([bare]) == 0
    assert not of.add(bare, at=(1, 6))
    assert of.add(trajectory(0), at=(1, 7))
    assert (of.trajectory_ids, of.position, of.stats()["without_rewards"]) == ([0], {1: 8}, 2)


def test_the_shape_is_that_of_log_probabilities_else_of_rewards() -> None:
    of = TrajectoryReplayBuffer()
    of.add(Trajectory(arrays={"rewards": np.zeros((3, 2, 5), "<f4")}))
    assert of.total_samples == 6


@both
def test_arrays_are_copied(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, enable_cache=False) as of:
        mine = trajectory(3)
        of.add(mine)
        mine.arrays["rewards"][:] = -1
        mine.arrays["curr_obs"]["state"][:] = -1
        assert set(untorn(of.sample(8), 8)) <= set(range(3000, 3008))


@both
def test_what_is_unsound_leaves_none_of_its_call_in(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save) as of:
        short = trajectory(1)
        short.arrays["curr_obs"]["state"] = np.zeros((3, 2, 3), "<i4")
        with pytest.raises(RecordError, match=r"curr_obs/state has shape \(3, 2, 3\), which must begin with \[4, 2\]"):
            of.add_trajectories([trajectory(0), short])
        with pytest.raises(RecordError, match="has shape"):
            of.add(short, at=(0, 4))
        assert (len(of), of.position, of.trajectory_counter) == (0, {}, 0)


def test_other_arrays_than_those_in_the_buffer_are_refused_by_name() -> None:
    of = TrajectoryReplayBuffer()
    of.add(trajectory(0))
    of.add(trajectory(2))
    other = trajectory(1)
    del other.arrays["dones"]
    other.arrays["versions"] = np.zeros((4, 2), "<i8")
    other.arrays["rewards"] = other.arrays["rewards"].astype("<f8")
    with pytest.raises(RecordError) as raised:
        of.add(other)
    for said in ("dones is missing", "versions is new", "rewards has rows <f8 [] instead of <f4 []"):
        assert said in str(raised.value)
    of.clear()
    assert of.add(other)


def odd(number: int) -> Trajectory:
    made = trajectory(number)
    made.arrays["surprise"] = np.zeros((4, 2), "<i8")  # type: ignore[index]
    return made


@both
def test_one_trajectory_of_another_kind_decides_nothing_though_it_comes_first(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save) as of:
        assert of.add(odd(0), at=(0, 0))
        assert of.add(trajectory(1), at=(0, 1))
        assert of.add(trajectory(2), at=(0, 2))
        with pytest.raises(RecordError, match="surprise is new"):
            of.add(odd(3), at=(0, 3))
        assert of.trajectory_ids == [1, 2]
        assert {row // 1000 for row in untorn(of.sample(64), 16)} <= {1, 2}
    if auto_save:
        with buffer(tmp_path, auto_save) as again:
            assert again.trajectory_ids == [1, 2]
            assert again.add(trajectory(4))


@both
def test_who_says_what_trajectories_are_like_takes_no_other(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, like=trajectory(9)) as of:
        with pytest.raises(RecordError, match="surprise is new"):
            of.add(odd(0))
        assert of.add(trajectory(1))
        with pytest.raises(RecordError, match="surprise is new"):
            of.add(odd(2))
        assert of.trajectory_ids == [0]
    if auto_save:
        with pytest.raises(ConfigurationError, match=r"surprise is missing.*or give it another `like`"):
            buffer(tmp_path, auto_save, like=odd(0))


@pytest.mark.parametrize(
    "settings", [{"sample_window_size": -1}, {"max_bytes": -1}, {"trajectory_format": "xml"}, {"max_pending_bytes": 0}]
)
def test_settings_that_make_no_buffer_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TrajectoryReplayBuffer(**settings)


def test_auto_save_needs_a_path() -> None:
    with pytest.raises(ConfigurationError, match="auto_save_path"):
        TrajectoryReplayBuffer(auto_save=True)


def test_pickle_has_to_be_asked_for_in_so_many_words() -> None:
    with pytest.raises(ConfigurationError, match="allow_pickle=True"):
        TrajectoryReplayBuffer(trajectory_format="pkl")
    assert TrajectoryReplayBuffer(trajectory_format="pkl", allow_pickle=True).trajectory_format == "pkl"


# ---------------------------------------------------------------------- sampling


@both
def test_a_row_is_the_same_step_of_the_same_environment_in_every_array(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, cache_size=2) as of:
        of.add_trajectories([trajectory(n, steps=2 + n, width=3) for n in range(4)])
        seen = {row for _ in range(40) for row in untorn(of.sample(20), 20)}
    assert seen == {n * 1000 + row for n in range(4) for row in range((2 + n) * 3)}


@both
def test_draws_are_those_of_a_plain_computation_in_their_order(tmp_path: Path, auto_save: bool) -> None:
    from consumers.buffers.draws import generator_at

    with buffer(tmp_path, auto_save, seed=5, sample_window_size=3) as of:
        of.add_trajectories([trajectory(n, steps=2 + n) for n in range(5)])
        rows = [n * 1000 + row for n in range(2, 5) for row in range((2 + n) * 2)]
        for draw in range(3):
            expected = [rows[int(u * len(rows))] for u in generator_at(5, draw).random(10)]
            assert untorn(of.sample(10), 10) == expected


@both
def test_the_flags_of_a_step_are_those_after_it(tmp_path: Path, auto_save: bool) -> None:
    """T=4, B=1, dones 0..5, two parts: 1, 2, 4, 5."""
    arrays = {"rewards": np.arange(4.0).reshape(4, 1), "dones": np.arange(6).reshape(6, 1)}
    with buffer(tmp_path, auto_save, enable_cache=False) as of:
        of.add(Trajectory(arrays=arrays))
        of.flush()
        sample = of.sample(4)
        while len(set(sample["rewards"])) < 4:
            more = of.sample(4)
            sample = {name: np.concatenate([sample[name], more[name]]) for name in sample}
    assert dict(zip(sample["rewards"], sample["dones"], strict=True)) == {0.0: 1, 1.0: 2, 2.0: 4, 3.0: 5}


def test_flags_that_fit_no_equal_parts_are_refused() -> None:
    arrays = {"rewards": np.zeros((3, 1)), "dones": np.zeros((5, 1), bool)}
    with pytest.raises(RecordError, match="dones: 5 rows of flags for 3 steps"):
        TrajectoryReplayBuffer().add(Trajectory(arrays=arrays))


def test_there_is_nothing_to_draw_from_an_empty_buffer_nor_fewer_than_one() -> None:
    of = TrajectoryReplayBuffer()
    with pytest.raises(NothingToSample):
        of.sample(3)
    with pytest.raises(ConfigurationError):
        of.sample(0)
    of.add(trajectory(0))
    with pytest.raises(ConfigurationError):
        of.sample(-1)


@both
def test_a_sample_has_no_more_rows_than_the_window_has_steps(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, sample_window_size=2) as of:
        of.add_trajectories([trajectory(n) for n in range(5)])
        assert set(untorn(of.sample(1000), 16)) <= {*range(3000, 3008), *range(4000, 4008)}
        assert (of.window_samples, of.size(), of.stats()["window_samples"]) == (16, 16, 16)
        stored = 40 if auto_save else 16
        assert (of.total_samples, of.get_stats()["total_samples"]) == (stored, stored), "as in what is saved"
        of.save_checkpoint(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "metadata.json").read_text())["total_samples"] == stored


@both
def test_a_window_of_none_is_everything(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, sample_window_size=0) as of:
        of.add_trajectories([trajectory(n) for n in range(120)])
        assert of.total_samples == 960
        assert len({row // 1000 for row in untorn(of.sample(900), 900)}) > 100


def test_in_memory_what_cannot_be_drawn_is_not_counted_either() -> None:
    of = TrajectoryReplayBuffer(sample_window_size=3)
    of.add_trajectories([trajectory(n) for n in range(10)])
    assert of.get_stats() == {"num_trajectories": 3, "total_samples": 24, "cache_size": 3}
    assert of.trajectory_ids == [7, 8, 9]


def test_draws_are_uniform_over_steps_not_over_trajectories() -> None:
    of = TrajectoryReplayBuffer(seed=11)
    of.add_trajectories([trajectory(0, steps=1), trajectory(1, steps=5), trajectory(2, steps=2)])
    counts = Counter(row for _ in range(1000) for row in untorn(of.sample(16), 16))
    assert len(counts) == 16
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < CHI_SQUARE_15_AT_1_IN_10000


def test_drawing_is_with_replacement() -> None:
    of = TrajectoryReplayBuffer()
    of.add(trajectory(0))
    assert any(len(set(untorn(of.sample(8), 8))) < 8 for _ in range(10))


def test_two_buffers_of_a_seed_draw_the_same_wherever_they_keep_it(tmp_path: Path) -> None:
    one, other = buffer(tmp_path, False, seed=3), buffer(tmp_path, True, seed=3, cache_size=2)
    for of in (one, other):
        of.add_trajectories([trajectory(n, steps=n + 1) for n in range(6)])
    with other:
        for _ in range(3):
            assert untorn(one.sample(7), 7) == untorn(other.sample(7), 7)


# ---------------------------------------------------------------------- the log


@both
def test_the_position_moves_with_what_is_added_and_what_lies_below_is_passed_over(
    tmp_path: Path, auto_save: bool
) -> None:
    with buffer(tmp_path, auto_save) as of:
        assert of.position == {}
        assert of.add(trajectory(0), at=(0, 5))
        assert of.add(trajectory(1), at=(2, 0))
        assert not of.add(trajectory(0), at=(0, 5))
        assert not of.add(trajectory(2), at=(0, 4))
        of.skip((0, 6))
        of.skip((0, 3))
        assert not of.add(trajectory(3), at=(0, 6))
        assert of.add(trajectory(4), at=(0, 9))
        assert (dict(of.position), of.trajectory_ids) == ({0: 10, 2: 1}, [0, 1, 2])


def test_a_directory_that_is_opened_again_has_content_position_and_random_state(tmp_path: Path) -> None:
    with buffer(tmp_path, True, seed=9) as of:
        of.add(trajectory(0), at=(0, 0))
        of.skip((0, 1))
        of.add(trajectory(1), at=(1, 4))
        of.add(trajectory(2))
        of.sample(3)
        of.flush()
        expected = untorn(of.sample(8), 8)
    # That draw is not on disk: nothing was flushed since but by close, which is as good.
    with buffer(tmp_path, True) as again:
        assert (dict(again.position), again.trajectory_ids, again.seed) == ({0: 2, 1: 5}, [0, 1, 2], 9)
        assert again.stats()["draws"] == 2
        again._draws = 1
        assert untorn(again.sample(8), 8) == expected
        assert again.add(trajectory(3), at=(0, 2))
        assert again.trajectory_ids == [0, 1, 2, 3]


# ---------------------------------------------------------------------- on disk


def test_files_have_the_names_they_are_known_by(tmp_path: Path) -> None:
    with buffer(tmp_path, True) as of:
        odd = "../../etc/x y"
        of.add_trajectories([trajectory(0, weights="abc-1"), trajectory(1, weights=""), trajectory(2, weights=odd)])
        of.add(trajectory(3, weights="ö" * 300))
        of.flush()
        assert files(tmp_path)[:3] == [
            "trajectory_0_abc-1.npz",
            "trajectory_1_.npz",
            "trajectory_2_..%2F..%2Fetc%2Fx%20y.npz",
        ]
        assert len(files(tmp_path)[3]) < 100
    with buffer(tmp_path, True, enable_cache=False) as again:
        assert {row // 1000 for row in untorn(again.sample(32), 32)} == {0, 1, 2, 3}


def test_synchronous_writing_is_done_when_add_returns(tmp_path: Path) -> None:
    of = buffer(tmp_path, True, synchronous=True)
    of.add(trajectory(0))
    assert files(tmp_path) == ["trajectory_0_w.npz"]
    of.close()


def test_a_read_does_not_refresh_and_each_trajectory_is_fetched_once(tmp_path: Path) -> None:
    from consumers.buffers.draws import generator_at
    from consumers.buffers.trajectory_index import Entry
    from consumers.buffers.trajectory_rows import Fetched, checked
    from consumers.buffers.trajectory_shelf import TrajectoryShelf

    asked: list[int] = []

    def fetch(entry: Entry) -> Fetched:
        asked.append(entry.trajectory_id)
        part = checked(trajectory(entry.trajectory_id))
        assert part is not None
        return Fetched(part.arrays, mapped=False)

    shelf = TrajectoryShelf(2, fetch)
    for number in range(5):
        part = checked(trajectory(number))
        assert part is not None
        shelf.put(part, "npz")
    for draw in range(3):
        shelf.draw(0, 40, generator_at(0, draw))
    assert sorted(asked) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_older_than_the_bounds_leaves_index_and_disk_together(tmp_path: Path) -> None:
    with buffer(tmp_path, True, max_trajectories=3) as of:
        of.add_trajectories([trajectory(n) for n in range(8)])
        of.flush()
        assert of.trajectory_ids == [5, 6, 7]
        assert files(tmp_path) == [f"trajectory_{n}_w.npz" for n in (5, 6, 7)]
    with buffer(tmp_path, True, max_trajectories=2) as again:
        again.flush()
        assert again.trajectory_ids == [6, 7]
        assert files(tmp_path) == ["trajectory_6_w.npz", "trajectory_7_w.npz"]
        assert {row // 1000 for row in untorn(again.sample(16), 16)} == {6, 7}


@both
def test_bytes_are_bounded_too(tmp_path: Path, auto_save: bool) -> None:
    size = sum(a.nbytes for a in [*list(trajectory(0).arrays.values())[:3], trajectory(0).arrays["curr_obs"]["state"]])
    with buffer(tmp_path, auto_save, max_bytes=3 * size) as of:
        of.add_trajectories([trajectory(n) for n in range(5)])
        assert of.trajectory_ids == [2, 3, 4]
        assert of.stats()["stored_bytes"] == 3 * size
        with pytest.raises(RecordError, match="raise max_bytes"):
            of.add(trajectory(9, steps=20))
        assert of.trajectory_ids == [2, 3, 4]


def test_clear_forgets_everything_and_old_files_are_not_there_to_be_overwritten(tmp_path: Path) -> None:
    of = buffer(tmp_path, True)
    of.add(trajectory(0), at=(0, 0))
    of.add(trajectory(1, weights="other"), at=(0, 1))
    of.clear()
    assert of.get_stats() == {"num_trajectories": 0, "total_samples": 0, "cache_size": 0}
    assert (of.trajectory_counter, files(tmp_path), dict(of.position)) == (0, [], {0: 2})
    with pytest.raises(NothingToSample):
        of.sample(1)
    of.add(trajectory(7))
    of.close()
    with buffer(tmp_path, True) as again:
        assert set(untorn(again.sample(8), 8)) <= set(range(7000, 7008))


@both
def test_adding_goes_on_after_close(tmp_path: Path, auto_save: bool) -> None:
    of = buffer(tmp_path, auto_save)
    of.add(trajectory(0))
    of.close()
    of.close()
    assert set(untorn(of.sample(8), 8)) <= set(range(8))
    of.add(trajectory(1))
    of.close()
    if auto_save:
        with buffer(tmp_path, True) as again:
            assert again.trajectory_ids == [0, 1]


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    of = buffer(tmp_path, True)
    with pytest.raises(StoreError, match="another buffer"):
        buffer(tmp_path, True)
    of.close()
    with buffer(tmp_path, True) as other:
        other.add(trajectory(0))
    with pytest.raises(StoreError, match="written to by others"):
        of.add(trajectory(1))


def test_a_buffer_that_nobody_refers_to_lets_go_of_its_directory(tmp_path: Path) -> None:
    of = buffer(tmp_path, True)
    of.add(trajectory(0))
    of.flush()
    del of

    def opened() -> TrajectoryReplayBuffer:
        gc.collect()
        return buffer(tmp_path, True)

    # The writer's thread may have been the last to let go of it.
    with eventually(opened, 10, "the directory is free") as again:
        assert again.trajectory_ids == [0]


def test_a_directory_of_another_program_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer" / "trajectory_0_w.pt").write_bytes(b"x")
    with pytest.raises(StoreError, match="load_checkpoint"):
        buffer(tmp_path, True)
    assert files(tmp_path) == ["trajectory_0_w.pt"]


def test_a_write_that_fails_is_raised_at_the_next_call_and_made_up_for(tmp_path: Path) -> None:
    of = buffer(tmp_path, True)
    of.add(trajectory(0))
    of.flush()
    obstacle = tmp_path / "buffer" / "trajectory_1_w.npz"
    obstacle.mkdir()
    of.add(trajectory(1), at=(0, 0))
    with pytest.raises(StoreError, match="cannot be written"):
        of.flush()
    # It can be drawn, as it is in memory.
    assert 1 in {row // 1000 for row in untorn(of.sample(16), 16)}
    assert of._store is not None
    eventually(lambda: of._store and of._store._failure, 10, "the second attempt failed")
    with pytest.raises(StoreError, match="cannot be written"):
        of.add(trajectory(2), at=(0, 1))
    assert (of.trajectory_ids, of.position) == ([0, 1], {0: 1})
    obstacle.rmdir()
    eventually(lambda: of.flush() is None, 10, "an attempt succeeded")
    assert "trajectory_1_w.npz" in files(tmp_path)
    of.add(trajectory(2), at=(0, 1))
    of.close()
    with buffer(tmp_path, True) as again:
        assert (again.trajectory_ids, again.position) == ([0, 1, 2], {0: 2})


def test_an_index_on_a_full_disk_names_nothing_twice_and_nothing_wrong(tmp_path: Path) -> None:
    """Texts that did not reach the disk come again with the entries that need them."""
    of = buffer(tmp_path, True)
    of.add(trajectory(0), at=(0, 0))
    of.flush()
    assert of._store is not None
    journal = of._store._journal
    whole, journal._descriptor = journal._descriptor, os.open("/dev/full", os.O_RDWR)
    of.add(trajectory(1, steps=5, weights="new"), at=(0, 1))
    with pytest.raises(StoreError, match="No space left"):
        of.flush()
    eventually(lambda: of._store and of._store._failure, 10, "the second attempt failed")
    os.close(journal._descriptor)
    journal._descriptor = whole
    eventually(lambda: of.flush() is None, 10, "an attempt succeeded")
    of.add(trajectory(2, steps=5, weights="new"), at=(0, 2))
    of.close()
    with buffer(tmp_path, True, enable_cache=False) as again:
        assert (again.trajectory_ids, again.position, again.total_samples) == ([0, 1, 2], {0: 3}, 28)
        assert {row // 1000 for row in untorn(again.sample(28), 28)} == {0, 1, 2}


def test_a_path_that_cannot_be_a_directory_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "buffer").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        buffer(tmp_path, True)


def test_files_that_the_index_does_not_name_are_put_aside_and_that_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a writer leaves them that is killed between a file and the index."""
    with buffer(tmp_path, True) as of:
        of.add(trajectory(0))
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
    with buffer(tmp_path, True) as of:
        of.add_trajectories([trajectory(number) for number in range(60)])
    index = tmp_path / "buffer" / "trajectory_index.log"
    whole = index.read_bytes()
    # The last 56 bytes say that it was closed: without them nothing is lost.
    for place in np.random.default_rng(3).integers(0, len(whole) - 56, 40).tolist():
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(StoreError, match=r"trajectory_index\.log is damaged at byte .*restore it, or fill"):
            buffer(tmp_path, True)
        assert len(files(tmp_path)) == 60
    index.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with buffer(tmp_path, True) as again:
        assert len(again) == len(files(tmp_path)) == 60
    assert len(index.read_bytes()) == len(whole), "opened and closed again it is no longer"


def test_an_index_that_lost_its_end_deletes_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with buffer(tmp_path, True) as of:
        of.add_trajectories([trajectory(number) for number in range(60)])
    index = tmp_path / "buffer" / "trajectory_index.log"
    os.truncate(index, index.stat().st_size // 2)
    before = files(tmp_path)
    with buffer(tmp_path, True) as again:
        held = files(tmp_path)
        assert len(held) == len(again) < 60
    aside = [path.name for path in (tmp_path / "buffer").glob("not-in-index-*/*")]
    assert sorted([*held, *aside]) == before
    [said] = [record for record in caplog.records if "trajectories_not_in_index" in record.getMessage()]
    assert (said.levelname, vars(said)["rollstream_fields"]["count"]) == ("WARNING", len(aside))


def test_a_file_that_is_gone_or_cut_short_is_an_error_that_says_so(tmp_path: Path) -> None:
    with buffer(tmp_path, True) as of:
        of.add(trajectory(0))
    [path] = (tmp_path / "buffer").glob("*.npz")
    os.truncate(path, path.stat().st_size // 2)
    with buffer(tmp_path, True, enable_cache=False) as again, pytest.raises(StoreError, match="no whole trajectory"):
        again.sample(1)
    path.unlink()
    with buffer(tmp_path, True, enable_cache=False) as again, pytest.raises(StoreError, match="is gone"):
        again.sample(1)


@both
def test_adding_drawing_and_saving_at_once_tears_nothing(tmp_path: Path, auto_save: bool) -> None:
    """Four threads that add, two that draw, one that saves; every array of every row says the same."""
    of = buffer(tmp_path, auto_save, cache_size=2, sample_window_size=6, max_trajectories=8)
    of.add(trajectory(0))
    failures: list[BaseException] = []
    adding = threading.Event()

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def draw() -> None:
        while not adding.is_set():
            untorn(of.sample(8), 8)

    def save() -> None:
        number = 0
        while not adding.is_set():
            of.save_checkpoint(tmp_path / f"checkpoint-{number % 2}")
            number += 1

    def add(first: int) -> None:
        for number in range(first, first + 40):
            of.add(trajectory(number, steps=1 + number % 5))

    others = [guarded(draw), guarded(draw), guarded(save)]
    adders = [guarded(lambda first=first: add(first)) for first in (100, 200, 300, 400)]
    for thread in adders:
        thread.join()
    adding.set()
    for thread in others:
        thread.join()
    assert not failures
    of.close()
    assert of.trajectory_counter == 161
    loaded = TrajectoryReplayBuffer()
    loaded.load_checkpoint(tmp_path / "checkpoint-0")
    untorn(loaded.sample(4), min(4, loaded.total_samples))


def test_more_than_may_wait_to_be_written_waits_itself(tmp_path: Path) -> None:
    with buffer(tmp_path, True, max_pending_bytes=1) as of:
        for number in range(20):
            of.add(trajectory(number))
            assert of._store is not None
            assert len(of._store._pending) <= 1
        assert len(of) == 20


def test_fields_of_a_trajectory_need_no_environment_by_hand() -> None:
    assert TrajectoryReplayBuffer().add(replace(trajectory(0), environment=""))


@both
def test_rewards_of_one_dimension_are_a_record_error_and_nothing_of_it_is_in(tmp_path: Path, auto_save: bool) -> None:
    for rewards in (np.zeros(4), np.float32(1), [0.0, 1.0]):
        unsound = Trajectory(arrays={"rewards": rewards}, environment="env", uid="flat")
        with buffer(tmp_path, auto_save) as of:
            with pytest.raises(RecordError, match=r"'flat'.*rewards has shape .* must be \[T, B, \.\.\.\]"):
                of.add(unsound)
            with pytest.raises(RecordError, match=r"rewards has shape"):
                _ = unsound.shape
            assert len(of) == 0


@both
def test_none_stands_for_an_array_that_is_not_there_and_a_plain_dict_for_a_trajectory(
    tmp_path: Path, auto_save: bool
) -> None:
    whole = trajectory(3)
    plain = {
        **whole.arrays,
        "prev_values": None,
        "next_obs": {"state": None},
        "model_weights_id": "w",
        "max_episode_length": 80,
        "versions": None,
    }
    with buffer(tmp_path, auto_save) as of:
        assert of.add_trajectories([whole, replace(whole, arrays=plain_arrays(plain)), plain]) == 3
        assert of.add(plain)
        assert len(of) == 4
        assert set(untorn(of.sample(200), 32)) <= set(range(3000, 3008))
        for wrong in (7, {"arrays": {"rewards": whole.arrays["rewards"]}, "uuid": "x"}):
            with pytest.raises(RecordError, match=r"(is|makes) no trajectory"):
                of.add_trajectories([wrong])  # type: ignore[list-item]


def plain_arrays(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in ("model_weights_id", "max_episode_length")}


def test_records_of_several_partitions_in_another_order_make_the_same_content_where_there_is_room(
    tmp_path: Path,
) -> None:
    """As the page says: the same trajectories, in a bounded buffer those that came last."""
    records = [(partition, offset, trajectory(10 * partition + offset)) for partition in (0, 1) for offset in range(3)]
    held: dict[int, list[set[int]]] = {0: [], 2: []}
    for order in (records, sorted(records, key=lambda record: record[1])):
        for bound, found in held.items():
            with TrajectoryReplayBuffer(sample_window_size=bound) as of:
                for partition, offset, item in order:
                    of.add(item, at=(partition, offset))
                assert dict(of.position) == {0: 3, 1: 3}
                found.append({row // 1000 for row in of.sample(2000)["rewards"].astype(int).tolist()})
    assert held == {0: [{0, 1, 2, 10, 11, 12}] * 2, 2: [{11, 12}, {2, 12}]}


# ---------------------------------------------------------------------- what does not suffice


@contextlib.contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """The system refuses to make any file of this process longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_synchronous_add_that_cannot_write_says_that_all_is_in_and_how_much_is_on_disk(tmp_path: Path) -> None:
    of = buffer(tmp_path, True, synchronous=True)
    some = [trajectory(number, steps=4000 if number == 29 else 4) for number in range(31)]
    with files_of_at_most(100_000):
        with pytest.raises(NotYetOnDisk, match=r"\d+ of the 31 .*trajectory_29_w.npz.*do not add them again") as raised:
            of.add_trajectories(some)
        assert len(of) == 31
        eventually(lambda: of._store and of._store._failure, 10, "the second attempt failed")
        with pytest.raises(StoreError, match=r"earlier write failed.*nothing of this call is in"):
            of.add(trajectory(31))
        assert of.trajectory_ids == list(range(31))
        eventually(lambda: of._store and of._store._failure, 10, "the third attempt failed: nothing is being written")
        shutil.copytree(tmp_path / "buffer", tmp_path / "copy")
    of.flush()
    assert len(files(tmp_path)) == 31
    of.add(trajectory(31))
    of.close()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "copy") as killed:
        assert f"{len(killed)} of the 31" in str(raised.value)
    with buffer(tmp_path, True) as again:
        assert again.trajectory_ids == list(range(32))


MEMORY = """
import resource
import numpy as np
from consumers.buffers.trajectory_buffer import TrajectoryReplayBuffer

def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more if more else resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def arrays(number):
    return {"rewards": np.full((80, 8), number, "<f4"), "front": np.full((80, 8, 64, 64, 3), number % 256, "u1")}

buffer = TrajectoryReplayBuffer(sample_window_size=20_000)
limit(2**28)
try:
    while True:
        buffer.add(arrays(len(buffer)))
except MemoryError:
    held = len(buffer)
assert held >= 4, held
batch = buffer.sample(64)
assert (batch["front"][:, 0, 0, 0] == batch["rewards"]).all()
assert set(batch["rewards"]) == set(range(held))
limit(0)
buffer.add(arrays(held))
assert len(buffer) == held + 1 and held in buffer.sample(500)["rewards"]
"""


def test_a_wide_window_asks_for_memory_as_it_fills_and_outlives_what_does_not_fit() -> None:
    """A window of 20,000 of these would take 146 GiB; the process may have 256 MiB more."""
    subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, check=True)


def test_one_long_trajectory_takes_no_more_memory_than_its_own_and_gives_it_back() -> None:
    of = TrajectoryReplayBuffer(sample_window_size=50)
    of.add_trajectories([trajectory(number) for number in range(50)])
    cache = of._shelf._cache
    assert cache is not None
    usual = cache.nbytes
    of.add(trajectory(50, steps=4000))
    assert cache.nbytes < 2 * 1000 * usual / 50
    of.add_trajectories([trajectory(number) for number in range(51, 101)])
    assert cache.nbytes < 4 * usual
    assert {row // 1000 for _ in range(20) for row in untorn(of.sample(400), 400)} == set(range(51, 101))


@both
def test_more_than_a_buffer_may_hold_is_no_size_to_wait_for(tmp_path: Path, auto_save: bool) -> None:
    bound = {"max_trajectories": 5} if auto_save else {"sample_window_size": 5}
    with buffer(tmp_path, auto_save, **bound) as of:
        assert not of.is_ready(5)
        with pytest.raises(ConfigurationError, match=r"is_ready\(10\) is never true: .* at most 5 trajectories"):
            of.is_ready(10)
        with (
            pytest.raises(ConfigurationError, match=r"is_ready\(10\) is never true"),
            MixedDataset(of, None, batch_size=4, min_replay_buffer_size=10) as dataset,
        ):
            next(iter(dataset))

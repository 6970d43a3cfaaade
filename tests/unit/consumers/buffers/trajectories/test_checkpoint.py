"""Checkpoints of trajectory buffers: saving, loading, shares of ranks, kills, and directories of RLinf."""

import json
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories import folder
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.checkpoint import read_checkpoint
from rollstream.consumers.buffers.trajectories.formats import format_named
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import EpisodeSpan
from rollstream.topics.wire.trajectory_arrays import Trajectory
from tests.support.trajectory_batches import foreign, same, trajectory, untorn


def buffer(tmp_path: Path, auto_save: bool, name: str = "buffer", **settings: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=tmp_path / name if auto_save else "", **settings)


def stored(directory: Path) -> list[Trajectory]:
    """Every trajectory of a checkpoint, read from its file."""
    actual = read_checkpoint(directory, lambda name: format_named(name, allow_pickle=True))
    return [
        actual.formats(entry.description.format).read(actual.path(entry))
        for entry in map(actual.content.__getitem__, range(len(actual.content)))
    ]


both = pytest.mark.parametrize("auto_save", [False, True], ids=["in memory", "on disk"])
loading = pytest.mark.parametrize("into_files", [False, True], ids=["into memory", "into files"])


@both
@loading
def test_a_loaded_checkpoint_equals_the_saved_buffer_and_draws_the_same(
    tmp_path: Path, auto_save: bool, into_files: bool
) -> None:
    replay = buffer(tmp_path, auto_save, seed=21)
    span = EpisodeSpan(uid="e", column=1, start=0, stop=3, control_mode=1, last=False, begin=7)
    originals = [trajectory(n, steps=n + 2, episodes=(span,) if n else (), extra={"n": str(n)}) for n in range(4)]
    replay.add_trajectories(originals[:2])
    replay.add(originals[2], at=(1, 8))
    replay.add(originals[3], at=(0, 2))
    replay.sample(5)
    replay.save_checkpoint(tmp_path / "saved")
    for actual, original in zip(stored(tmp_path / "saved"), originals, strict=True):
        same(actual, original)

    other = buffer(tmp_path, into_files, name="other", seed=4)
    # The earlier content is gone, also from the window of draws.
    other.add_trajectories([trajectory(50 + n) for n in range(6)])
    other.sample(4)
    other.load_checkpoint(tmp_path / "saved")
    assert (other.trajectory_ids, other.trajectory_counter) == ([0, 1, 2, 3], 4)
    assert dict(other.position) == {0: 3, 1: 9}
    for _ in range(3):
        assert untorn(other.sample(9), 9) == untorn(replay.sample(9), 9)
    other.add(trajectory(60))
    assert other.trajectory_ids == [0, 1, 2, 3, 4]
    other.save_checkpoint(tmp_path / "again")
    for actual, original in zip(stored(tmp_path / "again"), [*originals, trajectory(60)], strict=True):
        same(actual, original)
    replay.close()
    other.close()


def test_a_checkpoint_holds_everything_and_survives_the_files_it_was_made_from(tmp_path: Path) -> None:
    with buffer(tmp_path, True, sample_window_size=1, max_trajectories=2) as replay:
        replay.add_trajectories([trajectory(0), trajectory(1)])
        replay.save_checkpoint(tmp_path / "saved")
        replay.add_trajectories([trajectory(2), trajectory(3)])
        replay.flush()
    assert [actual.uid for actual in stored(tmp_path / "saved")] == [trajectory(n).uid for n in (0, 1)]


def test_a_directory_that_loaded_a_checkpoint_opens_again_without_it(tmp_path: Path) -> None:
    with buffer(tmp_path, False) as replay:
        replay.add_trajectories([trajectory(n) for n in range(3)])
        replay.save_checkpoint(tmp_path / "saved")
    with buffer(tmp_path, True) as other:
        other.add_trajectories([trajectory(n) for n in (7, 8)])
        other.load_checkpoint(tmp_path / "saved")
        other.add(trajectory(9))
    for path in (tmp_path / "saved").iterdir():
        path.unlink()
    with buffer(tmp_path, True, enable_cache=False, max_trajectories=3) as again:
        assert again.trajectory_ids == [1, 2, 3]
        assert {row // 1000 for row in untorn(again.sample(24), 24)} == {1, 2, 9}
        again.flush()
        assert len(list((tmp_path / "buffer").glob("**/*.npz"))) == 3
        again.clear()
        assert list((tmp_path / "buffer").glob("**/*.npz")) == []


def test_what_is_added_after_a_second_resume_is_there_when_the_buffer_opens_again(tmp_path: Path) -> None:
    """Saving puts files of two folders into one, so two descriptions become equal."""
    with buffer(tmp_path, True) as replay:
        replay.add(trajectory(0, steps=8))
        replay.save(tmp_path / "first")
        replay.add(trajectory(99))
        replay.load(tmp_path / "first")
        replay.add(trajectory(1, steps=8))
        replay.save(tmp_path / "second")
        replay.load(tmp_path / "second")
        for number, steps in ((2, 5), (3, 6), (4, 7)):
            replay.add(trajectory(number, steps=steps, weights=f"w{number}"))
    with buffer(tmp_path, True, enable_cache=False) as again:
        assert not list((tmp_path / "buffer").glob("not-in-index-*"))
        assert again.total_samples == 2 * (8 + 8 + 5 + 6 + 7)
        assert {row // 1000 for row in untorn(again.sample(68), 68)} == {0, 1, 2, 3, 4}


def test_an_interrupted_load_leaves_the_buffer_unchanged(tmp_path: Path) -> None:
    """The loaded files exist but the journal does not name them, or it names them and the replaced files are left."""
    with buffer(tmp_path, True) as replay:
        replay.add_trajectories([trajectory(n) for n in range(2)])
    directory = tmp_path / "buffer"
    for name in ("loaded-abc", "loaded-def.unfinished"):
        (directory / name).mkdir()
        (directory / name / "trajectory_0_w.npz").write_bytes(b"brought")
    with buffer(tmp_path, True) as again:
        assert again.trajectory_ids == [0, 1]
        assert not list(directory.glob("loaded-*"))
        again.save(tmp_path / "saved")
        again.load(tmp_path / "saved")
        assert len(list(directory.glob("loaded-*/*.npz"))) == 2
    (directory / "trajectory_0_w.npz").write_bytes(b"replaced")
    with buffer(tmp_path, True, enable_cache=False) as again:
        assert not list(directory.glob("*.npz"))
        assert [len(list(path.iterdir())) for path in directory.glob("loaded-*")] == [2]
        assert {path.read_bytes() for path in directory.glob("not-in-index-*/**/*.npz")} == {b"brought", b"replaced"}
        assert {row // 1000 for row in untorn(again.sample(16), 16)} == {0, 1}


def test_a_checkpoint_of_a_buffer_in_memory_names_only_existing_files(tmp_path: Path) -> None:
    replay = buffer(tmp_path, False, sample_window_size=3)
    replay.add_trajectories([trajectory(n) for n in range(10)])
    replay.save_checkpoint(tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == [7, 8, 9]
    assert list(index["trajectory_index"]) == ["7", "8", "9"]
    assert index["trajectory_index"]["7"] == {
        "uuid": "00000000-0000-0000-0000-000000000007",
        "trajectory_id": 7,
        "num_samples": 8,
        "shape": [4, 2],
        "max_episode_length": 80,
        "model_weights_id": "w",
    }
    assert json.loads((tmp_path / "saved" / "metadata.json").read_text()) == {
        "trajectory_format": "npz",
        "size": 3,
        "total_samples": 24,
        "trajectory_counter": 10,
        "seed": 1234,
    }
    assert {path.name for path in (tmp_path / "saved").glob("trajectory_*_*.npz")} == {
        f"trajectory_{n}_w.npz" for n in (7, 8, 9)
    }


# ---------------------------------------------------------------------- ranks


@loading
@pytest.mark.parametrize(
    ("world_size", "shares"),
    [
        (1, [[0, 1, 2, 3, 4]]),
        (2, [[0, 1, 2], [3, 4]]),
        (3, [[0, 1], [2, 3], [4]]),
        (7, [[0], [1], [2], [3], [4], [], []]),
    ],
)
def test_shares_of_ranks_are_the_whole(
    tmp_path: Path, world_size: int, shares: list[list[int]], into_files: bool
) -> None:
    replay = buffer(tmp_path, False)
    replay.add_trajectories([trajectory(n) for n in range(5)])
    replay.save_checkpoint(tmp_path / "saved")
    for rank, share in enumerate(shares):
        with buffer(tmp_path, into_files, name=f"rank {rank}") as mine:
            mine.load_checkpoint(tmp_path / "saved", is_distributed=True, local_rank=rank, world_size=world_size)
            assert mine.trajectory_ids == share
            assert mine.trajectory_counter == (share[-1] + 1 if share else 0)
            assert mine.total_samples == 8 * len(share)
            if share:
                assert {row // 1000 for _ in range(9) for row in untorn(mine.sample(8), 8)} == set(share)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_out_of_range_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    replay = buffer(tmp_path, False)
    replay.add(trajectory(0))
    replay.save_checkpoint(tmp_path / "saved")
    with pytest.raises(ValueError, match=f"rank {rank} of {world_size}"):
        replay.load_checkpoint(tmp_path / "saved", is_distributed=True, local_rank=rank, world_size=world_size)
    assert len(replay) == 1


@both
def test_loading_without_a_checkpoint_is_an_error_that_changes_nothing(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save) as replay:
        replay.add(trajectory(0))
        with pytest.raises(FileNotFoundError, match="contains no checkpoint"):
            replay.load_checkpoint(tmp_path / "nowhere")
        with pytest.raises(StoreError):
            replay.load(tmp_path / "nowhere")
        assert replay.trajectory_ids == [0]


@both
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("gone", "trajectory_1_w.npz is gone"),
        ("damaged", "trajectory_1_w.npz is not a complete"),
        ("other arrays", "or give another `like`"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_whole_changes_nothing(
    tmp_path: Path, auto_save: bool, fault: str, message: str
) -> None:
    replay = buffer(tmp_path, False)
    for n in range(3):
        surprise = {"surprise": np.zeros((4, 2), "<i8")} if fault == "other arrays" else {}
        replay.add(replace(trajectory(n), arrays={**trajectory(n).arrays, **surprise}))
    replay.save(tmp_path / "saved")
    if fault != "other arrays":
        (tmp_path / "saved" / "trajectory_1_w.npz").unlink()
    if fault == "damaged":
        (tmp_path / "saved" / "trajectory_1_w.npz").write_bytes(b"PK")
    with buffer(tmp_path, auto_save, like=trajectory(9)) as other:
        other.add(trajectory(9))
        with pytest.raises((StoreError, ConfigurationError), match=message):
            other.load(tmp_path / "saved")
        assert set(untorn(other.sample(8), 8)) <= set(range(9000, 9008))
    if auto_save:
        with buffer(tmp_path, True, enable_cache=False) as again:
            assert set(untorn(again.sample(8), 8)) <= set(range(9000, 9008))
            assert len(list((tmp_path / "buffer").glob("**/*.npz"))) == 1


# ---------------------------------------------------------------------- saved over


@both
def test_saving_again_adds_new_files_and_deletes_those_that_left(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, max_trajectories=3) as replay:
        replay.add_trajectories([trajectory(n) for n in range(3)])
        replay.save(tmp_path / "saved")
        kept = (tmp_path / "saved" / "trajectory_2_w.npz").stat().st_ino
        replay.add_trajectories([trajectory(n) for n in (3, 4)])
        replay.save(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").glob("**/*.npz")) == [
        f"trajectory_{n}_w.npz" for n in (2, 3, 4)
    ]
    assert (tmp_path / "saved" / "trajectory_2_w.npz").stat().st_ino == kept
    assert [actual.uid for actual in stored(tmp_path / "saved")] == [trajectory(n).uid for n in (2, 3, 4)]


def test_another_history_saved_over_a_checkpoint_replaces_it(tmp_path: Path) -> None:
    """The same ids name other trajectories, as after a return to an older checkpoint."""
    for first in (0, 10, 20):
        replay = buffer(tmp_path, False)
        replay.add_trajectories([trajectory(first + n) for n in range(3)])
        replay.save(tmp_path / "saved")
        assert [actual.uid for actual in stored(tmp_path / "saved")] == [trajectory(first + n).uid for n in range(3)]
        assert len(list((tmp_path / "saved").glob("**/*.npz"))) == 3


def test_an_interrupted_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    """Every file exists except the journal, which is written last."""
    replay = buffer(tmp_path, False)
    replay.add_trajectories([trajectory(n) for n in range(2)])
    replay.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "trajectory_index.log").read_bytes()
    replay.add_trajectories([trajectory(n) for n in (2, 3)])
    replay.save(tmp_path / "saved")
    (tmp_path / "saved" / "trajectory_index.log").write_bytes(before)
    assert [actual.uid for actual in stored(tmp_path / "saved")] == [trajectory(n).uid for n in range(2)]
    replay.save(tmp_path / "saved")
    assert [actual.uid for actual in stored(tmp_path / "saved")] == [trajectory(n).uid for n in range(4)]


def test_saving_a_checkpoint_to_a_buffers_own_directory_is_refused(tmp_path: Path) -> None:
    with buffer(tmp_path, True) as replay:
        replay.add(trajectory(0))
        with pytest.raises(StoreError, match="save checkpoints elsewhere"):
            replay.save(tmp_path / "buffer")


# ---------------------------------------------------------------------- formats


def test_formats_may_differ_from_file_to_file(tmp_path: Path) -> None:
    replay = buffer(tmp_path, False, trajectory_format="pkl", allow_pickle=True)
    replay.add_trajectories([trajectory(n) for n in range(2)])
    replay.save(tmp_path / "saved")
    with pytest.raises(Exception, match="allow_pickle=True"):
        buffer(tmp_path, False).load(tmp_path / "saved")
    with buffer(tmp_path, True, allow_pickle=True, enable_cache=False) as other:
        other.load(tmp_path / "saved")
        other.add(trajectory(2))
        other.flush()
        assert {row // 1000 for row in untorn(other.sample(24), 24)} == {0, 1, 2}
        assert sorted(path.suffix for path in (tmp_path / "buffer").glob("**/trajectory_*_*.*")) == [
            ".npz",
            ".pkl",
            ".pkl",
        ]


# ---------------------------------------------------------------------- RLinf's


def document(number: int, **others: Any) -> dict[str, Any]:
    rows = (number * 1000 + np.arange(8)).reshape(4, 2)
    return {
        "max_episode_length": 80,
        "model_weights_id": f"weights{number}",
        "rewards": rows.astype("<f4"),
        "prev_logprobs": rows.astype("<f8"),
        "dones": np.zeros((5, 2), bool),
        "curr_obs": {"state": np.repeat(rows[..., None], 3, axis=2).astype("<i4")},
        "forward_inputs": {},
        "next_obs": {},
        **others,
    }


@loading
@pytest.mark.parametrize("name", ["trajectory_index.json", "trajector_index.json"])
def test_a_directory_that_rlinf_wrote_is_loaded(tmp_path: Path, into_files: bool, name: str) -> None:
    foreign(tmp_path / "theirs", {n: document(n) for n in range(3)}, name)
    with buffer(tmp_path, into_files, allow_pickle=True) as replay:
        replay.load_checkpoint(tmp_path / "theirs")
        assert (replay.trajectory_ids, replay.trajectory_counter, replay.seed, replay.total_samples) == (
            [0, 1, 2],
            3,
            77,
            24,
        )
        assert {row // 1000 for row in untorn(replay.sample(24), 24)} == {0, 1, 2}
        replay.add(trajectory(3))
        replay.save(tmp_path / "ours")
    assert [actual.model_weights_id for actual in stored(tmp_path / "ours")] == [
        "weights0",
        "weights1",
        "weights2",
        "w",
    ]


@loading
def test_a_file_that_differs_from_its_index_entry_is_refused(tmp_path: Path, into_files: bool) -> None:
    """A shape or the arrays differ; those of the first file count for all."""
    others = (document(1, rewards=np.zeros((3, 2), "<f4")), document(1, versions=np.zeros((4, 2), "<i8")))
    for number, other in enumerate(others):
        foreign(tmp_path / f"theirs-{number}", {0: document(0), 1: document(1)})
        (tmp_path / f"theirs-{number}" / "trajectory_1_weights1.pkl").write_bytes(pickle.dumps(other))
        fault = ("rewards of", "versions is new")[number]
        with buffer(tmp_path, into_files, allow_pickle=True) as replay:
            replay.clear()
            replay.add(trajectory(7))
            with pytest.raises(StoreError, match=fault):
                replay.load(tmp_path / f"theirs-{number}")
            assert set(untorn(replay.sample(8), 8)) <= set(range(7000, 7008))


@pytest.mark.parametrize("number", [0, 1])
def test_a_checkpoint_may_replace_one_of_rlinf(tmp_path: Path, number: int) -> None:
    foreign(tmp_path / "theirs", {n: document(n) for n in range(2)})
    replay = buffer(tmp_path, False)
    replay.add_trajectories([trajectory(5)] * number)
    replay.save(tmp_path / "theirs")
    assert len(stored(tmp_path / "theirs")) == number
    replay.save(tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("**/trajectory_*_*.*"))) == number


def test_entries_of_rlinf_without_a_file_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign(tmp_path / "theirs", {n: document(n) for n in range(4)})
    for number in (0, 1):
        (tmp_path / "theirs" / f"trajectory_{number}_weights{number}.pkl").unlink()
    replay = buffer(tmp_path, False, allow_pickle=True)
    with caplog.at_level("WARNING"):
        replay.load_checkpoint(tmp_path / "theirs", is_distributed=True, local_rank=0, world_size=2)
    assert (replay.trajectory_ids, replay.total_samples) == ([2], 8)
    assert "trajectories_without_a_file" in caplog.text


@pytest.mark.parametrize(
    "spoiled",
    [
        {"trajectory_id_list": ["x"]},
        {"trajectory_index": {}},
        {"trajectory_id_list": [1, 0]},
        {"trajectory_id_list": None},
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    foreign(tmp_path / "theirs", {n: document(n) for n in range(2)})
    path = tmp_path / "theirs" / "trajectory_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **spoiled}))
    with pytest.raises(StoreError, match="is not a valid index of trajectories"):
        buffer(tmp_path, False, allow_pickle=True).load(tmp_path / "theirs")


@pytest.mark.long
def test_tensors_are_kept_and_read_without_running_anything(tmp_path: Path) -> None:
    import torch

    with buffer(tmp_path, True, trajectory_format="pt", enable_cache=False) as replay:
        replay.add_trajectories([trajectory(n) for n in range(3)])
        replay.flush()
        path = tmp_path / "buffer" / "trajectory_1_w.pt"
        loaded = torch.load(path, weights_only=True)
        assert loaded["model_weights_id"] == "w"
        assert torch.equal(loaded["curr_obs"]["state"], torch.from_numpy(trajectory(1).arrays["curr_obs"]["state"]))
        assert {row // 1000 for row in untorn(replay.sample(24), 24)} == {0, 1, 2}
        replay.save(tmp_path / "saved")
        for one, original in zip(stored(tmp_path / "saved"), [trajectory(n) for n in range(3)], strict=True):
            same(one, original)
    with buffer(tmp_path, True, trajectory_format="pt") as again:
        again.clear()
        torch.save({"rewards": torch.zeros(4, 2), "evil": Path("x")}, tmp_path / "evil.pt")
        with pytest.raises(StoreError, match=r"contains more than tensors, or is damaged \(UnpicklingError\)"):
            format_named("pt").read(tmp_path / "evil.pt")
        with pytest.raises(Exception, match="torch has no tensors"):
            again.add(Trajectory(arrays={"rewards": np.zeros((4, 2)), "text": np.full((4, 2), "pick")}))


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({"rollstream": "no JSON"}, id="a description that is no JSON"),
        pytest.param({"max_episode_length": "long"}, id="a length that is no number"),
    ],
)
def test_a_pickle_with_invalid_fields_is_an_error_that_names_the_file(
    tmp_path: Path, document: dict[str, object]
) -> None:
    path = tmp_path / "t.pkl"
    path.write_bytes(pickle.dumps({"rewards": np.zeros((4, 2)), **document}))

    with pytest.raises(StoreError, match=r"t\.pkl is not a trajectory"):
        format_named("pkl", allow_pickle=True).read(path)


@pytest.mark.long
def test_tensors_of_bfloat16_are_kept(tmp_path: Path) -> None:
    import ml_dtypes

    one = Trajectory(arrays={"rewards": np.arange(8).reshape(4, 2).astype(ml_dtypes.bfloat16)}, environment="env")
    replay = buffer(tmp_path, False, trajectory_format="pt")
    replay.add(one)
    replay.save(tmp_path / "saved")
    same(stored(tmp_path / "saved")[0], one)


@pytest.mark.parametrize("auto_save", [False, True], ids=["in memory", "on disk"])
def test_a_checkpoint_is_of_one_moment_while_other_threads_draw_add_and_prune(
    tmp_path: Path, auto_save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    place_file = folder.place_file

    def placing(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(300)
        place_file(*arguments)

    monkeypatch.setattr(folder, "place_file", placing)
    replay_buffer = TrajectoryReplayBuffer(
        sample_window_size=4, auto_save=auto_save, auto_save_path=tmp_path / "buffer", max_trajectories=4
    )
    replay_buffer.add_trajectories(trajectory(number) for number in range(4))
    saving = threading.Thread(target=replay_buffer.save_checkpoint, args=(tmp_path / "saved",))
    drawn: list[list[int]] = []

    def work() -> None:
        replay_buffer.add_trajectories(trajectory(number) for number in range(4, 8))
        replay_buffer.flush()
        drawn.append(untorn(replay_buffer.sample(200), 32))

    working = threading.Thread(target=work)
    saving.start()
    try:
        assert begun.wait(300)
        working.start()
        working.join(300)
        assert not working.is_alive(), "who draws waits for the checkpoint"
    finally:
        go_on.set()
    saving.join(300)
    assert {row // 1000 for row in drawn[0]} == {4, 5, 6, 7}
    loaded = TrajectoryReplayBuffer(sample_window_size=0)
    loaded.load_checkpoint(tmp_path / "saved")
    assert loaded.trajectory_ids == [0, 1, 2, 3]
    assert {row // 1000 for row in untorn(loaded.sample(200), 32)} == {0, 1, 2, 3}
    replay_buffer.close()
    if auto_save:
        assert len(list((tmp_path / "buffer").glob("trajectory_*.npz"))) == 4, "what was pruned meanwhile is gone"


@both
@pytest.mark.parametrize("how", [{}, {"is_distributed": True, "local_rank": 1, "world_size": 2}], ids=["all", "rank"])
def test_saving_over_a_checkpoint_with_trajectories_that_were_not_loaded_is_refused(
    tmp_path: Path, auto_save: bool, how: dict[str, Any]
) -> None:
    whole = buffer(tmp_path / "whole", False, sample_window_size=0)
    whole.add_trajectories([trajectory(n) for n in range(30)])
    whole.save(tmp_path / "saved")
    bound = {"max_trajectories": 10} if auto_save else {"sample_window_size": 10}
    with buffer(tmp_path, auto_save, **bound) as replay:
        replay.load_checkpoint(tmp_path / "saved", **how)
        replay.add(trajectory(40))
        with pytest.raises(StoreError, match=r"contains 20 trajectories .*did not load.*another directory"):
            replay.save(tmp_path / "saved" / ".." / "saved")
        replay.save(tmp_path / "elsewhere")
    assert len(stored(tmp_path / "saved")) == 30
    assert len(stored(tmp_path / "elsewhere")) == 10
    whole.load(tmp_path / "saved")
    whole.add(trajectory(40))
    whole.save(tmp_path / "saved")
    assert len(stored(tmp_path / "saved")) == 31


def test_a_trajectory_that_cannot_be_linked_or_read_is_named_and_not_its_copy(tmp_path: Path) -> None:
    source = tmp_path / "trajectory"
    source.mkdir()
    with pytest.raises(StoreError, match=r"trajectory cannot be read \(Is a directory\)"):
        folder.place_file(tmp_path / "copy", source, format_named("npz"))

"""Saved trajectory buffers from the command line: shown, merged, split."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.pipeline.command_line.cli import main
from tests.support.trajectory_batches import foreign, trajectory, untorn


def saved(directory: Path, *numbers: int, at: int | None = None, **settings: Any) -> Path:
    buffer = TrajectoryReplayBuffer(**settings)
    for place, number in enumerate(numbers):
        buffer.add(trajectory(number), at=None if at is None else (at, place))
    buffer.save(directory)
    return directory


def ids(directory: Path) -> set[int]:
    buffer = TrajectoryReplayBuffer(allow_pickle=True)
    buffer.load(directory)
    return {row // 1000 for _ in range(20) for row in untorn(buffer.sample(8), 8)}


def told(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    assert main(["trajectories", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_directory_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    actual = told(capsys, "show", saved(tmp_path / "a", 0, 1, at=3, seed=5))
    assert (actual["trajectories"], actual["samples"], actual["next_id"], actual["seed"]) == (2, 16, 2, 5)
    assert (actual["formats"], actual["position"]) == ({"npz": 2}, {"3": 2})
    assert actual["arrays"]["curr_obs/state"] == {"dtype": "<i4", "shape": [3]}
    assert main(["trajectories", "show", str(tmp_path / "a")]) == 0
    assert "2 trajectories, 16 samples" in capsys.readouterr().out


def test_damaged_files_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = saved(tmp_path / "a", 0, 1, 2)
    assert told(capsys, "show", directory, "--check")["damaged"] == []
    (directory / "trajectory_0_w.npz").unlink()
    whole = bytearray((directory / "trajectory_1_w.npz").read_bytes())
    whole[len(whole) // 2] ^= 255
    (directory / "trajectory_1_w.npz").write_bytes(whole)
    actual = told(capsys, "show", directory, "--check", code=1)["damaged"]
    assert [str(directory / f"trajectory_{n}_w.npz") in text for n, text in enumerate(actual)] == [True, True]


def test_ranks_are_merged_and_split_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "ranks" / "rank_0", 0, 2, 4, at=0)
    saved(tmp_path / "ranks" / "rank_1", 1, 3, at=1)
    saved(tmp_path / "ranks" / "rank_2", 5)
    merged = told(capsys, "merge", tmp_path / "ranks", "--into", tmp_path / "whole")
    assert (merged["merged"], merged["trajectories"], merged["next_id"]) == (3, 6, 6)
    assert merged["position"] == {"0": 3, "1": 2}
    buffer = TrajectoryReplayBuffer(sample_window_size=2)
    buffer.load(tmp_path / "whole")
    # By id, then by rank: 0 1 5, 2 3, 4.
    assert {row // 1000 for _ in range(20) for row in untorn(buffer.sample(8), 8)} == {3, 4}

    parts = told(capsys, "split", tmp_path / "whole", "--into", tmp_path / "parts", "--parts", 4)
    assert [part["trajectories"] for part in parts] == [2, 2, 1, 1]
    assert ids(tmp_path / "parts" / "rank_0") == {0, 1}
    assert ids(tmp_path / "parts" / "rank_3") == {4}
    told(capsys, "merge", tmp_path / "parts", "--into", tmp_path / "again")
    assert ids(tmp_path / "again") == ids(tmp_path / "whole") == {0, 1, 2, 3, 4, 5}


def test_a_missing_rank_is_named_and_left_out_only_if_the_others_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {number: saved(tmp_path / "ranks" / f"rank_{number}", number) for number in (0, 1, 3, 10)}
    assert main(["trajectories", "merge", str(tmp_path / "ranks"), "--into", str(tmp_path / "whole")]) == 2
    err = capsys.readouterr().err
    assert "has no rank_2, rank_4, rank_5, rank_6, rank_7 and 2 more, but 4 others up to rank_10" in err
    assert not (tmp_path / "whole").exists()
    told(capsys, "merge", *ranks.values(), "--into", tmp_path / "listed")
    assert ids(tmp_path / "listed") == {0, 1, 3, 10}
    for number in (2, *range(4, 10)):
        saved(tmp_path / "ranks" / f"rank_{number}", number)
    assert told(capsys, "merge", tmp_path / "ranks", "--into", tmp_path / "whole")["merged"] == 11
    buffer = TrajectoryReplayBuffer(sample_window_size=1)
    buffer.load(tmp_path / "whole")
    assert {row // 1000 for row in untorn(buffer.sample(8), 8)} == {10}, "by rank as a number"


def test_files_in_place_of_directories_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, source = tmp_path / "file", str(saved(tmp_path / "a", 0))
    file.write_text("no directory")
    for words, message in (
        (("show", str(file)), "cannot be read (Not a directory)"),
        (("show", str(file / "below")), "cannot be read (Not a directory)"),
        (("merge", str(file), "--into", str(tmp_path / "b")), "cannot be read (Not a directory)"),
        (("merge", source, "--into", str(file)), "is a file; give a new directory"),
        (("split", source, "--parts", "2", "--into", str(file)), "is a file; give a new directory"),
    ):
        assert main(["trajectories", *words]) == 2
        err = capsys.readouterr().err
        assert (err.count("\n"), message in err) == (1, True), err
    assert file.read_text() == "no directory"


def test_the_oldest_are_split_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = saved(tmp_path / "whole", 0, 1, 2, 3, at=0)
    [part] = told(capsys, "split", whole, "--into", tmp_path / "part", "--first", 3)
    assert (part["trajectories"], part["next_id"], part["position"]) == (3, 3, {})
    assert ids(tmp_path / "part") == {0, 1, 2}
    assert ids(whole) == {0, 1, 2, 3}
    assert main(["trajectories", "split", str(whole), "--into", str(tmp_path / "x"), "--first", "5"]) == 2
    assert "give 1 to 4" in capsys.readouterr().err


def test_merging_buffers_at_different_log_positions_leaves_no_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = saved(tmp_path / "a", 0, at=0), saved(tmp_path / "b", 1, 2, at=0)
    assert main(["trajectories", "merge", str(one), str(other), "--into", str(tmp_path / "c"), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["position"] == {}
    assert "different offsets of partition 0" in output.err


def test_an_impossible_merge_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = saved(tmp_path / "a", 0)
    buffer = TrajectoryReplayBuffer()
    bare = trajectory(1)
    del bare.arrays["dones"]
    buffer.add(bare)
    buffer.save(tmp_path / "b")
    assert main(["trajectories", "merge", str(one), str(tmp_path / "b"), "--into", str(tmp_path / "c")]) == 2
    assert "dones is missing" in capsys.readouterr().err
    assert main(["trajectories", "merge", str(one), "--into", str(one)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["trajectories", "show", str(tmp_path / "nowhere")]) == 2
    assert "contains no checkpoint" in capsys.readouterr().err


def test_pickles_of_rlinf_are_merged_if_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = trajectory(3)
    foreign(tmp_path / "theirs" / "rank_0", {0: dict(original.arrays)})
    ours = saved(tmp_path / "ours", 4)
    arguments = ["merge", str(tmp_path / "theirs"), str(ours), "--into", str(tmp_path / "whole")]
    assert main(["trajectories", *arguments]) == 2
    assert "--allow-pickle" in capsys.readouterr().err
    assert told(capsys, *arguments, "--allow-pickle")["formats"] == {"pkl": 1, "npz": 1}
    assert ids(tmp_path / "whole") == {3, 4}

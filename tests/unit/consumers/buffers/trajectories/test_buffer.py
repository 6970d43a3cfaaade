"""Trajectories that a buffer takes and refuses, its samples, and its place in the log, in memory and on disk."""

import inspect
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.trajectories.buffer import NothingToSample, TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.formats import format_named
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.records import EpisodeSpan, RolloutMetadata
from rollstream.topics.wire.trajectory_arrays import Trajectory
from tests.support.trajectory_batches import same, trajectory, untorn
from tests.support.trajectory_buffers import both, buffer

CHI_SQUARE_15_AT_1_IN_10000 = 44.3


def test_names_and_defaults_are_those_of_the_documents() -> None:
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
    with buffer(tmp_path, auto_save, cache_size=2) as replay:
        assert not replay.is_ready(1)
        assert replay.add_trajectories([trajectory(0), trajectory(1, steps=5), trajectory(2)]) == 3
        cached = 2 if auto_save else 3
        assert replay.get_stats() == {"num_trajectories": 3, "total_samples": 26, "cache_size": cached}
        assert (len(replay), replay.size(), replay.trajectory_counter, replay.trajectory_ids) == (3, 26, 3, [0, 1, 2])
        assert replay.is_ready(3)
        assert not replay.is_ready(4)


def test_a_trajectory_without_log_probabilities_and_rewards_is_skipped_and_takes_no_id() -> None:
    replay_buffer = TrajectoryReplayBuffer()
    bare = Trajectory(arrays={"actions": np.zeros((4, 2, 3), "<f4")}, environment="env")
    assert replay_buffer.add_trajectories([bare]) == 0
    assert not replay_buffer.add(bare, at=(1, 6))
    assert replay_buffer.add(trajectory(0), at=(1, 7))
    assert (replay_buffer.trajectory_ids, replay_buffer.position, replay_buffer.stats()["without_rewards"]) == (
        [0],
        {1: 8},
        2,
    )


def test_the_shape_is_that_of_log_probabilities_else_of_rewards() -> None:
    replay_buffer = TrajectoryReplayBuffer()
    replay_buffer.add(Trajectory(arrays={"rewards": np.zeros((3, 2, 5), "<f4")}))
    assert replay_buffer.total_samples == 6


@both
def test_arrays_are_copied(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, enable_cache=False) as replay:
        mine = trajectory(3)
        replay.add(mine)
        mine.arrays["rewards"][:] = -1
        mine.arrays["curr_obs"]["state"][:] = -1
        assert set(untorn(replay.sample(8), 8)) <= set(range(3000, 3008))


@both
def test_an_invalid_trajectory_leaves_nothing_of_its_call(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save) as replay:
        short = trajectory(1)
        short.arrays["curr_obs"]["state"] = np.zeros((3, 2, 3), "<i4")
        with pytest.raises(RecordError, match=r"curr_obs/state has shape \(3, 2, 3\), which must begin with \[4, 2\]"):
            replay.add_trajectories([trajectory(0), short])
        with pytest.raises(RecordError, match="has shape"):
            replay.add(short, at=(0, 4))
        assert (len(replay), replay.position, replay.trajectory_counter) == (0, {}, 0)


@both
@pytest.mark.parametrize("kind", ["npz", "pkl"])
def test_numbers_of_numpy_in_the_fields_are_numbers(tmp_path: Path, auto_save: bool, kind: str) -> None:
    number: Any = np.int64
    numbers = {
        "policy_version": number(7),
        "max_episode_length": np.int32(80),
        "metadata": RolloutMetadata(weight_step=number(3)),
        "episodes": (EpisodeSpan(uid="e", column=number(1), start=number(0), stop=number(4)),),
    }
    with buffer(tmp_path / "b", auto_save, trajectory_format=kind, allow_pickle=True) as replay:
        assert replay.add(trajectory(0, **numbers))
        replay.save_checkpoint(tmp_path / "saved")
    [path] = (tmp_path / "saved").glob(f"trajectory_0_*.{kind}")
    stored = format_named(kind, allow_pickle=True).read(path)
    same(stored, trajectory(0, **numbers))
    assert type(stored.policy_version) is type(stored.max_episode_length) is type(stored.episodes[0].stop) is int


@both
@pytest.mark.parametrize(
    "field",
    [
        {"extra": {"note": object()}},
        {"uid": "\ud800"},
        {"model_weights_id": "\udfff"},
        {"policy_version": np.zeros(2)},
        {"metadata": {"worker_id": "w"}},
    ],
)
def test_a_field_that_no_file_can_hold_is_refused_and_later_trajectories_are_added(
    tmp_path: Path, auto_save: bool, field: dict[str, Any]
) -> None:
    with buffer(tmp_path, auto_save) as replay:
        with pytest.raises(RecordError, match=r"cannot be written as JSON.*give numbers and texts"):
            replay.add(trajectory(0, **field))
        assert replay.add(trajectory(1))
        replay.flush()
        assert len(replay) == 1


def test_other_arrays_than_those_in_the_buffer_are_refused_by_name() -> None:
    replay_buffer = TrajectoryReplayBuffer()
    replay_buffer.add(trajectory(0))
    replay_buffer.add(trajectory(2))
    other = trajectory(1)
    del other.arrays["dones"]
    other.arrays["versions"] = np.zeros((4, 2), "<i8")
    other.arrays["rewards"] = other.arrays["rewards"].astype("<f8")
    with pytest.raises(RecordError) as raised:
        replay_buffer.add(other)
    for text in ("dones is missing", "versions is new", "rewards has rows <f8 [] instead of <f4 []"):
        assert text in str(raised.value)
    replay_buffer.clear()
    assert replay_buffer.add(other)


def odd(number: int) -> Trajectory:
    made = trajectory(number)
    made.arrays["surprise"] = np.zeros((4, 2), "<i8")  # type: ignore[index]
    return made


@both
def test_a_single_first_trajectory_of_another_kind_does_not_decide_the_arrays(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save) as replay:
        assert replay.add(odd(0), at=(0, 0))
        assert replay.add(trajectory(1), at=(0, 1))
        assert replay.add(trajectory(2), at=(0, 2))
        with pytest.raises(RecordError, match="surprise is new"):
            replay.add(odd(3), at=(0, 3))
        assert replay.trajectory_ids == [1, 2]
        assert {row // 1000 for row in untorn(replay.sample(64), 16)} <= {1, 2}
    if auto_save:
        with buffer(tmp_path, auto_save) as again:
            assert again.trajectory_ids == [1, 2]
            assert again.add(trajectory(4))


@both
def test_with_like_only_trajectories_of_its_arrays_are_accepted(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, like=trajectory(9)) as replay:
        with pytest.raises(RecordError, match="surprise is new"):
            replay.add(odd(0))
        assert replay.add(trajectory(1))
        with pytest.raises(RecordError, match="surprise is new"):
            replay.add(odd(2))
        assert replay.trajectory_ids == [0]
    if auto_save:
        with pytest.raises(ConfigurationError, match=r"surprise is missing.*or give another `like`"):
            buffer(tmp_path, auto_save, like=odd(0))


@pytest.mark.parametrize(
    "settings", [{"sample_window_size": -1}, {"max_bytes": -1}, {"trajectory_format": "xml"}, {"max_pending_bytes": 0}]
)
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TrajectoryReplayBuffer(**settings)


def test_auto_save_needs_a_path() -> None:
    with pytest.raises(ConfigurationError, match="auto_save_path"):
        TrajectoryReplayBuffer(auto_save=True)


def test_pickle_must_be_allowed_explicitly() -> None:
    with pytest.raises(ConfigurationError, match="allow_pickle=True"):
        TrajectoryReplayBuffer(trajectory_format="pkl")
    assert TrajectoryReplayBuffer(trajectory_format="pkl", allow_pickle=True).trajectory_format == "pkl"


@both
def test_a_row_is_the_same_step_of_the_same_environment_in_every_array(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, cache_size=2) as replay:
        replay.add_trajectories([trajectory(n, steps=2 + n, width=3) for n in range(4)])
        seen = {row for _ in range(40) for row in untorn(replay.sample(20), 20)}
    assert seen == {n * 1000 + row for n in range(4) for row in range((2 + n) * 3)}


@both
def test_draws_equal_those_of_a_plain_computation_in_order(tmp_path: Path, auto_save: bool) -> None:
    from rollstream.consumers.buffers.storage.seeded_draws import generator_at

    with buffer(tmp_path, auto_save, seed=5, sample_window_size=3) as replay:
        replay.add_trajectories([trajectory(n, steps=2 + n) for n in range(5)])
        rows = [n * 1000 + row for n in range(2, 5) for row in range((2 + n) * 2)]
        for draw in range(3):
            expected = [rows[int(u * len(rows))] for u in generator_at(5, draw).random(10)]
            assert untorn(replay.sample(10), 10) == expected


@both
def test_the_flags_of_a_step_are_those_after_it(tmp_path: Path, auto_save: bool) -> None:
    """T=4, B=1, dones 0..5, two parts: 1, 2, 4, 5."""
    arrays = {"rewards": np.arange(4.0).reshape(4, 1), "dones": np.arange(6).reshape(6, 1)}
    with buffer(tmp_path, auto_save, enable_cache=False) as replay:
        replay.add(Trajectory(arrays=arrays))
        replay.flush()
        sample = replay.sample(4)
        while len(set(sample["rewards"])) < 4:
            more = replay.sample(4)
            sample = {name: np.concatenate([sample[name], more[name]]) for name in sample}
    assert dict(zip(sample["rewards"], sample["dones"], strict=True)) == {0.0: 1, 1.0: 2, 2.0: 4, 3.0: 5}


def test_flags_that_fit_no_equal_parts_are_refused() -> None:
    arrays = {"rewards": np.zeros((3, 1)), "dones": np.zeros((5, 1), bool)}
    with pytest.raises(RecordError, match="dones: 5 rows of flags for 3 steps"):
        TrajectoryReplayBuffer().add(Trajectory(arrays=arrays))


def test_an_empty_buffer_and_a_sample_of_less_than_one_are_errors() -> None:
    replay_buffer = TrajectoryReplayBuffer()
    with pytest.raises(NothingToSample):
        replay_buffer.sample(3)
    with pytest.raises(ConfigurationError):
        replay_buffer.sample(0)
    replay_buffer.add(trajectory(0))
    with pytest.raises(ConfigurationError):
        replay_buffer.sample(-1)


@both
def test_a_sample_has_no_more_rows_than_the_window_has_steps(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, sample_window_size=2) as replay:
        replay.add_trajectories([trajectory(n) for n in range(5)])
        assert set(untorn(replay.sample(1000), 16)) <= {*range(3000, 3008), *range(4000, 4008)}
        assert (replay.window_samples, replay.size(), replay.stats()["window_samples"]) == (16, 16, 16)
        stored = 40 if auto_save else 16
        assert (replay.total_samples, replay.get_stats()["total_samples"]) == (stored, stored), "as in what is saved"
        replay.save_checkpoint(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "metadata.json").read_text())["total_samples"] == stored


@both
def test_a_window_of_zero_is_everything(tmp_path: Path, auto_save: bool) -> None:
    with buffer(tmp_path, auto_save, sample_window_size=0) as replay:
        replay.add_trajectories([trajectory(n) for n in range(120)])
        assert replay.total_samples == 960
        assert len({row // 1000 for row in untorn(replay.sample(900), 900)}) > 100


def test_in_memory_trajectories_outside_the_window_are_not_counted() -> None:
    replay_buffer = TrajectoryReplayBuffer(sample_window_size=3)
    replay_buffer.add_trajectories([trajectory(n) for n in range(10)])
    assert replay_buffer.get_stats() == {"num_trajectories": 3, "total_samples": 24, "cache_size": 3}
    assert replay_buffer.trajectory_ids == [7, 8, 9]


def test_draws_are_uniform_over_steps_not_over_trajectories() -> None:
    replay_buffer = TrajectoryReplayBuffer(seed=11)
    replay_buffer.add_trajectories([trajectory(0, steps=1), trajectory(1, steps=5), trajectory(2, steps=2)])
    counts = Counter(row for _ in range(1000) for row in untorn(replay_buffer.sample(16), 16))
    assert len(counts) == 16
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < CHI_SQUARE_15_AT_1_IN_10000


def test_drawing_is_with_replacement() -> None:
    replay_buffer = TrajectoryReplayBuffer()
    replay_buffer.add(trajectory(0))
    assert any(len(set(untorn(replay_buffer.sample(8), 8))) < 8 for _ in range(10))


def test_two_buffers_of_a_seed_draw_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    one, other = buffer(tmp_path, False, seed=3), buffer(tmp_path, True, seed=3, cache_size=2)
    for replay in (one, other):
        replay.add_trajectories([trajectory(n, steps=n + 1) for n in range(6)])
    with other:
        for _ in range(3):
            assert untorn(one.sample(7), 7) == untorn(other.sample(7), 7)


@both
def test_the_position_moves_with_each_addition_and_records_below_it_are_skipped(
    tmp_path: Path, auto_save: bool
) -> None:
    with buffer(tmp_path, auto_save) as replay:
        assert replay.position == {}
        assert replay.add(trajectory(0), at=(0, 5))
        assert replay.add(trajectory(1), at=(2, 0))
        assert not replay.add(trajectory(0), at=(0, 5))
        assert not replay.add(trajectory(2), at=(0, 4))
        replay.skip((0, 6))
        replay.skip((0, 3))
        assert not replay.add(trajectory(3), at=(0, 6))
        assert replay.add(trajectory(4), at=(0, 9))
        assert (dict(replay.position), replay.trajectory_ids) == ({0: 10, 2: 1}, [0, 1, 2])


def test_a_reopened_directory_has_content_position_and_random_state(tmp_path: Path) -> None:
    with buffer(tmp_path, True, seed=9) as replay:
        replay.add(trajectory(0), at=(0, 0))
        replay.skip((0, 1))
        replay.add(trajectory(1), at=(1, 4))
        replay.add(trajectory(2))
        replay.sample(3)
        replay.flush()
        expected = untorn(replay.sample(8), 8)
    # Only close has flushed since that draw.
    with buffer(tmp_path, True) as again:
        assert (dict(again.position), again.trajectory_ids, again.seed) == ({0: 2, 1: 5}, [0, 1, 2], 9)
        assert again.stats()["draws"] == 2
        plain = TrajectoryReplayBuffer(9)
        plain.add_trajectories([trajectory(number) for number in range(3)])
        plain.sample(3)
        assert untorn(plain.sample(8), 8) == expected
        assert untorn(again.sample(8), 8) == untorn(plain.sample(8), 8), "the third draw"
        assert again.add(trajectory(3), at=(0, 2))
        assert again.trajectory_ids == [0, 1, 2, 3]


@both
def test_adding_works_after_close(tmp_path: Path, auto_save: bool) -> None:
    replay = buffer(tmp_path, auto_save)
    replay.add(trajectory(0))
    replay.close()
    replay.close()
    assert set(untorn(replay.sample(8), 8)) <= set(range(8))
    replay.add(trajectory(1))
    replay.close()
    if auto_save:
        with buffer(tmp_path, True) as again:
            assert again.trajectory_ids == [0, 1]


def test_fields_of_a_trajectory_need_no_environment_by_hand() -> None:
    assert TrajectoryReplayBuffer().add(replace(trajectory(0), environment=""))


@both
def test_rewards_of_one_dimension_are_a_record_error_and_nothing_is_added(tmp_path: Path, auto_save: bool) -> None:
    for rewards in (np.zeros(4), np.float32(1), [0.0, 1.0]):
        unsound = Trajectory(arrays={"rewards": rewards}, environment="env", uid="flat")
        with buffer(tmp_path, auto_save) as replay:
            with pytest.raises(RecordError, match=r"'flat'.*rewards has shape .* must be \[T, B, \.\.\.\]"):
                replay.add(unsound)
            with pytest.raises(RecordError, match=r"rewards has shape"):
                _ = unsound.shape
            assert len(replay) == 0


@both
def test_none_means_a_missing_array_and_a_plain_dict_is_a_trajectory(tmp_path: Path, auto_save: bool) -> None:
    whole = trajectory(3)
    plain = {
        **whole.arrays,
        "prev_values": None,
        "next_obs": {"state": None},
        "model_weights_id": "w",
        "max_episode_length": 80,
        "versions": None,
    }
    with buffer(tmp_path, auto_save) as replay:
        assert replay.add_trajectories([whole, replace(whole, arrays=plain_arrays(plain)), plain]) == 3
        assert replay.add(plain)
        assert len(replay) == 4
        assert set(untorn(replay.sample(200), 32)) <= set(range(3000, 3008))
        for wrong in (7, {"arrays": {"rewards": whole.arrays["rewards"]}, "uuid": "x"}):
            with pytest.raises(RecordError, match="is not a trajectory"):
                replay.add_trajectories([wrong])  # type: ignore[list-item]


def plain_arrays(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in ("model_weights_id", "max_episode_length")}


def test_records_of_several_partitions_in_another_order_give_the_same_content_if_there_is_room(
    tmp_path: Path,
) -> None:
    """An unbounded buffer has the same trajectories, a bounded one those that came last, as documented."""
    records = [(partition, offset, trajectory(10 * partition + offset)) for partition in (0, 1) for offset in range(3)]
    held: dict[int, list[set[int]]] = {0: [], 2: []}
    for order in (records, sorted(records, key=lambda record: record[1])):
        for bound, actual in held.items():
            with TrajectoryReplayBuffer(sample_window_size=bound) as replay_buffer:
                for partition, offset, item in order:
                    replay_buffer.add(item, at=(partition, offset))
                assert dict(replay_buffer.position) == {0: 3, 1: 3}
                actual.append({row // 1000 for row in replay_buffer.sample(2000)["rewards"].astype(int).tolist()})
    assert held == {0: [{0, 1, 2, 10, 11, 12}] * 2, 2: [{11, 12}, {2, 12}]}

"""Chunk steps become trajectories: rows in order, episodes under one uid, flags with their bootstrap rows, and records
that fit."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.producers.trajectories.collector import ChunkStepResult, TrajectoryCollector
from rollstream.topics.errors import ConfigurationError, RecordError, RecordTooLarge
from rollstream.topics.records import EpisodeSpan
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.trajectory_arrays import Trajectory, aligned, to_record


def step(number: int, done: tuple[int, ...] = (0, 0), **changes: Any) -> ChunkStepResult:
    """Step `number`, whose values tell number and column."""
    width = len(done)
    here = number + np.arange(width) / 10
    values: dict[str, Any] = {
        "actions": here.astype(np.float32),
        "rewards": here,
        "terminations": np.array(done, bool),
        "truncations": np.zeros(width, bool),
        "curr_obs": {"state": np.stack([here, -here], axis=1)},
        "versions": np.full(width, 3 + number),
    }
    return ChunkStepResult(**(values | changes))


def collector(width: int = 2, **changes: Any) -> TrajectoryCollector:
    return TrajectoryCollector("cart", width, **({"worker_id": "w0", "steps": 3, "incarnation": "i"} | changes))


def collect(collecting: TrajectoryCollector, *steps: ChunkStepResult) -> list[Trajectory]:
    return [trajectory for one in steps if (trajectory := collecting.add(one)) is not None]


def test_a_trajectory_has_the_rows_of_its_steps_in_order() -> None:
    collecting = collector()
    first, second = collect(collecting, *map(step, range(7)))
    assert first.shape == second.shape == (3, 2)
    np.testing.assert_array_equal(first.arrays["rewards"], [[0, 0.1], [1, 1.1], [2, 2.1]])
    np.testing.assert_array_equal(second.arrays["curr_obs"]["state"][2], [[5, -5], [5.1, -5.1]])
    assert first.arrays["actions"].dtype == np.float32
    assert (first.policy_version, second.policy_version) == (3, 6)
    assert (first.environment, first.metadata.worker_id) == ("cart", "w0")
    assert first.uid != second.uid
    assert collecting.pending == 1
    assert not first.problems()


def test_an_environment_may_reuse_its_arrays() -> None:
    collecting, buffer = collector(), np.zeros(2)
    for number in range(2):
        buffer[:] = number
        assert collecting.add(step(number, rewards=buffer, terminations=buffer > 5)) is None
    buffer[:] = 9
    trajectory = collecting.add(step(2, rewards=np.array([2.0, 2.0])))
    assert trajectory is not None
    np.testing.assert_array_equal(trajectory.arrays["rewards"][:, 0], [0, 1, 2])
    trajectory.arrays["dones"][...] = True
    following = collecting.finish() or collect(collecting, *map(step, range(3)))[0]
    assert not following.arrays["dones"].any(), "the bootstrap row is no view of what was handed out"


def test_episodes_have_their_rows_and_go_on_under_their_uid() -> None:
    collecting = collector()
    first, second = collect(
        collecting, *(step(n, done) for n, done in enumerate([(0, 0), (1, 0), (0, 0), (0, 1), (0, 0)])), step(5)
    )
    assert first.episodes == (
        EpisodeSpan(uid="i-0", column=0, start=0, stop=2, begin=0),
        EpisodeSpan(uid="i-2", column=0, start=2, stop=3, begin=0, last=False),
        EpisodeSpan(uid="i-1", column=1, start=0, stop=3, begin=0, last=False),
    )
    assert second.episodes == (
        EpisodeSpan(uid="i-2", column=0, start=0, stop=3, begin=1, first=False, last=False),
        EpisodeSpan(uid="i-1", column=1, start=0, stop=1, begin=3, first=False),
        EpisodeSpan(uid="i-3", column=1, start=1, stop=3, begin=0, last=False),
    )


def test_spans_count_the_steps_of_their_episode_in_all_trajectories_before() -> None:
    collecting = collector(1)
    parts = [*collect(collecting, *(step(n, (n == 1,)) for n in range(10))), collecting.finish()]
    spans = [span for part in parts if part is not None for span in part.episodes]
    assert [(span.uid, span.begin) for span in spans] == [("i-0", 0), ("i-1", 0), ("i-1", 1), ("i-1", 4), ("i-1", 7)]
    assert not any(part.problems() for part in parts if part is not None)


def test_the_control_mode_of_an_episode_is_that_of_its_first_step() -> None:
    modes = [(0, 1), (1, 0), (1, 1), (0, 0)]
    collecting = collector(steps=4)
    [trajectory] = collect(collecting, *(step(n, (n == 1, 0), control_modes=np.array(m)) for n, m in enumerate(modes)))
    assert [(s.column, s.start, s.control_mode) for s in trajectory.episodes] == [(0, 0, 0), (0, 2, 1), (1, 0, 1)]
    # The control mode stays the same while the episode continues.
    [following] = collect(collecting, *(step(n, control_modes=0) for n in range(4)))
    assert [(s.column, s.control_mode, s.first) for s in following.episodes] == [(0, 1, False), (1, 1, False)]


def test_a_bootstrap_row_heads_each_part_with_the_flags_before_it() -> None:
    ends = [(1, 0), (0, 1), (1, 1), (0, 0)]
    collecting = collector(steps=4, bootstrap_rows=2)
    [trajectory] = collect(collecting, *(step(n, done) for n, done in enumerate(ends)))
    for name in ("dones", "terminations"):
        flags = trajectory.arrays[name]
        np.testing.assert_array_equal(flags, [(0, 0), ends[0], ends[1], ends[1], ends[2], ends[3]])
        np.testing.assert_array_equal(aligned(flags, 4), ends)
    assert not trajectory.arrays["truncations"].any()
    assert trajectory.arrays["truncations"].shape == (6, 2)


def test_a_chunk_of_several_actions_ends_an_episode_wherever_it_was_done() -> None:
    collecting = collector(steps=2)
    done = np.array([[False, True, False], [False, False, False]])
    chunks = [
        step(n, dones=done if n == 0 else ~done[::-1] & False, terminations=None, truncations=None) for n in (0, 1)
    ]
    [trajectory] = collect(collecting, *chunks)
    assert [(s.column, s.start, s.stop, s.last) for s in trajectory.episodes] == [
        (0, 0, 1, True),
        (0, 1, 2, False),
        (1, 0, 2, False),
    ]
    assert trajectory.arrays["dones"].shape == (3, 2, 3)


def test_dones_are_what_was_terminated_or_truncated_unless_they_are_given() -> None:
    collecting = collector(1, steps=1, bootstrap_rows=0)
    cut = collecting.add(step(0, (0,), truncations=np.array([True])))
    assert cut is not None
    assert cut.arrays["dones"].tolist() == [[True]]
    given = collecting.add(step(1, (0,), truncations=np.array([True]), dones=np.array([False])))
    assert given is not None
    assert given.arrays["dones"].tolist() == [[False]]


def test_the_end_of_a_worker_ends_its_episodes_without_a_flag() -> None:
    collecting = collector(steps=5, bootstrap_rows=5)
    assert collect(collecting, *(step(n, (n == 1, 0)) for n in range(2))) == []
    rest = collecting.finish()
    assert rest is not None
    assert rest.shape == (2, 2)
    assert rest.arrays["dones"].shape == (3, 2), "two steps cannot be parted by five"
    assert [(s.column, s.stop, s.last) for s in rest.episodes] == [(0, 2, True), (1, 2, True)]
    assert not aligned(rest.arrays["dones"], 2)[:, 1].any()
    assert collecting.finish() is None


def test_a_trajectory_is_named_after_the_weights_that_acted_first_and_the_lowest_version() -> None:
    versions = [np.array([5, -1]), np.array([4, 4]), np.array([6, 6])]
    steps = [step(n, versions=v, model_weights_id=f"w{n}") for n, v in enumerate(versions)]
    [trajectory] = collect(collector(), *steps)
    assert (trajectory.policy_version, trajectory.model_weights_id) == (4, "w0")
    human = [step(n, versions=np.array([-1, -1])) for n in range(3)]
    [trajectory] = collect(collector(), *human)
    assert trajectory.policy_version == -1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rewards": np.zeros(3)}, r"rewards has shape \(3,\)"),
        ({"actions": np.zeros(2, np.int64)}, "actions is int64 .* was float32"),
        ({"curr_obs": {"state": np.zeros((2, 3))}}, r"curr_obs/state is float64 \[2, 3\] and was float64 \[2, 2\]"),
        ({"curr_obs": {}}, "curr_obs/state is missing"),
        ({"prev_values": np.zeros(2)}, "prev_values is new"),
        ({"others": {"rewards": np.zeros(2)}}, "holds rewards; set the fields of these names"),
        ({"others": {"note": np.array(["a", None], object)}}, "note: .* objects"),
        ({"terminations": None, "truncations": None}, "none of dones, terminations and truncations"),
        ({"control_modes": 2}, "control_modes is 2"),
        ({"control_modes": np.array([0, 1, 0])}, "control_modes"),
        ({"control_modes": np.array([0.5, 1])}, "control_modes"),
    ],
)
def test_a_step_that_is_no_row_is_refused_by_name_and_leaves_no_trace(changes: dict[str, Any], why: str) -> None:
    collecting = collector()
    collecting.add(step(0))
    with pytest.raises(RecordError, match=why):
        collecting.add(step(1, **changes))
    [trajectory] = collect(collecting, step(1), step(2))
    np.testing.assert_array_equal(trajectory.arrays["rewards"][:, 0], [0, 1, 2])
    assert len(trajectory.episodes) == 2


def test_settings_that_make_no_trajectory_are_refused() -> None:
    for wrong in ({"width": 0}, {"steps": 0}, {"bootstrap_rows": 2}, {"bootstrap_rows": -1}):
        with pytest.raises(ConfigurationError):
            collector(**wrong)  # type: ignore[arg-type]


def test_a_step_that_no_record_has_room_for_is_refused_with_the_remedy() -> None:
    with pytest.raises(RecordTooLarge, match=r"run fewer environments.*kafka\.max_record_bytes"):
        collector(max_bytes=600).add(step(0))


@settings(max_examples=40)
@given(
    width=st.integers(1, 5),
    max_bytes=st.integers(1500, 20_000),
    parts=st.integers(0, 4),
    pixels=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_record_never_outgrows_its_limit_and_no_step_is_lost(
    width: int, max_bytes: int, parts: int, pixels: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    collecting = collector(width, steps=24, max_bytes=max_bytes, bootstrap_rows=parts, incarnation=None)
    steps = []
    for number in range(50):
        image = rng.integers(0, 255, (width, pixels), np.uint8)
        done = tuple(rng.random(width) < 0.4)
        steps.append(step(number, done, curr_obs={"image": image}, rewards=None, prev_logprobs=np.full(width, number)))
    try:
        trajectories = collect(collecting, *steps)
    except RecordTooLarge:
        return
    rest = collecting.finish()
    trajectories += [rest] if rest else []
    assert max(len(trajectory.arrays["prev_logprobs"]) for trajectory in trajectories) <= 24
    numbers = np.concatenate([trajectory.arrays["prev_logprobs"][:, 0] for trajectory in trajectories])
    np.testing.assert_array_equal(numbers, np.arange(50))
    rows: dict[str, int] = defaultdict(int)
    for trajectory in trajectories:
        assert len(encode(to_record(trajectory))) + len(encode_key("cart", "w0")) <= max_bytes
        for span in trajectory.episodes:
            rows[span.uid] += span.stop - span.start
    assert sum(rows.values()) == 50 * width, "every row of every column is of one episode"
    ends = sum(int(aligned(t.arrays["dones"], len(t.arrays["prev_logprobs"])).sum()) for t in trajectories)
    assert sum(span.last for t in trajectories for span in t.episodes) - ends <= width

"""Trajectories: any tree of arrays comes back from the wire as it was, and an invalid one is refused with a message."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.errors import RecordError
from rollstream.topics.records import EpisodeSpan, NamedArray, RolloutMetadata, TrajectoryRecord, same
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.trajectory_arrays import (
    Trajectory,
    aligned,
    flatten,
    from_record,
    map_leaves,
    nest,
    to_record,
)

_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=6)
_DTYPES = st.sampled_from(["|b1", "|u1", "<i8", "<f4", "<c8", "bfloat16"])


def leaf(dtype: str, trailing: tuple[int, ...] = (), rows: int = 4, width: int = 2) -> np.ndarray:
    """An array [rows, width, ...] of distinct small numbers."""
    from rollstream.topics.records.arrays import dtype_of

    shape = (rows, width, *trailing)
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype_of(dtype))


_LEAVES = st.builds(leaf, _DTYPES, st.lists(st.integers(0, 3), max_size=2).map(tuple))
_TREES = st.dictionaries(
    _NAMES, st.recursive(_LEAVES, lambda inner: st.dictionaries(_NAMES, inner, max_size=3), max_leaves=6), max_size=4
)


def trajectory(**changes: Any) -> Trajectory:
    """A sound trajectory of four steps of two environments."""
    arrays = {"rewards": leaf("<f4"), "curr_obs": {"image": leaf("|u1", (3, 3)), "state": leaf("<f8", (5,))}}
    return Trajectory(**{"environment": "cart", "uid": "t0", "arrays": arrays, **changes})


@given(_TREES)
def test_any_tree_of_arrays_comes_back_from_the_wire(tree: dict[str, Any]) -> None:
    sent = trajectory(
        arrays={**tree, "rewards": leaf("<f4")},
        policy_version=3,
        model_weights_id="w3",
        max_episode_length=80,
        episodes=(EpisodeSpan(uid="e", column=1, start=1, stop=3, control_mode=1, first=False, begin=7),),
        metadata=RolloutMetadata(worker_id="worker-1", timestamp=5.0),
        extra={"by": "hand"},
    )
    got = from_record(decode(encode(to_record(sent))))
    assert {path: (a.dtype, a.tobytes(), a.shape) for path, a in flatten(got.arrays).items()} == {
        path: (a.dtype, a.tobytes(), a.shape) for path, a in flatten(sent.arrays).items()
    }
    for name in ("uid", "environment", "policy_version", "model_weights_id", "max_episode_length"):
        assert getattr(got, name) == getattr(sent, name)
    assert (got.episodes, got.metadata, got.extra) == (sent.episodes, sent.metadata, sent.extra)


@given(_TREES)
def test_a_tree_is_its_leaves_by_path(tree: dict[str, Any]) -> None:
    leaves = flatten(tree)
    again = flatten(nest(leaves))
    assert list(again) == list(leaves)
    assert all(same(again[path], leaves[path]) for path in leaves)


def test_every_leaf_is_mapped_where_it_is() -> None:
    assert map_leaves(lambda x: x + 1, {"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 2, "b": {"c": 3, "d": {"e": 4}}}


@pytest.mark.parametrize("leaves", [{"a": 1, "a/b": 2}, {"a/b": 1, "a": 2}, {"a": 1, "a/b/c": 2}])
def test_a_path_through_an_array_is_refused(leaves: dict[str, int]) -> None:
    with pytest.raises(RecordError, match="is nested in another"):
        nest(leaves)


def test_the_shape_is_that_of_prev_logprobs_then_of_rewards_then_none() -> None:
    assert trajectory(arrays={"prev_logprobs": leaf("<f4", rows=3), "rewards": leaf("<f4")}).shape == (3, 2)
    assert trajectory().shape == (4, 2)
    assert trajectory(arrays={"actions": leaf("<f4")}).shape is None
    assert trajectory(arrays={"actions": leaf("<f4")}).problems() == []


@pytest.mark.parametrize(
    ("rows", "steps", "kept"),
    [(4, 4, [0, 1, 2, 3]), (5, 4, [1, 2, 3, 4]), (6, 4, [1, 2, 4, 5]), (8, 4, [1, 3, 5, 7]), (2, 1, [1])],
)
def test_the_first_row_of_each_part_is_a_bootstrap_row(rows: int, steps: int, kept: list[int]) -> None:
    flags = np.arange(rows)[:, None] * np.ones((1, 3), int)
    assert aligned(flags, steps).tolist() == flags[kept].tolist()


@pytest.mark.parametrize(("rows", "steps"), [(5, 3), (3, 4), (13, 6)])
def test_steps_that_cannot_be_parted_into_equal_parts_are_refused(rows: int, steps: int) -> None:
    with pytest.raises(RecordError, match="bootstrap row"):
        aligned(np.zeros((rows, 1)), steps)


def _span(**changes: Any) -> EpisodeSpan:
    return EpisodeSpan(**{"uid": "e", "column": 0, "start": 0, "stop": 4, **changes})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"uid": ""}, "uid has 0 characters"),
        ({"environment": "x" * 513}, "environment has 513 characters"),
        ({"arrays": {}}, "no array has a shape"),
        ({"arrays": {"rewards": np.zeros(4)}}, r"rewards has shape \(4,\)"),
        ({"arrays": {"rewards": np.zeros((0, 2))}}, "hold nothing"),
        ({"arrays": {"rewards": leaf("<f4"), "x": leaf("<f4", rows=5)}}, r"x has shape \(5, 2\)"),
        ({"arrays": {"rewards": leaf("<f4"), "dones": leaf("|b1", rows=7)}}, "dones: 7 rows"),
        ({"arrays": {"rewards": leaf("<f4"), "dones": leaf("|b1", width=3)}}, r"dones has shape \(4, 3\)"),
        ({"arrays": {"a/b": leaf("<f4")}}, "'a/b' is not an array's name"),
        ({"episodes": (_span(uid=""),)}, "its uid"),
        ({"episodes": (_span(column=2),)}, "are not within"),
        ({"episodes": (_span(stop=5),)}, "are not within"),
        ({"episodes": (_span(start=2, stop=2),)}, "are not within"),
        ({"episodes": (_span(stop=3), _span(uid="f", start=2))}, "overlap"),
        ({"episodes": (_span(control_mode=2),)}, "control mode is 2"),
        ({"episodes": (_span(begin=-2),)}, "has -2 steps before them"),
        ({"episodes": (_span(begin=2**63 - 1),)}, "steps before them, which must be 0 to"),
    ],
)
def test_invalid_trajectories_are_refused_by_the_writer(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RecordError, match=wrong):
        to_record(trajectory(**changes))


def test_invalid_trajectories_are_refused_by_the_reader() -> None:
    record = TrajectoryRecord(uid="t", environment="cart", arrays={"rewards": NamedArray.of(np.zeros((0, 2), "<f4"))})
    with pytest.raises(RecordError, match="trajectory 't' of 'cart': 0 steps"):
        from_record(decode(encode(record)))
    huge = TrajectoryRecord(
        uid="t", environment="cart", arrays={"rewards": NamedArray(dtype="<f4", shape=(2**40, 2**30), data=b"")}
    )
    with pytest.raises(RecordError, match="has 0 bytes"):
        from_record(decode(encode(huge)))


NAMED = NamedArray.of(np.zeros((2, 1), "<f4"))
HOSTILE = {
    "65 dimensions": {"rewards": NamedArray(dtype="<f4", shape=(1,) * 65, data=bytes(4))},
    "an empty huge dimension": {"rewards": NAMED, "x": NamedArray(dtype="<f4", shape=(2, 1, 2**62, 0), data=b"")},
    "texts of no width": {"rewards": NAMED, "x": NamedArray(dtype="<U", shape=(2, 1), data=b"")},
    "a dtype of no sense": {
        "rewards": NAMED,
        "x": NamedArray(dtype="<M8[99999999999999999999Y]", shape=(2, 1), data=b""),
    },
    "a path of 1,500 names": {"rewards": NAMED, "/".join("x" * 1500): NAMED},
    "a name of 513 characters": {"rewards": NAMED, "x" * 513: NAMED},
    "4,097 arrays": {"rewards": NAMED, **{f"x{number}": NAMED for number in range(4096)}},
}


@pytest.mark.parametrize("arrays", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_arrays_are_refused_where_they_are_read(arrays: dict[str, NamedArray]) -> None:
    with pytest.raises(RecordError):
        from_record(decode(encode(TrajectoryRecord(uid="t", environment="cart", arrays=arrays))))


def test_the_writer_refuses_trajectories_that_no_reader_accepts() -> None:
    deep: Any = leaf("<f4")
    for _ in range(1500):
        deep = {"x": deep}
    with pytest.raises(RecordError, match="a path of 33 names"):
        to_record(trajectory(arrays={"rewards": leaf("<f4"), "x": deep}))
    with pytest.raises(RecordError, match="has 33 dimensions; it may have at most 32"):
        to_record(trajectory(arrays={"rewards": leaf("<f4"), "x": np.zeros((4, 2, *(1,) * 31))}))


def test_episodes_side_by_side_and_one_after_the_other_are_sound() -> None:
    spans = (_span(stop=2, last=False), _span(uid="f", start=2), _span(uid="g", column=1))
    assert to_record(trajectory(episodes=spans)).episodes == spans

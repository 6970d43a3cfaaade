"""One record of the log fills several buffers: each takes what it lacks, and a refused record holds up no buffer."""

from collections.abc import Mapping
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import Place, put
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import EpisodeSpan, NamedArray, TrajectoryRecord
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.trajectory_arrays import Trajectory, to_record


class Kept:
    """A minimal buffer, which keeps uids in order."""

    def __init__(self, position: Mapping[int, int] | None = None, *, refuses: str = "", breaks: bool = False) -> None:
        self._position = dict(position or {})
        self._refuses = refuses
        self.breaks = breaks
        self.uids: list[str] = []

    @property
    def position(self) -> Mapping[int, int]:
        return dict(self._position)

    def add(self, trajectory: Trajectory, /, *, at: Place) -> None:
        if self.breaks:
            raise StoreError("the disk is full")
        if trajectory.uid == self._refuses:
            raise RecordError(f"{trajectory.uid} is not for me")
        self.uids.append(trajectory.uid)
        self.skip(at)

    def skip(self, at: Place, /) -> None:
        assert at[1] >= self._position.get(at[0], 0), "a position never goes back"
        self._position[at[0]] = at[1] + 1


def record(uid: str) -> bytes:
    arrays = {"rewards": np.zeros((2, 1), np.float32)}
    return encode(to_record(Trajectory(arrays=arrays, environment="cart", uid=uid)))


def test_every_buffer_gets_a_record_and_moves_its_position() -> None:
    one, other = Kept(), Kept()
    assert put([one, other], (1, 7), record("a")) == []
    assert one.uids == other.uids == ["a"]
    assert one.position == other.position == {1: 8}


def test_a_buffer_that_has_a_record_does_not_get_it_again() -> None:
    ahead, behind = Kept({0: 5}), Kept({0: 4})
    assert put([ahead, behind], (0, 4), record("a")) == []
    assert (ahead.uids, behind.uids) == ([], ["a"])
    assert ahead.position == behind.position == {0: 5}


def test_a_record_that_one_buffer_refuses_is_added_to_the_others_and_all_move_past_it() -> None:
    strict, lenient = Kept(refuses="a"), Kept()
    assert put([strict, lenient], (0, 0), record("a")) == ["Kept: a is not for me"]
    assert (strict.uids, lenient.uids) == ([], ["a"])
    assert strict.position == lenient.position == {0: 1}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"no frame", "not an Avro single-object frame"),
        (None, "not an Avro single-object frame"),
        (
            encode(
                TrajectoryRecord(uid="u", environment="e", arrays={"rewards": NamedArray.of(np.zeros(3, np.float32))})
            ),
            "must be",
        ),
        (
            encode(
                TrajectoryRecord(
                    uid="u",
                    environment="e",
                    arrays={"rewards": NamedArray(dtype="<f4", shape=(1,) * 65, data=bytes(4))},
                )
            ),
            "65 dimensions",
        ),
        (
            encode(
                TrajectoryRecord(
                    uid="u",
                    environment="e",
                    arrays={
                        "rewards": NamedArray.of(np.zeros((2, 1))),
                        "/".join("x" * 1500): NamedArray.of(np.zeros(1)),
                    },
                )
            ),
            "a path of 1500 names",
        ),
    ],
)
def test_an_unreadable_record_is_skipped_by_all_buffers_before_it(value: bytes | None, why: str) -> None:
    ahead, behind = Kept({0: 9}), Kept()
    [text] = put([ahead, behind], (0, 3), value)
    assert why in text
    assert (ahead.position, behind.position) == ({0: 9}, {0: 4})


def test_after_a_failure_the_same_record_is_added_to_the_remaining_buffers() -> None:
    first, full = Kept(), Kept(breaks=True)
    with pytest.raises(StoreError):
        put([first, full], (0, 0), record("a"))
    full.breaks = False
    assert put([first, full], (0, 0), record("a")) == []
    assert first.uids == full.uids == ["a"]


ODD_DTYPES = (
    "<f4",
    "<f2",
    "<i8",
    "|b1",
    "<U",
    "<U3",
    "|S2",
    "<M8[s]",
    "<M8[99Y]",
    "|O",
    "|V4",
    "bfloat16",
    "finfo",
    "",
    "<",
)
ODD_PATHS = ("rewards", "prev_logprobs", "dones", "a/b", "a", "/", "", "x" * 600, "/".join("x" * 40))


@settings(max_examples=settings().max_examples // 4)
@given(
    arrays=st.dictionaries(
        st.sampled_from(ODD_PATHS),
        st.builds(
            NamedArray,
            dtype=st.sampled_from(ODD_DTYPES),
            shape=st.one_of(
                st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([1, 2])),
                st.lists(st.sampled_from([0, 1, 2, -1, 2**31, 2**62]), max_size=4).map(tuple),
                st.integers(0, 80).map(lambda rank: (1,) * rank),
            ),
            data=st.sampled_from([b"", bytes(4), bytes(8), bytes(16), b"\xff" * 8]),
        ),
        max_size=4,
    ),
    spans=st.lists(
        st.builds(
            EpisodeSpan,
            uid=st.sampled_from(["", "e", "e" * 600]),
            column=st.sampled_from([0, 1, -1, 2**31 - 1]),
            start=st.sampled_from([0, 1, -1]),
            stop=st.sampled_from([0, 1, 2, 2**31 - 1]),
            control_mode=st.sampled_from([0, 1, 2]),
            first=st.booleans(),
            last=st.booleans(),
            begin=st.sampled_from([-1, 0, 1, -2, 2**53, 2**63 - 1]),
        ),
        max_size=2,
    ).map(tuple),
)
def test_every_buffer_adds_or_skips_any_record_and_continues(
    arrays: dict[str, NamedArray], spans: tuple[EpisodeSpan, ...]
) -> None:
    value = encode(TrajectoryRecord(uid="u", environment="e", arrays=arrays, episodes=spans))
    with TemporaryDirectory() as place:
        buffers = [
            TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{place}/steps"),
            TrajectoryReplayBuffer(),
            EpisodeSliceBuffer(f"{place}/slices", capacity=100, slice_len=1),
            HilEpisodeBuffer(f"{place}/sides", capacity=100, slice_len=1),
        ]
        refused = put(buffers, (0, 0), value)
        assert all(len(reason) < 3000 for reason in refused)
        assert [dict(buffer.position) for buffer in buffers] == [{0: 1}] * 4
        for offset in (1, 2):
            put(buffers, (0, offset), record(f"honest {offset}"))
        assert len(buffers[0]) == len(buffers[1]) >= 2
        for buffer in buffers:
            buffer.close()

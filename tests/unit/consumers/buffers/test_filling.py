"""What one record of the log does to buffers: each gets what it lacks, and none is held up by what is refused."""

from collections.abc import Mapping

import numpy as np
import pytest

from consumers.buffers.files import StoreError
from consumers.buffers.filling import Place, put
from topics.codec import encode
from topics.errors import RecordError
from topics.records import NamedArray, TrajectoryRecord
from topics.trajectories import Trajectory, to_record


class Kept:
    """The least buffer there can be: keeps uids, in order."""

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


def test_every_buffer_gets_a_record_and_knows_its_place() -> None:
    one, other = Kept(), Kept()
    assert put([one, other], (1, 7), record("a")) == []
    assert one.uids == other.uids == ["a"]
    assert one.position == other.position == {1: 8}


def test_a_buffer_that_has_a_record_does_not_get_it_again() -> None:
    ahead, behind = Kept({0: 5}), Kept({0: 4})
    assert put([ahead, behind], (0, 4), record("a")) == []
    assert (ahead.uids, behind.uids) == ([], ["a"])
    assert ahead.position == behind.position == {0: 5}


def test_what_one_buffer_refuses_the_others_have_and_all_pass_it() -> None:
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
def test_what_is_no_trajectory_is_passed_by_all_who_had_not_passed_it(value: bytes | None, why: str) -> None:
    ahead, behind = Kept({0: 9}), Kept()
    [said] = put([ahead, behind], (0, 3), value)
    assert why in said
    assert (ahead.position, behind.position) == ({0: 9}, {0: 4})


def test_after_a_failure_the_same_record_completes_what_it_interrupted() -> None:
    first, full = Kept(), Kept(breaks=True)
    with pytest.raises(StoreError):
        put([first, full], (0, 0), record("a"))
    full.breaks = False
    assert put([first, full], (0, 0), record("a")) == []
    assert first.uids == full.uids == ["a"]

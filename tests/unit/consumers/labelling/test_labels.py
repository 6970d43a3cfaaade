"""What a labeler makes of a record: labelled, left out, or a dead letter that carries the reason."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from consumers.labelling.config import LabellingConfig
from consumers.labelling.labels import Input, Labelled, label, labeler_of
from consumers.transactions import Refused
from tests.trajectories import double, numbered
from topics.codec import decode, encode
from topics.errors import ConfigurationError, RecordError
from topics.records import NamedArray, RolloutMetadata
from topics.trajectories import Trajectory, from_record, to_record

LIMIT = 100_000


def given(value: bytes | None = None, number: int = 3) -> Input:
    return Input("run.unlabelled", 2, 7, b"key", encode(to_record(numbered(number))) if value is None else value)


def test_a_labelled_trajectory_has_what_the_labeler_gave_it_and_the_sources_key() -> None:
    made = label(double, given(), LIMIT)
    assert isinstance(made, Labelled)
    assert (made.offset, made.key) == (7, b"key")
    trajectory = from_record(decode(made.value))
    np.testing.assert_array_equal(trajectory.arrays["rewards"], np.full((4, 2), 6, np.float32))
    assert trajectory.episodes == numbered(3).episodes


def test_what_the_labeler_leaves_out_becomes_nothing() -> None:
    assert label(lambda _trajectory: None, given(), LIMIT) is None


def hostile(**fields: Any) -> bytes:
    record = to_record(numbered(3))
    return encode(replace(record, arrays={**record.arrays, "extra": NamedArray(**fields)}))


def unsound(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, arrays={**trajectory.arrays, "rewards": np.zeros((3, 2))})


def large(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, arrays={**trajectory.arrays, "rewards": np.zeros((4, 2, LIMIT))})


def scrawled(trajectory: Trajectory) -> Trajectory:
    trajectory.arrays["actions"][0] = 1
    return trajectory


@pytest.mark.parametrize(
    ("labeler", "record", "why"),
    [
        (double, given(b"\xc3\x01nonsense"), "unknown schema fingerprint|not an Avro"),
        (double, given(hostile(dtype="<f4", shape=(1,) * 65, data=bytes(4))), "has 65 dimensions"),
        (double, given(hostile(dtype="<f4", shape=(4, 2, 2**62, 0), data=b"")), "span more than"),
        (double, given(hostile(dtype="<U", shape=(4, 2), data=b"")), "'<U' is no dtype"),
        (double, given(number=155), "number 155 cannot be judged"),
        (unsound, given(), r"rewards has shape \(3, 2\)|begin with \[3, 2\]"),
        (large, given(), "labelled it has .* bytes"),
    ],
)
def test_what_cannot_be_judged_is_a_dead_letter_with_the_reason(
    labeler: Callable[[Trajectory], Trajectory], record: Input, why: str
) -> None:
    refused = label(labeler, record, LIMIT)
    assert isinstance(refused, Refused)
    assert (refused.topic, refused.partition, refused.offset) == ("run.unlabelled", 2, 7)
    assert (refused.key, refused.value) == (b"key", record.value), "its bytes untouched"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refused.error)


@pytest.mark.parametrize(
    "changes", [{"uid": "other"}, {"environment": "other"}, {"metadata": RolloutMetadata(worker_id="other")}]
)
def test_a_labeler_that_returns_another_trajectory_is_stopped(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="labeler"):
        label(lambda trajectory: replace(trajectory, **changes), given(), LIMIT)  # type: ignore[arg-type]


def test_a_labeler_cannot_write_over_what_it_was_given() -> None:
    with pytest.raises(ValueError, match="read-only"):
        label(scrawled, given(), LIMIT)


def test_a_labeler_is_named_by_module_and_function() -> None:
    assert labeler_of("tests.trajectories:double") is double


@pytest.mark.parametrize("name", ["double", ":double", "tests.trajectories:", "no.module:f", "tests.trajectories:no"])
def test_a_name_of_no_labeler_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="labeler"):
        labeler_of(name)


def test_a_name_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no function"):
        labeler_of("tests.unit.consumers.labelling.test_labels:LIMIT")


def test_settings_that_would_label_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        LabellingConfig(max_poll_records=0)
    with pytest.raises(ConfigurationError):
        LabellingConfig(commit_interval_s=0)


def test_an_error_of_the_labeler_is_nobodys_dead_letter() -> None:
    def broken(_trajectory: Trajectory) -> Trajectory:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        label(broken, given(), LIMIT)
    assert not issubclass(ZeroDivisionError, RecordError)

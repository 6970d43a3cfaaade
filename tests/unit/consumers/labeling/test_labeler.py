"""Outcomes of labeling a record: labeled, left out, or a dead letter that carries the reason."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.labeling.labeler import (
    LabeledRecord,
    Labeler,
    RolloutLabel,
    UnlabeledRecord,
    finish,
    is_asynchronous,
    label,
    labeler_of,
)
from rollstream.consumers.transactions import Refused
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.records import GroupCancelled, NamedArray, Rollout, RolloutMetadata
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.signatures import ROLLOUT, Signer, is_signed_by, write_key
from rollstream.topics.wire.trajectory_arrays import Trajectory, from_record, to_record
from tests.support.runs import rollout
from tests.support.trajectories import double, numbered

LIMIT = 100_000


def given(value: bytes | None = None, number: int = 3) -> UnlabeledRecord:
    return UnlabeledRecord(
        "run.unlabelled", 2, 7, b"key", encode(to_record(numbered(number))) if value is None else value
    )


def outcome_of(labeler: Labeler, record: UnlabeledRecord, limit_bytes: int) -> LabeledRecord | Refused | None:
    outcome = finish(label(labeler, record, limit_bytes))
    assert outcome.cancellation is None, "a trajectory has no group"
    return outcome.result


def test_a_labeled_trajectory_has_what_the_labeler_gave_it_and_the_sources_key() -> None:
    made = outcome_of(double, given(), LIMIT)
    assert isinstance(made, LabeledRecord)
    assert (made.offset, made.key) == (7, b"key")
    trajectory = from_record(decode(made.value))
    np.testing.assert_array_equal(trajectory.arrays["rewards"], np.full((4, 2), 6, np.float32))
    assert trajectory.episodes == numbered(3).episodes


def test_what_the_labeler_leaves_out_becomes_nothing() -> None:
    assert outcome_of(lambda _trajectory: None, given(), LIMIT) is None


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
        (double, given(hostile(dtype="<U", shape=(4, 2), data=b"")), "'<U' is not a supported dtype"),
        (double, given(number=155), "number 155 cannot be judged"),
        (unsound, given(), r"rewards has shape \(3, 2\)|begin with \[3, 2\]"),
        (large, given(), "it has .* bytes with its label"),
    ],
)
def test_what_cannot_be_judged_is_a_dead_letter_with_the_reason(
    labeler: Callable[[Trajectory], Trajectory], record: UnlabeledRecord, why: str
) -> None:
    refused = outcome_of(labeler, record, LIMIT)
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
        outcome_of(lambda trajectory: replace(trajectory, **changes), given(), LIMIT)  # type: ignore[arg-type]


def test_a_labeler_cannot_write_over_what_it_was_given() -> None:
    with pytest.raises(ValueError, match="read-only"):
        outcome_of(scrawled, given(), LIMIT)


@pytest.mark.parametrize(
    "name", ["double", ":double", "tests.support.trajectories:", "no.module:f", "tests.support.trajectories:no"]
)
def test_a_name_of_no_labeler_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="labeler"):
        labeler_of(name)


UNREWARDED = rollout("q", 1, reward=0.0, group_id="g", reward_components={"length": 0.5})


def test_a_labeled_rollout_has_the_reward_and_components_it_was_given_and_nothing_else_is_changed() -> None:
    label_ = RolloutLabel(reward=0.7, components={"style": 0.25})
    outcome = finish(label(lambda _rollout: label_, given(encode(UNREWARDED)), LIMIT))
    assert isinstance(outcome.result, LabeledRecord)
    assert (outcome.result.topic, outcome.cancellation) == ("rollouts", None)
    labeled = decode(outcome.result.value)
    assert (labeled.reward, labeled.reward_components) == (0.7, {"length": 0.5, "style": 0.25})
    assert encode(replace(labeled, reward=0.0, reward_components={"length": 0.5})) == encode(UNREWARDED)
    number = finish(label(lambda _rollout: 3, given(encode(UNREWARDED)), LIMIT)).result
    assert isinstance(number, LabeledRecord)
    assert decode(number.value).reward == 3.0


@pytest.mark.parametrize(
    "half", [np.float32(0.5), np.float16(0.5), np.array(0.5, np.float32), Fraction(1, 2)], ids=repr
)
def test_a_reward_of_another_type_of_number_is_a_number(half: Any) -> None:
    made = finish(label(lambda _rollout: half, given(encode(UNREWARDED)), LIMIT)).result
    assert isinstance(made, LabeledRecord)
    assert decode(made.value).reward == 0.5
    label_ = RolloutLabel(reward=np.int64(2), components={"style": half})  # type: ignore[arg-type]
    made = finish(label(lambda _rollout: label_, given(encode(UNREWARDED)), LIMIT)).result
    assert isinstance(made, LabeledRecord)
    labeled = decode(made.value)
    assert (labeled.reward, labeled.reward_components) == (2.0, {"length": 0.5, "style": 0.5})


def failing(_rollout: Rollout) -> float:
    raise RecordError("the answer has no score")


@pytest.mark.parametrize(
    ("labeler", "refused"),
    [
        (failing, "the answer has no score"),
        (lambda _rollout: float("nan"), "reward nan, which is not a finite number"),
        (lambda _rollout: np.float32("-inf"), "reward -inf, which is not a finite number"),
        (lambda _rollout: 10**5000, "reward inf, which is not a finite number"),
        (lambda _rollout: 1e300, "reward is 1e+300"),
        (lambda _rollout: RolloutLabel(reward=1.0, components={"a": float("inf")}), "a inf, which is not a finite"),
        (lambda _rollout: None, None),
    ],
)
def test_a_member_without_a_reward_is_cancelled_so_that_its_group_goes_on(
    labeler: Labeler, refused: str | None
) -> None:
    outcome = finish(label(labeler, given(encode(UNREWARDED)), LIMIT))
    if refused is None:
        assert outcome.result is None
    else:
        assert isinstance(outcome.result, Refused)
        assert refused in outcome.result.error
    assert outcome.cancellation is not None
    cancelled = decode(outcome.cancellation)
    assert isinstance(cancelled, GroupCancelled)
    assert (cancelled.uids, cancelled.group_id, cancelled.example_id) == (("q-1",), "g", "q")
    assert (refused or "left it out") in cancelled.reason


def test_a_branch_without_a_reward_cancels_its_whole_episode() -> None:
    branch = replace(UNREWARDED, uid="q-1.2", episode_uid="q-1", branch=2, branches=3)
    outcome = finish(label(failing, given(encode(branch)), LIMIT))
    assert outcome.cancellation is not None
    assert decode(outcome.cancellation).uids == ("q-1",)


@pytest.mark.parametrize(
    "answer",
    [
        "7",
        True,
        object(),
        np.bool_(True),
        np.array([1.0]),
        np.array("7"),
        np.complex64(1),
        RolloutLabel(reward="7", components={"reward": 1.0}),  # type: ignore[arg-type]
    ],
)
def test_a_labeler_that_returns_no_number_ends_the_process(answer: object) -> None:
    with pytest.raises(ConfigurationError, match="return a RolloutLabel or a number"):
        finish(label(lambda _rollout: answer, given(encode(UNREWARDED)), LIMIT))


@pytest.mark.parametrize("components", [None, [0.5]])
def test_a_label_whose_components_are_no_mapping_ends_the_process_with_the_remedy(components: Any) -> None:
    answer = RolloutLabel(reward=1.0, components=components)
    with pytest.raises(
        ConfigurationError, match=r"components .* for rollout 'q-1'; return a mapping of names to numbers"
    ):
        finish(label(lambda _rollout: answer, given(encode(UNREWARDED)), LIMIT))


async def waiting(_rollout: Rollout) -> float:
    await asyncio.sleep(0)
    return 1.0


class Waiting:
    async def __call__(self, rollout_: Rollout) -> float:
        return await waiting(rollout_)


def test_asynchronous_labelers_are_known_and_one_that_hides_it_is_refused() -> None:
    assert is_asynchronous(waiting)
    assert is_asynchronous(Waiting())
    assert not is_asynchronous(failing)
    made = asyncio.run(label(Waiting(), given(encode(UNREWARDED)), LIMIT)).result
    assert isinstance(made, LabeledRecord)
    with pytest.raises(ConfigurationError, match="declared with async def"):
        finish(label(lambda one: waiting(one), given(encode(UNREWARDED)), LIMIT))


def test_a_reason_that_was_cut_within_a_character_is_a_dead_letter() -> None:
    def quotes(_rollout: Rollout) -> float:
        raise RecordError("cannot parse \ud83d")

    outcome = finish(label(quotes, given(encode(UNREWARDED)), LIMIT))
    assert isinstance(outcome.result, Refused)
    assert outcome.result.error == "cannot parse ?"
    assert outcome.cancellation is not None
    assert decode(outcome.cancellation).reason == "it was not labeled: cannot parse ?"


def test_a_record_of_another_type_is_refused_without_being_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of some types take hundreds of times as much memory."""
    monkeypatch.setattr("rollstream.consumers.labeling.labeler.decode", lambda _value: pytest.fail("it was decoded"))
    cancelled = GroupCancelled(environment="e", example_id="t", policy_version=0, group_size=2, uids=("u",))
    refused = outcome_of(double, given(encode(cancelled)), LIMIT)
    assert isinstance(refused, Refused)
    assert "it is a GroupCancelled" in refused.error


def test_a_labeler_signs_no_rollout_of_a_writer_that_its_environment_does_not_know(tmp_path: Path) -> None:
    """Otherwise anybody who may write to `unlabelled` would have records of the environment, or cancel its members."""
    names = ("worker", "labeler", "stranger")
    for name in names:
        write_key(tmp_path / name)
    worker, own, stranger = (Signer(f"file:{tmp_path / name}", "signing_key") for name in names)
    keys = {UNREWARDED.environment: (worker.public, own.public)}
    for value in (encode(UNREWARDED), stranger.signed(UNREWARDED, ROLLOUT)):
        outcome = finish(label(lambda _rollout: 1.0, given(value), LIMIT, own, keys))
        assert isinstance(outcome.result, Refused)
        assert "no key of environment" in outcome.result.error
        assert outcome.cancellation is None
    made = finish(label(lambda _rollout: 1.0, given(worker.signed(UNREWARDED, ROLLOUT)), LIMIT, own, keys)).result
    assert isinstance(made, LabeledRecord)
    assert is_signed_by(made.value, ROLLOUT, [own.public])

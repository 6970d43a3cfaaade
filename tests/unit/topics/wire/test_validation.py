"""Problems of invalid rollouts and cancellations; each names the field."""

import contextlib
import itertools
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.errors import RecordError
from rollstream.topics.records import (
    BatchTokenArray,
    Drop,
    FinishedOffsets,
    GroupCancelled,
    NamedArray,
    Rollout,
    SamplingParams,
    Turn,
)
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.validation import (
    batch_problems,
    decode_journal,
    problems,
    untyped_problems,
)
from tests.strategies import any_record, rollouts
from tests.support.batches import random_batch

NONE = NamedArray(dtype="<f4", shape=(0,), data=b"")

F4 = np.zeros(4, "<f4")


OBJECT = f"20261130/{'ab' * 32}"


def masked(counts: list[int], tokens: list[int]) -> dict[str, NamedArray]:
    arrays = {"sampling_mask_counts": counts, "sampling_mask": tokens}
    return {name: NamedArray.of(np.array(values, "<i4")) for name, values in arrays.items()}


def at_mask(tokens: int) -> dict[str, NamedArray]:
    return {"sampling_mask": NamedArray(dtype="<i4", shape=(tokens,), stored=OBJECT)}


def named(dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, NamedArray]:
    return {"x": NamedArray(dtype=dtype, shape=shape, data=data)}


def at(stored: str, name: str = "x", *, shape: tuple[int, ...] = (4, 2), data: bytes = b"") -> dict[str, NamedArray]:
    return {name: NamedArray(dtype="<f4", shape=shape, data=data, stored=stored)}


@given(rollout=rollouts())
def test_a_sound_rollout_has_no_problems(rollout: Rollout) -> None:
    assert problems(rollout) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": np.array([], "<i4")}, "tokens is empty"),
        ({"tokens": np.array([1, -1, 2, 3], "<i4")}, "tokens holds a negative id"),
        ({"loss_mask": np.ones(3, "|b1")}, "loss_mask has 3 entries for 4 tokens"),
        ({"logprobs": np.zeros(5, "<f4")}, "logprobs has 5 entries for 4 tokens"),
        ({"logprobs": np.array([0, 0, np.inf, 0], "<f4")}, "logprobs holds NaN or infinity"),
        ({"logprobs": np.array([0, 0, 0.5, 0], "<f4")}, "logprobs holds 0.5, above 0"),
        (
            {"logprobs": np.array([0, 0, -1, -9999], "<f4")},
            "logprobs holds -9999, which stands for an unknown log-probability",
        ),
        ({"logprobs": np.array([-1, 0, 0, 0], "<f4")}, "logprobs is not 0 where loss_mask is false"),
        ({"token_rewards": np.zeros(3, "<f4")}, "token_rewards has 3 entries for 4 tokens"),
        ({"token_rewards": np.array([0, 0, 0, np.nan], "<f4")}, "token_rewards holds NaN or infinity"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": float("-inf")}, "reward is -inf"),
        ({"reward": 1.1e30}, "reward is 1.1e+30"),
        ({"reward_components": {"exact": float("inf")}}, "reward component exact is inf"),
        ({"policy_version": -1}, "policy_version is -1"),
        ({"lowest_version": 2, "highest_version": 1}, "lowest_version 2 and highest_version 1 are not a range"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 2**31}, "group_size is 2147483648"),
        ({"branch": 1}, "branch 1 is not among 1 branches"),
        ({"branches": 2**31, "episode_uid": "e"}, "branch 0 is not among 2147483648 branches"),
        ({"branches": 2}, "one of 2 branches but has no episode_uid"),
        ({"uid": ""}, "uid has 0 characters"),
        ({"uid": "u" * 513}, "uid has 513 characters"),
        ({"environment": ""}, "environment has 0 characters"),
        ({"example_id": "x" * 600}, "example_id has 600 characters"),
        ({"group_id": "g" * 513}, "group_id is longer than 512"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "sampling temperature is nan"),
        ({"sampling": SamplingParams(top_p=float("nan"))}, "sampling top_p is nan"),
        ({"turns": (Turn(role="user", text="", start=3, stop=2),)}, "turn 0 covers tokens 3 to 2 of 4"),
        ({"turns": (Turn(role="user", text="", start=0, stop=5),)}, "turn 0 covers tokens 0 to 5 of 4"),
        ({"token_arrays": named("<f4", (3,), bytes(12))}, "token array x has shape (3,)"),
        ({"token_arrays": named("<f4", (4, 2), bytes(16))}, "in 16 bytes for 4 tokens"),
        ({"token_arrays": named("<f4", (4, -1, -1), bytes(16))}, "token array x has shape (4, -1, -1)"),
        ({"token_arrays": named(">f4", (4,), bytes(16))}, "not a little-endian number"),
        ({"token_arrays": named("O", (4,), bytes(32))}, "not a little-endian number"),
        ({"token_arrays": named("<U1", (4,), bytes(16))}, "not a little-endian number"),
        ({"token_arrays": named("i4,,", (4,), bytes(16))}, "not a little-endian number"),
        ({"token_arrays": named("(1000000000,1000000000)f8", (4,), b"")}, "not a little-endian number"),
        ({"token_arrays": at("../weights")}, "names the object '../weights'"),
        ({"token_arrays": at(OBJECT, data=b"abcd")}, "has 4 bytes and names the object"),
        ({"token_arrays": at(OBJECT, "reference_log_probs")}, "token array reference_log_probs has 0 bytes and names"),
        ({"token_arrays": at(OBJECT, shape=(3, 2))}, "token array x has shape (3, 2)"),
        ({"token_arrays": at(OBJECT, shape=(4, -1))}, "token array x has shape (4, -1)"),
        ({"token_arrays": at(OBJECT, shape=(4, 2**62, 2**62))}, "span more than"),
        ({"token_arrays": at(OBJECT, shape=(4,) + (1,) * 40)}, "41 dimensions"),
        ({"token_arrays": {"reference_log_probs": NamedArray.of(np.zeros((4, 2), "<f4"))}}, "one finite float32"),
        ({"token_arrays": {"reference_log_probs": NamedArray.of(np.zeros(4, "<i4"))}}, "one finite float32"),
        ({"token_arrays": {"reference_log_probs": NamedArray.of(np.full(4, np.nan))}}, "one finite float32"),
        ({"token_arrays": {"reference_log_probs": NamedArray.of(np.full(4, 1e300))}}, "one finite float32"),
        ({"token_arrays": {"sampling_mask": NamedArray.of(np.zeros(3, "<i4"))}}, "must both be <i4 with one dimension"),
        ({"token_arrays": masked([0, 0, 1, 1], [5, 5, 5])}, "token array sampling_mask has shape (3,)"),
        ({"token_arrays": masked([0, 0, 1, -1], [])}, "sampling_mask_counts holds a negative number"),
        ({"token_arrays": masked([0, 0, 1, 1], [5, -5])}, "sampling_mask holds a negative id"),
        ({"token_arrays": masked([0, 1, 1], [5, 5])}, "token array sampling_mask_counts has shape (3,)"),
        ({"token_arrays": masked([0, 0, 1, 1], []) | at_mask(3)}, "token array sampling_mask has shape (3,)"),
    ],
)
def test_a_senseless_rollout_is_named_with_its_field(changes: dict[str, Any], words: str) -> None:
    reported = problems(replace(example_rollout("a"), **changes))
    assert any(words in problem for problem in reported), reported


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": np.array([0, 0, 5e-4, 0], "<f4")},
        {"loss_mask": np.zeros(4, "|b1"), "logprobs": F4},
        {"loss_mask": np.ones(4, "|b1")},
        {"token_rewards": F4},
        {"branches": 2, "branch": 1, "episode_uid": "e"},
        {"sampling": SamplingParams(temperature=0.0, top_k=5)},
        {"token_arrays": {"experts": NamedArray.of(np.zeros((4, 2, 3), "<i2"))}},
        {"token_arrays": {"reference_log_probs": NamedArray.of(np.zeros(4, "<f2"))}},
        {"turns": (Turn(role="user", text="hi", start=0, stop=4),)},
        {"uid": "u" * 512},
    ],
)
def test_unusual_but_valid_rollouts_have_no_problems(changes: dict[str, Any]) -> None:
    assert problems(replace(example_rollout("a"), **changes)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"uid": 3}, "uid is of type int instead of str"),
        ({"environment": b"env"}, "environment is of type bytes instead of str"),
        ({"group_id": None}, "group_id is of type NoneType instead of str"),
        ({"reward": None}, "reward is of type NoneType instead of float"),
        ({"policy_version": "3"}, "policy_version is of type str instead of int"),
        ({"tokens": None}, "tokens is of type NoneType instead of ndarray"),
        ({"turns": None}, "turns is of type NoneType instead of tuple"),
        ({"sampling": None}, "sampling is of type NoneType instead of SamplingParams"),
        ({"reward_components": None}, "reward_components is of type NoneType instead of Mapping"),
        ({"turns": (None,)}, "a field has an impossible value"),
        ({"reward_components": {"exact": "1"}}, "a field has an impossible value (TypeError: must be real number"),
        ({"reward": 10**400}, "a field has an impossible value (OverflowError: int too large"),
    ],
)
def test_a_rollout_of_wrong_types_is_named_with_its_field(changes: dict[str, Any], words: str) -> None:
    [reported] = untyped_problems(replace(example_rollout("a"), **changes))
    assert words in reported


SOUND = GroupCancelled(environment="env", example_id="0", policy_version=0, group_size=2, uids=("a",))
WRONG = [None, 3, "x", "\ud800", b"x", [], ["a"], (3,), {3: 3}, object(), np.array([1.0, 2.0]), 10**400, 1j, math.nan]


@pytest.mark.parametrize("sound", [example_rollout("a"), SOUND], ids=["rollout", "cancellation"])
def test_a_record_with_any_value_in_any_field_is_encoded_or_refused(sound: Rollout | GroupCancelled) -> None:
    for name, value in itertools.product([each.name for each in fields(sound)], WRONG):
        record = replace(sound, **{name: value})  # type: ignore[arg-type]
        reported = untyped_problems(record)
        if not reported:
            with contextlib.suppress(RecordError):
                encode_key(record.environment, record.example_id)
                encode(record)


@given(rollout=any_record(Rollout))
def test_any_rollout_that_decodes_can_be_checked(rollout: Rollout) -> None:
    assert all(isinstance(problem, str) for problem in problems(rollout))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"uids": None}, "uids is of type NoneType instead of tuple"),
        ({"environment": 3}, "environment is of type int instead of str"),
        ({"policy_version": -1}, "policy_version is -1"),
        ({"group_size": 0}, "group_size is 0"),
        ({"uids": ()}, "uids is empty"),
        ({"uids": ("a", "")}, "holds an empty uid"),
        ({"uids": ("a" * 513,)}, "longer than 512"),
        ({"uids": tuple(map(str, range(4096)))}, ""),
        ({"uids": tuple(map(str, range(4097)))}, "uids holds 4097, and may hold 4096"),
        ({"environment": "e" * 513}, "environment has 513 characters"),
        ({"group_id": "g" * 513}, "group_id is longer than 512"),
    ],
)
def test_a_senseless_cancellation_is_named_with_its_field(changes: dict[str, Any], words: str) -> None:
    reported = untyped_problems(replace(SOUND, **changes))
    assert words in "; ".join(reported)
    assert bool(reported) == bool(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_steps": np.zeros(5, "<i8")}, "weight_steps has 5 entries"),
        ({"logprobs_processed": np.zeros(3, bool)}, "logprobs_processed has 3 entries"),
        # Differences of such numbers overflow 64 bits, so that the numbers seem to ascend.
        ({"splits": np.array([0, 2**63 - 1, -2, -2, 0], "<i8"), "tokens": np.zeros(0, "<i4")}, "splits do not divide"),
        (
            {
                "token_arrays": (
                    BatchTokenArray(name="x", rows=np.array([0, 2**31 - 1, -(2**31), 3], "<i4"), array=NONE),
                )
            },
            "names rows that do not ascend within the 4 rows",
        ),
    ],
)
def test_a_batch_that_no_grouping_process_cut_is_named_with_its_field(changes: dict[str, Any], words: str) -> None:
    batch = random_batch(0, rows=4)
    if "tokens" in changes:
        changes = changes | {name: getattr(batch, name)[:0] for name in ("loss_mask", "logprobs", "advantages")}
    assert words in "; ".join(batch_problems(replace(batch, **changes)))


NO_JOURNAL: list[tuple[dict[str, Any], str]] = [
    ({"admitted": np.array([0, 2**60], "<i8")}, "admitted holds an invalid first offset or count"),
    ({"unfinished": np.array([0, 2**24, 2**24, 1], "<i8")}, "unfinished has more than 16777216 offsets"),
    ({"delivered": np.array([-1, 1], "<i8")}, "delivered holds an invalid first offset or count"),
    ({"finished": (FinishedOffsets(fate="lost", runs=np.array([0, 1], "<i8")),)}, "the unknown fate 'lost'"),
    ({"drops": (Drop(offset=-1, reason="late", environment="env"),)}, "a drop at an invalid offset"),
    ({"position": -1}, "offsets 0 to -1"),
    ({"sequence": -1}, "sequence -1"),
]


@pytest.mark.parametrize(("changes", "words"), NO_JOURNAL)
def test_a_journal_record_that_no_task_wrote_is_no_record(changes: dict[str, Any], words: str) -> None:
    first = initial_record(0, 2, "id", GroupingConfig())
    assert decode_journal(encode(first)).position == 0
    with pytest.raises(RecordError, match=words):
        decode_journal(encode(replace(first, **changes)))

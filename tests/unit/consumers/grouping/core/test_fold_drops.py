"""Every reason to drop a record or a group, one small log per test; staleness, age and capacity among them."""

from typing import Any

import numpy as np
import pytest

from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Mark, NamedArray, RolloutMetadata, SamplingParams
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key, partition_of
from tests.support.pairs import driver, fates, pair, reasons, uids

# ---------------------------------------------------------------------- policy clock


def test_a_group_of_a_future_version_waits_sealed_until_the_clock_gets_there() -> None:
    d = driver(policy_version=-1)
    pair(d, policy_version=1)
    d.publish_policy_version(0)
    assert d.batches == []
    assert d.fold.open_groups == 0
    d.publish_policy_version(1)
    assert uids(d) == [("0a", "0b")]


def test_staleness_is_measured_from_the_lowest_sampled_version_when_the_group_seals() -> None:
    d = driver(policy_version=5, max_policy_lag=2)
    d.pipe(example_rollout("a", 1.0, policy_version=5, lowest_version=2))
    assert d.drops == []
    d.pipe(example_rollout("b", 0.0, policy_version=5))
    assert {drop.reason for drop in d.drops} == {"stale_version"}
    assert d.drops[0].detail == "sampled 3 versions before 5"
    assert [drop.lowest_version for drop in d.drops] == [2, 5]


def test_the_policy_clock_never_goes_back() -> None:
    d = driver(policy_version=3)
    d.publish_policy_version(2)
    d.pipe(Mark(kind="deadline", policy_version=1))
    assert d.fold.policy_version == 3
    d.pipe(Mark(kind="deadline", policy_version=4))
    assert d.fold.policy_version == 4


def test_an_older_group_is_superseded_once_a_newer_one_of_its_example_sealed() -> None:
    d = driver(policy_version=2, drop_superseded=True, batch_rollouts=100)
    pair(d, policy_version=1)
    d.pipe(example_rollout("0a", 1.0, policy_version=0))
    pair(d, policy_version=2)
    assert [drop.policy_version for drop in d.drops] == [1, 1]
    last = d.pipe(example_rollout("0b", 0.0, policy_version=0))
    assert reasons(d)[last] == "superseded_version"
    d.drain()
    assert [batch.groups[0].policy_version for batch in d.batches] == [2]


# ---------------------------------------------------------------------- age and capacity


def test_a_sealed_group_becomes_too_old_while_it_waits_for_its_batch() -> None:
    d = driver(max_age_s=5.0, batch_rollouts=100)
    pair(d)
    d.advance(5_000)
    assert d.drops == []
    assert d.fold.next_deadline_ms == 5_001
    d.advance(1)
    assert set(reasons(d).values()) == {"too_old"}


def single_bytes(**fields: Any) -> int:
    """Return the memory that a group of one rollout counts for."""
    d = driver()
    d.pipe(example_rollout("0a", 1.0, **fields))
    return d.fold.held_bytes


def test_beyond_capacity_the_oldest_incomplete_group_is_dropped() -> None:
    size = single_bytes()
    d = driver(capacity_bytes=2 * size, batch_rollouts=100)
    for example_id in ("0", "1", "2"):
        d.pipe(example_rollout(f"{example_id}a", 1.0, example_id=example_id))
    assert [(drop.uid, drop.reason) for drop in d.drops] == [("0a", "capacity")]
    assert d.fold.held_bytes == 2 * size
    d.pipe(example_rollout("2b", 0.0, example_id="2"))
    assert [drop.uid for drop in d.drops] == ["0a", "1a"]
    d.drain()
    assert uids(d) == [("2a", "2b")]
    assert d.fold.held_bytes == 0


def test_beyond_remembered_bytes_the_oldest_groups_are_forgotten_also_after_a_crash() -> None:
    d = driver(remembered_bytes=2_000)
    for number in range(4):
        pair(d, str(number))
        d.advance(1)
    assert d.journal[-1].remembered_since_ms == 2
    for _ in range(2):
        d.crash_and_restore()
        d.pipe(example_rollout("3c", 1.0, example_id="3"))
        d.pipe(example_rollout("2c", 1.0, example_id="2"))
        assert [drop.reason for drop in d.drops[-2:]] == ["late", "late"]
    d.pipe(example_rollout("1a", 1.0, example_id="1"))
    assert d.fold.open_groups == 1


# ---------------------------------------------------------------------- the other drop reasons


def test_a_uid_twice_in_a_group_is_a_duplicate() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    again = d.pipe(example_rollout("a", 0.5))
    d.pipe(example_rollout("b", 0.0))
    assert reasons(d) == {again: "duplicate_uid"}
    assert d.batches[0].rewards.tolist() == [1.0, 0.0]


def test_a_finished_group_is_forgotten_beyond_the_horizon() -> None:
    d = driver(horizon_s=10.0)
    pair(d)
    d.advance(10_000)
    d.pipe(example_rollout("0a", 1.0))
    assert [drop.reason for drop in d.drops] == ["late"]
    d.advance(1)
    d.pipe(example_rollout("0a", 1.0))
    assert d.fold.open_groups == 1


def test_excluded_environments_and_workers_are_dropped_when_they_seal() -> None:
    d = driver(exclude_environments=("env",))
    pair(d)
    assert set(reasons(d).values()) == {"excluded"}
    d = driver(exclude_workers=("bad",))
    d.pipe(example_rollout("a", 1.0, metadata=RolloutMetadata(worker_id="bad")))
    d.pipe(example_rollout("b", 0.0))
    assert {drop.detail for drop in d.drops} == {"worker bad is excluded"}


def test_a_group_that_fits_no_batch_is_too_large() -> None:
    d = driver(batch_bytes=1_000)
    pair(d, tokens=np.zeros(100, "<i4"))
    assert set(reasons(d).values()) == {"too_large"}
    pair(d, "1")
    assert len(d.batches) == 1


def test_a_rollout_on_a_partition_its_key_does_not_belong_to_is_dropped() -> None:
    home = partition_of(encode_key("env", "0"), 2)
    d = GroupingTestDriver(partition=1 - home, partitions=2)
    d.pipe(example_rollout("a", 1.0))
    assert d.drops[0].reason == "wrong_partition"
    assert d.drops[0].detail == f"its key belongs on partition {home}"


def test_a_rollout_under_another_key_is_invalid() -> None:
    d = driver()
    d.pipe(InputRecord(0, 0, encode_key("env", "1"), encode(example_rollout("a", 1.0))))
    d.pipe(InputRecord(1, 0, None, encode(example_rollout("a", 1.0))))
    assert [drop.reason for drop in d.drops] == ["invalid", "invalid"]
    assert """["env","0"]""" in d.drops[0].detail


def test_filtered_sampling_is_invalid_unless_allowed() -> None:
    filtered = {"sampling": SamplingParams(top_p=0.9)}
    d = driver()
    d.pipe(example_rollout("a", 1.0, **filtered))
    assert "grouping.allow_filtered_sampling" in d.drops[0].detail
    d = driver(allow_filtered_sampling=True)
    pair(d, **filtered)
    assert len(d.batches) == 1


def test_filtered_sampling_is_trained_on_with_the_tokens_that_the_filters_kept() -> None:
    sampling = SamplingParams(top_p=0.9)
    tokens = NamedArray.of(np.array([1, 2, 3], "<i4"))
    counts = {
        name: NamedArray.of(np.array(each, "<i4")) for name, each in (("all", [0, 0, 1, 2]), ("one", [0, 0, 3, 0]))
    }
    masks = {name: {"sampling_mask": tokens, "sampling_mask_counts": each} for name, each in counts.items()}
    d = driver()
    d.pipe(example_rollout("a", 1.0, sampling=sampling, token_arrays=masks["one"]))
    d.pipe(example_rollout("b", 1.0, sampling=sampling, token_arrays=masks["all"], logprobs_mode="raw"))
    d.pipe(example_rollout("c", 1.0, sampling=sampling, token_arrays={"sampling_mask": tokens}))
    assert ["sampled with" in drop.detail for drop in d.drops] == [True, True, False]
    d = driver()
    pair(d, sampling=sampling, token_arrays=masks["all"])
    assert len(d.batches) == 1


def test_a_member_that_declares_another_group_size_is_invalid() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    d.pipe(example_rollout("b", 0.0, group_size=3))
    assert d.drops[0].detail == "group_size 3, where group env/0@0 declared 2"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"logprobs": np.zeros(3, "<f4")}, "logprobs has 3 entries for 4 tokens"),
        ({"uid": ""}, "uid has 0 characters; it must have 1 to 512"),
    ],
)
def test_an_invalid_rollout_is_dropped_and_the_drop_names_the_fault(fields: dict[str, Any], words: str) -> None:
    d = driver()
    d.pipe(example_rollout(**{"uid": "a", "reward": 1.0, **fields}))
    (drop,) = d.drops
    assert drop.reason == "invalid"
    assert words in drop.detail


def test_an_undecodable_record_is_a_dead_letter_with_its_bytes_untouched() -> None:
    d = driver()
    sound = encode(example_rollout("a", 1.0))
    poison = [None, b"", b"garbage", sound[:-1], sound + b"\x00", b"\xc3\x01" + bytes(8) + b"x"]
    for value in poison:
        d.pipe(value)
    assert [letter.record.value for letter in d.dead_letters] == poison
    assert [letter.record.offset for letter in d.dead_letters] == list(range(6))
    assert "not an Avro single-object frame" in d.dead_letters[0].error
    assert "unknown schema fingerprint" in d.dead_letters[-1].error
    assert fates(d) == {"dead_lettered": 6}
    pair(d)
    assert len(d.batches) == 1


def test_the_texts_of_a_drop_are_cut_to_the_limits_of_the_journal() -> None:
    d = driver()
    d.pipe(InputRecord(0, 0, b"k" * 100_000, encode(example_rollout("u" * 100_000, 1.0, environment="e" * 100_000))))
    d.pipe(InputRecord(1, 0, b"k" * 100_000, encode(example_rollout("a", 1.0))))
    d.pipe(b"\xc3\x01" + b"x" * 100_000)
    assert len(encode(d.journal[-1])) < 5_000
    assert len(d.dead_letters[0].error) < 500

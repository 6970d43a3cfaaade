"""Every reason to drop a record or a group, one small log per test; staleness, age and capacity among them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Mark, Rollout, RolloutMetadata, SamplingParams
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key, partition_of
from tests.support.pairs import cancelled, driver, fates, pair, reasons, uids

# ---------------------------------------------------------------------- policy clock


def test_a_group_of_a_future_version_waits_sealed_until_the_clock_gets_there() -> None:
    d = driver(policy_version=-1)
    pair(d, policy_version=1)
    d.publish_policy_version(0)
    assert d.batches == []
    assert d.fold.open_groups == 0
    d.publish_policy_version(1)
    assert uids(d) == [("0a", "0b")]


def test_a_group_the_clock_never_reaches_is_dropped_at_its_deadline() -> None:
    d = driver(future_deadline_s=3.0)
    pair(d, policy_version=1)
    d.advance(3_000)
    assert set(reasons(d).values()) == {"future_version"}
    d.publish_policy_version(1)
    assert d.batches == []


def test_staleness_is_measured_from_the_lowest_sampled_version_when_the_group_seals() -> None:
    d = driver(policy_version=5, max_policy_lag=2)
    d.pipe(example_rollout("a", 1.0, policy_version=5, lowest_version=2))
    assert d.drops == []
    d.pipe(example_rollout("b", 0.0, policy_version=5))
    assert {drop.reason for drop in d.drops} == {"stale_version"}
    assert d.drops[0].detail == "sampled 3 versions before 5"
    assert [drop.lowest_version for drop in d.drops] == [2, 5]


def test_a_move_of_the_clock_drops_stale_sealed_groups_and_no_open_ones() -> None:
    d = driver(max_policy_lag=1, batch_rollouts=100)
    pair(d, "0")
    d.pipe(example_rollout("1a", 1.0, example_id="1"))
    d.publish_policy_version(1)
    assert d.drops == []
    d.publish_policy_version(2)
    assert [drop.uid for drop in d.drops] == ["0a", "0b"]
    assert d.fold.open_groups == 1
    d.pipe(example_rollout("1b", 0.0, example_id="1"))
    assert [drop.uid for drop in d.drops] == ["0a", "0b", "1a", "1b"]


def test_the_policy_clock_never_goes_back() -> None:
    d = driver(policy_version=3)
    d.publish_policy_version(2)
    d.pipe(Mark(kind="deadline", policy_version=1))
    assert d.fold.policy_version == 3
    d.pipe(Mark(kind="deadline", policy_version=4))
    assert d.fold.policy_version == 4


def test_no_limit_of_lag_keeps_old_groups() -> None:
    d = driver(policy_version=1_000, max_policy_lag=-1)
    pair(d)
    assert len(d.batches) == 1


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


def newer(policy_version: int, second: float = 0.0, worker_id: str = "") -> list[Rollout]:
    metadata = RolloutMetadata(worker_id=worker_id)
    return [
        example_rollout(uid, reward, policy_version=policy_version, metadata=metadata)
        for uid, reward in (("c", 1.0), ("d", second))
    ]


NOT_OFFERED = {
    "ahead of the policy clock": newer(99),
    "equal rewards": newer(3, 1.0),
    "an excluded worker": newer(3, worker_id="bad"),
}


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("rejected", NOT_OFFERED.values(), ids=NOT_OFFERED)
def test_a_newer_group_supersedes_others_once_it_is_offered_for_batches(rejected: list[Rollout], crashes: bool) -> None:
    d = driver(policy_version=3, drop_superseded=True, batch_rollouts=100, exclude_workers=("bad",))
    pair(d, policy_version=2)
    for rollout in rejected:
        d.pipe(rollout)
    if crashes:
        d.commit(snapshot=True)
        d.crash_and_restore()
    pair(d, policy_version=1, group_id="later")
    d.drain()
    superseded = [drop.policy_version for drop in d.drops if drop.reason == "superseded_version"]
    assert superseded == [1, 1]


@pytest.mark.parametrize("versions", [(4, 5), (5, 4)])
@pytest.mark.parametrize("crashes", [False, True])
def test_a_group_that_waited_for_its_version_supersedes_others_when_it_is_released(
    versions: tuple[int, int], crashes: bool
) -> None:
    d = driver(policy_version=3, drop_superseded=True, batch_rollouts=100)
    for version in (3, *versions):
        pair(d, policy_version=version)
    assert d.drops == []
    if crashes:
        d.commit(snapshot=True)
        d.crash_and_restore()
    d.publish_policy_version(5)
    pair(d, policy_version=4, group_id="later")
    d.drain()
    assert set(reasons(d).values()) == {"superseded_version"}
    assert [drop.policy_version for drop in d.drops] == [*(3, 3, 4, 4), 4, 4]
    assert [batch.groups[0].policy_version for batch in d.batches] == [5]


def test_groups_of_one_version_do_not_supersede_each_other() -> None:
    d = driver(drop_superseded=True)
    pair(d, group_id="g")
    pair(d, group_id="h")
    assert len(d.batches) == 2


def test_by_default_nothing_is_superseded() -> None:
    d = driver(policy_version=2)
    pair(d, policy_version=2)
    pair(d, policy_version=1)
    assert len(d.batches) == 2


# ---------------------------------------------------------------------- age and capacity


def test_a_group_that_took_longer_than_max_age_to_seal_is_too_old() -> None:
    d = driver(max_age_s=5.0)
    d.pipe(example_rollout("a", 1.0))
    d.pipe(example_rollout("b", 0.0), at_ms=5_001)
    assert set(reasons(d).values()) == {"too_old"}


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


def test_beyond_capacity_groups_that_wait_for_the_clock_are_dropped_after_the_incomplete_ones() -> None:
    d = driver()
    pair(d, "0", policy_version=1)
    size = d.fold.held_bytes
    d = driver(capacity_bytes=size * 7 // 4)
    pair(d, "0", policy_version=1)
    d.pipe(example_rollout("1a", 1.0, example_id="1", group_size=3))
    d.pipe(example_rollout("1b", 1.0, example_id="1", group_size=3))
    assert [drop.uid for drop in d.drops] == ["1a", "1b"]
    pair(d, "2", policy_version=1)
    assert [drop.uid for drop in d.drops] == ["1a", "1b", "0a", "0b"]
    assert d.fold.held_bytes == size


def test_groups_opened_by_cancellations_count_for_the_capacity_and_are_dropped_beyond_it() -> None:
    d = driver(capacity_bytes=30_000)
    for number in range(100):
        uids = tuple(f"{number}-{i}" for i in range(20))
        d.pipe(replace(cancelled(*uids, size=30), example_id=str(number)))
        assert d.fold.held_bytes <= 30_000
    assert 0 < d.fold.open_groups < 10
    d.crash_and_restore()
    assert 0 < d.fold.held_bytes <= 30_000
    assert fates(d)["control"] + d.fold.in_flight == 100


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


def test_an_instant_with_too_many_finished_groups_is_forgotten_whole() -> None:
    d = driver(remembered_bytes=2_000)
    for number in range(4):
        pair(d, str(number))
    pair(d, "0")
    assert len(d.batches) == 5
    assert d.drops == []
    d.crash_and_restore()
    d.advance(1)
    pair(d, "0")
    pair(d, "0")
    assert [drop.reason for drop in d.drops] == ["late", "late"]


# ---------------------------------------------------------------------- the other drop reasons


def test_a_uid_twice_in_a_group_is_a_duplicate() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    again = d.pipe(example_rollout("a", 0.5))
    d.pipe(example_rollout("b", 0.0))
    assert reasons(d) == {again: "duplicate_uid"}
    assert d.batches[0].rewards.tolist() == [1.0, 0.0]


def test_a_uid_again_after_its_group_finished_is_late() -> None:
    d = driver()
    pair(d)
    again = d.pipe(example_rollout("0a", 1.0))
    assert reasons(d) == {again: "late"}


def test_a_uid_again_while_its_sealed_group_waits_is_a_duplicate_and_a_new_one_late() -> None:
    d = driver(batch_rollouts=100)
    pair(d)
    again, new = d.pipe(example_rollout("0a", 1.0)), d.pipe(example_rollout("c", 1.0))
    assert reasons(d) == {again: "duplicate_uid", new: "late"}


def test_a_finished_group_is_forgotten_beyond_the_horizon() -> None:
    d = driver(horizon_s=10.0)
    pair(d)
    d.advance(10_000)
    d.pipe(example_rollout("0a", 1.0))
    assert [drop.reason for drop in d.drops] == ["late"]
    d.advance(1)
    d.pipe(example_rollout("0a", 1.0))
    assert d.fold.open_groups == 1


def test_a_group_without_variance_is_dropped_whole() -> None:
    d = driver()
    d.pipe(example_rollout("a", 0.3))
    d.pipe(example_rollout("b", 0.3))
    assert reasons(d) == {0: "zero_variance", 1: "zero_variance"}


def test_a_group_smaller_than_min_group_size_is_dropped_though_complete() -> None:
    d = driver(min_group_size=3)
    pair(d)
    assert set(reasons(d).values()) == {"group_too_small"}


def test_excluded_environments_and_workers_are_dropped_when_they_seal() -> None:
    d = driver(exclude_environments=("env",))
    pair(d)
    assert set(reasons(d).values()) == {"excluded"}
    d = driver(exclude_workers=("bad",))
    d.pipe(example_rollout("a", 1.0, metadata=RolloutMetadata(worker_id="bad")))
    d.pipe(example_rollout("b", 0.0))
    assert {drop.detail for drop in d.drops} == {"worker bad is excluded"}


def test_a_group_with_a_member_at_an_excluded_offset_is_dropped_whole() -> None:
    d = driver(exclude_offsets=("0:0", "0:3-9", "1:5"))
    for example_id in "012":
        pair(d, example_id)
    assert [drop.offset for drop in d.drops] == [0, 1, 2, 3, 4, 5]
    assert {drop.detail for drop in d.drops} == {"offset 0 is excluded", "offset 3 is excluded", "offset 4 is excluded"}
    d = driver(exclude_offsets=("1:0-9",))
    pair(d)
    assert len(d.batches) == 1


def test_a_later_exclusion_drops_sealed_groups_at_once_and_open_ones_when_they_seal() -> None:
    d = driver(batch_rollouts=100)
    pair(d, "0")
    d.pipe(example_rollout("1a", 1.0, example_id="1"))
    pair(d, "2")
    d.configure(GroupingConfig(batch_rollouts=100, exclude_offsets=("0:1-2",)))
    assert [drop.offset for drop in d.drops] == [0, 1]
    d.commit()
    d.crash_and_restore()
    late = d.pipe(example_rollout("1b", 0.0, example_id="1"))
    assert [drop.offset for drop in d.drops] == [0, 1, 2, late]
    d.drain()
    assert uids(d) == [("2a", "2b")]


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


def test_a_member_that_declares_another_group_size_is_invalid() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    d.pipe(example_rollout("b", 0.0, group_size=3))
    assert d.drops[0].detail == "group_size 3, where group env/0@0 declared 2"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": float("nan")}, "reward is nan"),
        ({"reward": 1e300}, "reward is 1e+300"),
        ({"policy_version": -1, "lowest_version": 0}, "policy_version is -1"),
        ({"tokens": np.array([], "<i4")}, "tokens is empty"),
        ({"logprobs": np.zeros(3, "<f4")}, "logprobs has 3 entries for 4 tokens"),
        ({"logprobs": np.array([0, 0, np.nan, 0], "<f4")}, "logprobs holds NaN or infinity"),
        ({"branches": 2}, "it is one of 2 branches but has no episode_uid"),
        ({"uid": ""}, "uid has 0 characters; it must have 1 to 512"),
    ],
)
def test_an_invalid_rollout_is_dropped_and_the_drop_names_the_fault(fields: dict[str, Any], words: str) -> None:
    d = driver()
    d.pipe(example_rollout(**{"uid": "a", "reward": 1.0, **fields}))
    (drop,) = d.drops
    assert drop.reason == "invalid"
    assert words in drop.detail


def test_records_of_other_topics_are_invalid() -> None:
    d = driver()
    pair(d)
    d.pipe(encode(d.batches[0]))
    assert d.drops[0].detail == "a TrainingBatch does not belong in rollouts"


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

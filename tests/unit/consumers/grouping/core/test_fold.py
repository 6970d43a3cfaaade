"""Groups complete, seal at deadlines and shrink by cancellation, and batches are cut; one small log per test."""

from typing import Any

import numpy as np

from rollstream.consumers.buffers.rollouts.rows import rollouts_of
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.makers.batch_maker import group_bytes, row_bytes
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Mark, NamedArray, Rollout, TrainingBatch
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key, partition_of
from rollstream.topics.wire.rl_examples import REFERENCE, examples_of
from tests.support.pairs import cancelled, driver, fates, pair, reasons, uids

# ---------------------------------------------------------------------- completion and cutting


def test_a_group_is_batched_when_its_last_member_comes() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    assert d.batches == []
    d.pipe(example_rollout("b", 0.0))
    (batch,) = d.batches
    assert batch.batch_id == "0-0"
    assert batch.uids == ("a", "b")
    assert batch.source_offsets.tolist() == [0, 1]
    assert batch.cut == "size"
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_a_batch_waits_for_enough_rollouts_of_whole_groups() -> None:
    d = driver(batch_rollouts=3)
    pair(d, "0")
    assert d.batches == []
    pair(d, "1")
    assert uids(d) == [("0a", "0b", "1a", "1b")]


def test_groups_differ_by_environment_example_version_and_group_id() -> None:
    d = driver()
    for fields in ({}, {"environment": "x"}, {"example_id": "x"}, {"policy_version": 1}, {"group_id": "x"}):
        d.pipe(example_rollout("a", 1.0, **fields))
    assert d.batches == []
    assert d.fold.open_groups == 5


def test_a_batch_never_mixes_rollouts_of_two_groups_into_one() -> None:
    d = driver(batch_rollouts=4)
    first, second = {"example_id": "0"}, {"example_id": "1"}
    for uid, reward, fields in [("a", 1.0, first), ("b", 0.0, second), ("c", 0.0, first), ("d", 1.0, second)]:
        d.pipe(example_rollout(uid, reward, **fields))
    (batch,) = d.batches
    assert [group.example_id for group in batch.groups] == ["0", "1"]
    assert batch.uids == ("a", "c", "b", "d")
    assert batch.group_index.tolist() == [0, 0, 1, 1]


def test_a_batch_is_cut_when_its_oldest_group_has_waited_max_batch_age() -> None:
    d = driver(batch_rollouts=100, max_batch_age_s=5.0)
    pair(d)
    d.advance(4_999)
    assert d.batches == []
    assert d.fold.next_deadline_ms == 5_000
    d.advance(1)
    (batch,) = d.batches
    assert batch.cut == "age"
    assert batch.cut_ms == 5_000


def test_groups_that_a_drain_releases_leave_in_batches_of_the_configured_size() -> None:
    d = driver(batch_rollouts=4)
    for number in range(5):
        pair(d, str(number), policy_version=1)
    d.pipe(Mark(kind="drain", policy_version=1))
    assert [len(batch.rewards) for batch in d.batches] == [4, 4, 2]


def test_a_batch_that_is_full_is_not_cut_by_age() -> None:
    d = driver(batch_rollouts=4, min_group_size=2, group_deadline_s=5.0, max_batch_age_s=10.0)
    pair(d, "aged")
    for number in range(4):
        d.now_ms = 1000 * number
        pair(d, str(number), group_size=3)
    d.advance(20_000)  # The aged group is due, after the others have sealed.
    assert [(batch.cut, len(batch.rewards)) for batch in d.batches] == [("size", 4), ("size", 4)]


def test_a_batch_holds_no_more_than_batch_bytes() -> None:
    config = GroupingConfig(batch_rollouts=100, batch_bytes=2_000)
    d = GroupingTestDriver(config)
    for i in range(30):
        pair(d, str(i), tokens=np.arange(20, dtype="<i4"))
    d.drain()
    assert len(d.batches) > 5
    assert sum(len(batch) for batch in d.batches) == 60
    for batch in d.batches:
        assert len(encode(batch)) <= config.batch_bytes + 512
        assert batch.cut in ("size", "drain")


def test_a_drain_cuts_sealed_groups_and_cancels_open_ones() -> None:
    d = driver(batch_rollouts=100)
    pair(d, "0")
    d.pipe(example_rollout("1a", 1.0, example_id="1"))
    d.drain()
    assert uids(d) == [("0a", "0b")]
    assert d.batches[0].cut == "drain"
    assert [(drop.reason, drop.detail) for drop in d.drops] == [
        ("cancelled", "the run was drained before every member had come")
    ]
    assert d.fold.open_groups == d.fold.in_flight == 0
    d.pipe(example_rollout("1b", 0.0, example_id="1"))
    assert d.drops[-1].reason == "late"


def test_members_without_trained_tokens_and_truncated_ones_are_batched() -> None:
    d = driver()
    nothing = np.zeros(4, "|b1")
    d.pipe(example_rollout("a", 1.0, loss_mask=nothing))
    d.pipe(example_rollout("b", 0.0, truncated=True))
    (batch,) = d.batches
    assert not batch.loss_mask[:4].any()
    assert batch.truncated.tolist() == [False, True]


def test_members_with_an_advantage_of_zero_stay_in_a_group_with_variance() -> None:
    d = driver(batch_rollouts=3)
    for uid, reward in [("a", 0.0), ("b", 1.0), ("c", 0.5)]:
        d.pipe(example_rollout(uid, reward, group_size=3))
    (batch,) = d.batches
    assert batch.advantages.reshape(3, 4)[:, 0].tolist() == [-0.75, 0.75, 0.0]


REFERENCES = {REFERENCE: NamedArray.of(np.array([0.0, 0.0, -1.0, -2.0], "<f2"))}


def some_with_references(d: GroupingTestDriver) -> TrainingBatch:
    """Return a batch of two groups; the first carries reference log-probabilities."""
    pair(d, "0", token_arrays=REFERENCES)
    pair(d, "1")
    (batch,) = d.batches
    return batch


def test_reference_log_probs_are_batched_with_the_rows_that_have_them() -> None:
    batch = some_with_references(driver(batch_rollouts=4))
    np.testing.assert_array_equal(batch.reference_logprobs, np.array([0.0, 0.0, -1.0, -2.0] * 2 + [np.nan] * 8, "<f4"))
    references = [example.reference_log_probs for example in examples_of(batch)]
    assert [None if reference is None else reference.tolist() for reference in references] == [
        [0.0, 0.0, -1.0, -2.0],
        [0.0, 0.0, -1.0, -2.0],
        None,
        None,
    ]
    assert [REFERENCE in r.token_arrays for r, _ in rollouts_of(batch, int)] == [True, True, False, False]


def test_no_row_keeps_reference_log_probs_if_the_batch_has_no_room_for_nan_in_the_others() -> None:
    rows = 2 * row_bytes(4, "0a", True) + 2 * row_bytes(4, "1a", False)
    full = rows + 2 * group_bytes("env", "0", "")
    for room, length in ((2 * 4 * 4, 16), (2 * 4 * 4 - 1, 0)):
        batch = some_with_references(driver(batch_rollouts=4, batch_bytes=full + room))
        assert len(batch.reference_logprobs) == length


# ---------------------------------------------------------------------- deadlines


def test_an_incomplete_group_is_dropped_at_its_deadline() -> None:
    d = driver(group_deadline_s=10.0)
    d.pipe(example_rollout("a", 1.0))
    d.advance(9_999)
    assert d.drops == []
    d.advance(1)
    (drop,) = d.drops
    assert (drop.reason, drop.detail, drop.age_ms) == ("group_too_small", "1 of 2 members at the deadline", 10_000)


def test_at_its_deadline_a_group_seals_with_min_group_size() -> None:
    d = driver(group_deadline_s=10.0, min_group_size=2)
    for uid, reward in [("a", 1.0), ("b", 0.0)]:
        d.pipe(example_rollout(uid, reward, group_size=8))
    d.advance(10_000)
    (batch,) = d.batches
    assert batch.groups[0].size == 2
    assert batch.groups[0].sealed_ms == 10_000
    late = d.pipe(example_rollout("c", 0.0, group_size=8))
    assert reasons(d) == {late: "late"}


def test_a_deadline_passed_by_a_rollout_fires_before_the_rollout_is_read() -> None:
    d = driver(group_deadline_s=10.0)
    first = d.pipe(example_rollout("a", 1.0))
    second = d.pipe(example_rollout("b", 0.0), at_ms=10_000)
    assert reasons(d) == {first: "group_too_small", second: "late"}


def test_stream_time_never_goes_back() -> None:
    d = driver(group_deadline_s=10.0)
    d.pipe(example_rollout("a", 1.0), at_ms=5_000)
    d.pipe(example_rollout("b", 0.0), at_ms=100)
    (batch,) = d.batches
    assert batch.groups[0].opened_ms == batch.groups[0].sealed_ms == 5_000
    assert d.fold.stream_time_ms == 5_000


# ---------------------------------------------------------------------- cancellation


def test_a_cancellation_shrinks_the_group() -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0, group_size=3))
    d.pipe(example_rollout("b", 0.0, group_size=3))
    assert d.batches == []
    offset = d.pipe(cancelled("c", size=3))
    assert uids(d) == [("a", "b")]
    assert d.drops == []
    assert fates(d) == {"batched": 2, "control": 1}
    assert offset == 2


def test_a_cancellation_before_any_member_opens_the_group() -> None:
    d = driver()
    d.pipe(cancelled("c", size=3))
    assert d.fold.in_flight == 1
    d.pipe(example_rollout("a", 1.0, group_size=3))
    came = d.pipe(example_rollout("c", 1.0, group_size=3))
    d.pipe(example_rollout("b", 0.0, group_size=3))
    assert uids(d) == [("a", "b")]
    assert reasons(d) == {came: "cancelled"}


def test_a_member_cancelled_after_it_arrived_finishes_with_its_group() -> None:
    d = driver()
    gone = d.pipe(example_rollout("c", 1.0, group_size=3))
    d.pipe(cancelled("c", size=3))
    assert d.drops == []
    assert d.fold.in_flight == 2
    d.pipe(example_rollout("a", 1.0, group_size=3))
    d.pipe(example_rollout("b", 0.0, group_size=3))
    assert uids(d) == [("a", "b")]
    assert reasons(d) == {gone: "cancelled"}
    assert d.fold.in_flight == 0
    assert d.fold.held_bytes == 0


def test_cancelling_a_uid_again_changes_nothing() -> None:
    d = driver()
    for names in (("c",), ("c", "c"), ("c",)):
        d.pipe(cancelled(*names, size=4))
    pair(d, group_size=4)
    assert d.batches == []
    d.pipe(cancelled("c", "d", size=4))
    assert uids(d) == [("0a", "0b")]


def test_a_group_is_dropped_if_all_its_members_are_cancelled() -> None:
    d = driver()
    came = d.pipe(example_rollout("a", 1.0))
    d.pipe(cancelled("a", "b"))
    late = d.pipe(example_rollout("b", 0.0))
    assert reasons(d) == {came: "cancelled", late: "late"}
    assert fates(d) == {"dropped:cancelled": 1, "dropped:late": 1, "control": 1}


def test_a_cancellation_of_a_finished_group_does_nothing() -> None:
    d = driver()
    pair(d)
    d.pipe(cancelled("0a"))
    assert uids(d) == [("0a", "0b")]
    assert fates(d) == {"batched": 2, "control": 1}


def test_an_invalid_cancellation_is_dropped_under_its_environment() -> None:
    d = driver()
    d.pipe(cancelled())
    (drop,) = d.drops
    assert (drop.reason, drop.detail) == ("invalid", "uids is empty, or holds an empty uid")
    assert drop.environment == "env"


def test_a_cancellation_on_another_partition_or_under_another_key_opens_no_group() -> None:
    d = GroupingTestDriver(GroupingConfig(), partition=1 - partition_of(encode_key("env", "0"), 2), partitions=2)
    d.pipe(cancelled("a"))
    d.pipe(InputRecord(1, 0, b"other", encode(cancelled("a"))))
    assert list(reasons(d).values()) == ["wrong_partition", "invalid"]
    assert d.fold.open_groups == 0


# ---------------------------------------------------------------------- branches


def branch(uid: str, episode: str, index: int, branches: int = 2, **fields: Any) -> Rollout:
    reward = float(episode == "e")
    return example_rollout(uid, reward, episode_uid=episode, branch=index, branches=branches, **fields)


def test_a_group_is_complete_when_every_branch_of_its_episodes_arrived() -> None:
    d = driver()
    d.pipe(branch("a", "e", 0))
    d.pipe(branch("b", "f", 0))
    d.pipe(branch("c", "e", 1))
    assert d.batches == []
    d.pipe(branch("d", "f", 1))
    assert uids(d) == [("a", "b", "c", "d")]


def test_the_branches_of_an_episode_are_cancelled_together() -> None:
    d = driver()
    d.pipe(branch("a", "e", 0, group_size=3))
    d.pipe(cancelled("a", size=3))
    came = d.pipe(branch("b", "e", 1, group_size=3))
    pair(d, group_size=3)
    assert uids(d) == [("0a", "0b")]
    assert reasons(d) == {came: "cancelled", 0: "cancelled"}


def test_a_branch_that_arrived_before_is_invalid() -> None:
    d = driver()
    d.pipe(branch("a", "e", 0))
    again = d.pipe(branch("b", "e", 0))
    other = d.pipe(branch("c", "e", 1, branches=3))
    assert reasons(d) == {again: "invalid", other: "invalid"}

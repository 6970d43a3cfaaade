"""Groups complete, seal at deadlines and shrink by cancellation, and batches are cut; one small log per test."""

from typing import Any

import numpy as np

from rollstream.consumers.buffers.rollouts.rows import rollouts_of
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.makers.batch_maker import group_bytes, row_bytes
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Mark, NamedArray, Rollout, TrainingBatch
from rollstream.topics.wire.codec import encode
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

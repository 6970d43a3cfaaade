"""The migration: rollouts that old readers accept by batch, and those that the buffer accepts one by one.

The same groups written in both forms; where they differ, and where they must not.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import OldMetadata, OldRollout, Rollout, RolloutBatch, RolloutMetadata
from rollstream.topics.wire.codec import decode_as, encode
from tests.support.old_form import old_form

STEP, NOW = 10, 10_000.0
MAX_STEPS, MAX_AGE_S = 2, 100.0


def is_fresh(weight_step: int, timestamp: float) -> bool:
    """The rule of both, on its own: a rollout exactly at the age limit is stale, and one of a step to come is fresh."""
    return weight_step >= STEP - MAX_STEPS and timestamp > NOW - MAX_AGE_S


def old_reader(batch: RolloutBatch) -> list[OldRollout]:
    """Rollouts that a reader of the old form trains on: all of a batch if its own metadata is fresh, else none."""
    metadata = batch.metadata[0]
    fresh = is_fresh(metadata.weight_step, metadata.timestamp)
    return [rollout for group in batch.groups for rollout in group.rollouts] if fresh else []


def new_reader(groups: list[list[Rollout]]) -> set[str]:
    """Uids of the groups that the rollout buffer holds."""
    return {entry.rollout.uid for entry in _drawn(groups)}


def _drawn(batch: RolloutBatch | list[list[Rollout]]) -> list[object]:
    buffer = RolloutReplayBuffer(
        local_batch_size=1,
        max_samples=-1,
        max_rollout_step_delay=MAX_STEPS,
        max_rollout_timestamp_delay=MAX_AGE_S,
        clock=lambda: NOW,
    )
    buffer.set_current_step(STEP)
    buffer.add_batches([batch])
    return list(buffer.sample(buffer.size()) or []) if buffer.size() else []


def made(uid: str, weight_step: int, age_s: float) -> Rollout:
    metadata = RolloutMetadata(worker_id="w", timestamp=NOW - age_s, weight_step=weight_step)
    return example_rollout(uid, float(len(uid) % 2), metadata=metadata)


def both_forms(groups: list[list[Rollout]]) -> RolloutBatch:
    """The batch of an old worker: the metadata of its first rollout stand for all."""
    facts = groups[0][0].metadata
    metadata = OldMetadata(worker_id=facts.worker_id, timestamp=facts.timestamp, weight_step=facts.weight_step)
    return decode_as(RolloutBatch, encode(old_form(groups, metadata)))


def without_own_metadata(batch: RolloutBatch) -> RolloutBatch:
    groups = tuple(
        replace(group, rollouts=tuple(replace(rollout, metadata=()) for rollout in group.rollouts))
        for group in batch.groups
    )
    return replace(batch, groups=groups)


@pytest.mark.parametrize(
    ("weight_step", "age_s", "fresh"),
    [(10, 0.0, True), (8, 99.0, True), (7, 0.0, False), (11, 0.0, True), (10, 100.0, False), (7, 100.0, False)],
)
def test_a_batch_of_one_step_and_time_is_admitted_by_both_or_by_neither(
    weight_step: int, age_s: float, fresh: bool
) -> None:
    groups = [[made("a", weight_step, age_s), made("bb", weight_step, age_s)]]
    assert len(old_reader(both_forms(groups))) == (2 if fresh else 0)
    assert new_reader(groups) == ({"a", "bb"} if fresh else set())


def test_old_readers_trained_on_stale_members_of_a_batch_with_fresh_metadata() -> None:
    groups = [[made("a", 10, 0), made("bb", 3, 0)], [made("c", 10, 500), made("dd", 9, 50)]]
    assert len(old_reader(both_forms(groups))) == 4
    assert new_reader(groups) == {"a", "dd"}


def test_old_readers_lost_fresh_members_of_a_batch_with_stale_metadata() -> None:
    groups = [[made("a", 3, 0), made("bb", 10, 0)], [made("c", 10, 0), made("dd", 9, 50)]]
    assert old_reader(both_forms(groups)) == []
    assert new_reader(groups) == {"bb", "c", "dd"}


def test_rollouts_without_metadata_are_judged_by_that_of_their_batch() -> None:
    groups = [[made("a", 10, 0), made("bb", 3, 0)]]
    batch = without_own_metadata(both_forms(groups))
    assert len(_drawn(batch)) == len(old_reader(batch)) == 2
    assert len(_drawn(both_forms(groups))) == 1, "with its own, each is judged by that"


def test_data_without_any_metadata_is_stale() -> None:
    batch = replace(without_own_metadata(both_forms([[made("a", 10, 0)]])), metadata=())
    assert _drawn(batch) == []


@settings(max_examples=settings().max_examples // 2)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(5, 12), st.sampled_from([0.0, 99.0, 100.0, 101.0])), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_new_readers_accept_exactly_the_fresh_rollouts_and_old_ones_all_or_none(
    picks: list[list[tuple[int, float]]],
) -> None:
    groups = [[made(f"{g}-{m}", *pick) for m, pick in enumerate(group)] for g, group in enumerate(picks)]
    fresh = {r.uid for group in groups for r in group if is_fresh(r.metadata.weight_step, r.metadata.timestamp)}
    everything = sum(map(len, groups))
    assert new_reader(groups) == fresh
    admitted = len(old_reader(both_forms(groups)))
    assert admitted == (everything if groups[0][0].uid in fresh else 0)
    if len({(r.metadata.weight_step, r.metadata.timestamp) for group in groups for r in group}) == 1:
        assert admitted == len(fresh), "only mixed batches differ"

"""Rewards are compared by episode: the branches of an episode have one reward and share one advantage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.topics.records import Rollout, TrainingBatch
from tests.support.pairs import driver, reasons


def branch(episode: str, index: int, branches: int, reward: float, sampled: int = 2, **fields: Any) -> Rollout:
    return example_rollout(
        f"{episode}{index}",
        reward,
        episode_uid=episode,
        branch=index,
        branches=branches,
        tokens=np.arange(sampled + 1, dtype="<i4"),
        loss_mask=np.arange(sampled + 1) > 0,
        **fields,
    )


def advantages(batch: TrainingBatch) -> dict[str, float]:
    """One advantage per row, by uid; every position of a row has the same advantage."""
    advantages = {}
    for row, uid in enumerate(batch.uids):
        (advantages[uid],) = set(batch.advantages[batch.splits[row] : batch.splits[row + 1]].tolist())
    return advantages


def test_an_episode_has_the_mean_reward_of_its_branches_and_they_share_its_advantage() -> None:
    d = driver(batch_rollouts=3)
    for record in (branch("e", 0, 2, 1.0), branch("f", 0, 1, 0.25), branch("e", 1, 2, 0.5)):
        d.pipe(record)
    (batch,) = d.batches
    # Episodes have 0.75 and 0.25: rloo gives 0.5 and -0.5.
    assert advantages(batch) == {"e0": 0.25, "f0": -0.5, "e1": 0.25}
    assert batch.rewards.tolist() == [1.0, 0.25, 0.5], "rows keep their own rewards"


def test_the_share_of_a_missing_branch_is_not_handed_on() -> None:
    d = driver(batch_rollouts=3, min_group_size=2, group_deadline_s=1.0)
    for record in (branch("e", 0, 4, 1.0), branch("f", 0, 1, 0.0), branch("g", 0, 1, 0.5)):
        d.pipe(record.__class__(**{**vars(record), "group_size": 3}))
    d.advance(1_000)
    (batch,) = d.batches
    assert advantages(batch) == {"e0": 0.75 / 4, "f0": -0.75, "g0": 0.0}


def test_the_length_of_an_episode_counts_sampled_tokens_of_all_its_branches() -> None:
    d = driver(batch_rollouts=3, estimator="opo")
    for record in (branch("e", 0, 2, 1.0, 10), branch("e", 1, 2, 1.0, 20), branch("f", 0, 1, 0.0, 10)):
        d.pipe(record)
    (batch,) = d.batches
    # The baseline is (30 * 1 + 10 * 0) / 40 = 3/4.
    assert advantages(batch) == {"e0": 0.125, "e1": 0.125, "f0": -0.75}


def test_episodes_with_equal_rewards_have_no_variance_however_their_branches_differ() -> None:
    d = driver(batch_rollouts=4)
    for record in [branch(e, i, 2, float(i)) for e in "ef" for i in range(2)]:
        d.pipe(record)
    assert set(reasons(d).values()) == {"zero_variance"}


def test_a_batch_is_normalised_with_the_weight_that_branches_share() -> None:
    d = driver(batch_rollouts=3, estimator="reinforce_pp")
    for record in (branch("e", 0, 2, 1.0, 10), branch("e", 1, 2, 1.0, 30), branch("f", 0, 1, 0.0, 5)):
        d.pipe(record)
    (batch,) = d.batches
    # Episodes have 1/2 and -1/2, weighing (10 + 30) / 2 = 20 and 5 tokens: mean 0.3, deviation 0.4.
    assert advantages(batch) == pytest.approx({"e0": 0.25, "e1": 0.25, "f0": -2.0}, rel=1e-6)
    assert batch.advantages[batch.loss_mask].sum() == pytest.approx(0, abs=1e-5)


rewards = st.integers(-8, 8).map(lambda n: n / 8)
groups = st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=2, max_size=5)


def folded(group: Sequence[Sequence[float]], estimator: str) -> dict[str, float]:
    """Advantages of a group of episodes, each given by the rewards of its branches; empty if no batch is cut."""
    d = GroupingTestDriver(GroupingConfig(batch_rollouts=1, estimator=estimator))
    for e, branches in enumerate(group):
        for i, reward in enumerate(branches):
            d.pipe(branch(f"{e}-", i, len(branches), reward, group_size=len(group)))
    return advantages(d.batches[0]) if d.batches else {}


@given(group=groups, estimator=st.sampled_from(sorted(set(ESTIMATORS) - {"opo", "reinforce_pp"})))
def test_splitting_episodes_into_branches_changes_no_episode_s_advantage(
    group: list[list[float]], estimator: str
) -> None:
    whole = folded([[sum(branches) / len(branches)] for branches in group], estimator)
    split = folded(group, estimator)
    for e, branches in enumerate(group):
        total = sum(split.get(f"{e}-{i}", 0.0) for i in range(len(branches)))
        assert total == pytest.approx(whole.get(f"{e}-0", 0.0), rel=1e-5, abs=1e-6)

"""A rollout buffer that is filled by hand: advantages, freshness, samples and their shares."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.rollouts.buffer import (
    ReplayBufferConfig,
    RolloutReplayBuffer,
    TrainParams,
)
from rollstream.consumers.buffers.rollouts.rows import EstimatorLoss
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.records import (
    OldGroup,
    OldMetadata,
    OldRollout,
    RolloutBatch,
)
from tests.support.rollout_buffers import NOW, buffer, group, rollout, uids


def test_names_and_defaults_are_those_of_the_documents() -> None:
    config = TrainParams(optimizer="adamw").replay_buffer
    assert config == ReplayBufferConfig(
        capacity=4096, alpha=3.0, max_samples=1, max_rollout_step_delay=1, max_rollout_timestamp_delay=3600.0
    )
    replay = RolloutReplayBuffer.of(config, local_batch_size=2, clock=lambda: NOW)
    assert replay.add_batches([[group("a", [1.0, 0.0])]]) == 2
    assert replay.stats() == {
        "total_size": 2,
        "env_sizes": {"env": 2},
        "num_environments": 1,
        "total_batches_added": 1,
        "total_batches_sampled": 0,
        "left_out": {},
    }
    assert {item.usage_count for item in replay.sample() or ()} == {1}
    assert replay.stats()["total_batches_sampled"] == 1
    assert replay.size() == 0


def test_leave_one_out_advantages_are_those_of_the_whole_group() -> None:
    replay = buffer()
    replay.add_batches([[group("a", [1.0, 0.0, 0.0, 1.0])]])
    actual = {item.rollout.uid: item.advantage for item in replay.sample() or ()}
    assert actual == pytest.approx({"a0": 2 / 3, "a1": -2 / 3, "a2": -2 / 3, "a3": 2 / 3})


def test_a_group_of_one_has_no_advantage_and_other_losses_may_be_given() -> None:
    replay = buffer(local_batch_size=1)
    replay.add(group("a", [5.0]))
    assert [item.advantage for item in replay.sample() or ()] == [0.0]
    other = buffer(local_batch_size=2, loss_module=EstimatorLoss("dr_grpo"))
    other.add(group("a", [1.0, 0.0]))
    assert sorted(float(item.advantage) for item in other.sample() or ()) == [-0.5, 0.5]


def test_an_estimator_that_normalises_over_batches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'reinforce_pp' normalises over the batches .*; choose rloo, "):
        EstimatorLoss("reinforce_pp")


def test_groups_without_variance_are_dropped_when_asked() -> None:
    same_rewards, others = group("a", [0.3, 0.3]), group("b", [0.3, 0.4])
    assert buffer().add_batches([[same_rewards, others]]) == 4
    assert buffer(drop_zero_variance=True).add_batches([[same_rewards, others]]) == 2


def test_a_batch_is_not_judged_by_its_first_rollout() -> None:
    """Each rollout's own metadata decide whether it is fresh, by step and by time, on arrival and later."""
    replay = buffer(max_rollout_step_delay=2, max_rollout_timestamp_delay=100.0, local_batch_size=2)
    replay.set_current_step(10)
    mixed = [
        rollout("too old a step", step=7),
        rollout("old", step=8, at=NOW - 50),
        rollout("new", step=10),
        rollout("too old", step=10, at=NOW - 100),
        rollout("of a step to come", step=11),
    ]
    assert replay.add_batches([[mixed]]) == 3
    assert replay.set_current_step(11) == 1
    assert sorted(uids(replay.sample())) == ["new", "of a step to come"]


def test_a_rollout_that_became_old_since_the_step_was_set_is_not_drawn() -> None:
    clock = [NOW]
    replay = buffer(clock=lambda: clock[0], local_batch_size=1)
    replay.add(group("a", [0.0, 1.0]))
    clock[0] += 3600.0
    assert replay.sample() is None
    assert replay.size() == 0


def test_old_batches_give_their_metadata_to_each_rollout() -> None:
    def old(reward: float, *metadata: OldMetadata) -> OldRollout:
        return OldRollout(
            env_name="env",
            env_example_id="x",
            prompt_tokens=np.array([1], "<i4"),
            response_tokens=np.array([2, 3], "<i4"),
            response_logprobs=np.array([-1, -2], "<f4"),
            token_rewards=np.zeros(2, "<f4"),
            episode_reward=reward,
            metadata=metadata,
        )

    of_batch = OldMetadata(worker_id="w", timestamp=NOW, weight_step=3)
    own = OldMetadata(worker_id="v", timestamp=NOW - 5000, weight_step=3)
    replay = buffer(local_batch_size=2)
    replay.set_current_step(4)
    batch = RolloutBatch(groups=(OldGroup(rollouts=(old(1.0), old(0.0), old(0.0, own))),), metadata=(of_batch,))
    without = RolloutBatch(groups=(OldGroup(rollouts=(old(1.0), old(0.0))),))
    assert replay.add_batches([batch, without]) == 2
    sample = replay.sample() or []
    assert {(i.rollout.metadata.worker_id, i.weight_step) for i in sample} == {("w", 3)}
    assert sorted(float(i.advantage) for i in sample) == [-0.5, 1.0]


def test_a_longer_group_may_come_later() -> None:
    replay = buffer()
    replay.add(group("short", [0.0, 1.0], length=4))
    replay.add(group("long", [0.0, 1.0], length=4000))
    assert sorted(len(item.rollout.tokens) for item in replay.sample() or ()) == [4, 4, 4000, 4000]


def test_each_of_a_mixed_group_is_filed_under_its_own_environment() -> None:
    replay = buffer()
    replay.add(
        [rollout("a", 0.0, environment="x"), rollout("b", 1.0, environment="y"), rollout("c", 1.0, environment="y")]
    )
    assert replay.stats()["env_sizes"] == {"x": 1, "y": 2}


def test_one_bad_batch_loses_none_of_the_others() -> None:
    replay = buffer()
    torn = replace(rollout("torn"), loss_mask=np.ones(3, bool))
    worse = replace(rollout("nan"), reward=float("nan"))
    batches: list[Any] = [
        [group("a", [0.0, 1.0])],
        [group("b", [0.0, 1.0]), [rollout("c", 1.0), torn]],
        "no batch at all",
        [[worse]],
        [group("d", [0.0, 1.0])],
    ]
    with pytest.raises(RecordError) as raised:
        replay.add_batches(batches)
    for text in (
        "batch 1: rollout 'torn': loss_mask is |b1 [3]; it must be |b1 [4]",
        "batch 2: ",
        "batch 3: rollout 'nan': its reward is nan",
        "All other batches were added",
    ):
        assert text in str(raised.value)
    assert sorted(uids(replay.sample())) == ["a0", "a1", "d0", "d1"]
    assert replay.stats()["total_batches_added"] == 2


def test_a_loss_that_gives_no_finite_number_is_named() -> None:
    class Odd:
        def compute_advantages(self, rollouts: Any, /) -> list[float]:
            return [float("nan")] * len(rollouts)

    with pytest.raises(RecordError, match="gave 2 advantages"):
        buffer(loss_module=Odd()).add(group("a", [0.0, 1.0]))


def test_too_few_give_no_sample_and_cost_no_draw() -> None:
    replay, other = buffer(), buffer()
    replay.add(group("a", [0.0, 1.0, 2.0]))
    assert replay.sample() is None
    replay.add(group("b", [0.0, 1.0, 2.0]))
    for name in "ab":
        other.add(group(name, [0.0, 1.0, 2.0]))
    assert uids(replay.sample()) == uids(other.sample())
    assert replay.stats()["total_batches_sampled"] == 1
    with pytest.raises(ConfigurationError, match="a sample of 0"):
        replay.sample(0)


def test_processes_get_disjoint_shares_of_one_draw() -> None:
    parts = [buffer(process_id=i, total_processes=3, max_samples=1, local_batch_size=5) for i in range(3)]
    whole = buffer(max_samples=1, local_batch_size=15)
    for replay in (*parts, whole):
        replay.add(group("a", [float(i) for i in range(40)]))
    for _ in range(2):
        shares = [uids(replay.sample()) for replay in parts]
        assert len({uid for share in shares for uid in share}) == 15
        assert [uid for share in shares for uid in share] == uids(whole.sample())
    assert [replay.sample() for replay in parts] == [None] * 3  # 10 are left, and 15 are needed
    with pytest.raises(ConfigurationError, match="process 3 of 3"):
        buffer(process_id=3, total_processes=3)


def test_a_sample_depends_on_earlier_ones_only_through_used_up_rollouts() -> None:
    one, other = buffer(seed=5), buffer(seed=5)
    for replay in (one, other):
        replay.add(group("a", [float(i) for i in range(40)]))
    first = [uids(one.sample()) for _ in range(3)]
    other.sample(7)
    assert [uids(other.sample()) for _ in range(2)] == first[1:]
    assert uids(buffer_with(seed=6).sample()) != first[0]


def buffer_with(**settings: Any) -> RolloutReplayBuffer:
    replay = buffer(**settings)
    replay.add(group("a", [float(i) for i in range(40)]))
    return replay

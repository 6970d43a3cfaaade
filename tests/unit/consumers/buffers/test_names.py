"""Code from other documents works unchanged, and every name of the page of names exists."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rollstream.consumers.buffers.groups.forwarding import GrpoBatchMaker
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.buffers.rollouts.buffer import RolloutReplayBuffer
from rollstream.consumers.buffers.rollouts.record import RecordTurn, RolloutRecord
from rollstream.consumers.buffers.rollouts.rows import RLOOLoss
from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker
from rollstream.consumers.weights.state_manager import LocalStateManager
from rollstream.topics.errors import RecordError
from rollstream.topics.records import OldGroup, OldMetadata, OldRollout, Rollout, RolloutBatch, RolloutMetadata
from rollstream.topics.wire.rl_examples import RLExample
from tests.support.pages import page, section


def record(n: int, example: str = "q", *, version: int | str = 0, environment: str = "math_problems") -> RolloutRecord:
    """Rollout `n` of a problem; every third is correct."""
    return RolloutRecord(
        environment=environment,
        example_id=example,
        policy_version=version,
        rollout_uid=f"{example}-{version}-{n}",
        turns=[
            RecordTurn(message="2+2", role="user", tokens=[1, 2]),
            RecordTurn(
                message=str(n),
                role="assistant",
                tokens=[3, n],
                logprobs=[-0.5, -0.25],
                reward=float(n % 3 == 0),
                inference_metadata={"model_version": 3, "sampling_params": {"temperature": 1.0}, "inference_time": 0.5},
            ),
        ],
        created_ts=12.5,
        metadata={"worker_id": "w"},
    )


def test_a_buffer_of_a_root_path_a_compression_and_a_maker_stores_groups_and_batches_below_it(tmp_path: Path) -> None:
    batch_maker = GrpoBatchMaker(rng_seed=42)
    replay_buffer = GroupReplayBuffer(root_path=tmp_path, compression="snappy", batch_maker=batch_maker)
    for n in range(8):
        assert replay_buffer.add_rollout(record(n))
    batch_id = replay_buffer.create_and_store_batch(batch_size=6)
    assert batch_id is not None
    [part], [batch] = tmp_path.glob("part-*.parquet"), tmp_path.glob("batches/batch_*.parquet")
    assert pq.ParquetFile(part).metadata.row_group(0).column(0).compression == "SNAPPY"
    assert pq.read_table(batch).num_rows == 6
    [group] = replay_buffer.groups()
    assert group.rollouts[0].turns[1].inference.sampling_params == {"temperature": "1.0"}
    with pytest.raises(RecordError, match="of environment 'other', but this store is of 'math_problems'"):
        replay_buffer.add_rollout(record(9, environment="other"))
    replay_buffer.close()
    with GroupReplayBuffer(root_path=tmp_path) as again:
        assert (again.environment, again.size()) == ("math_problems", 1)


def test_a_rollout_of_the_documents_is_refused_with_the_class_to_use() -> None:
    own = RolloutMetadata(worker_id="w", timestamp=1.0, weight_step=0)
    with pytest.raises(TypeError, match=r"records.OldRollout, with metadata=\(OldMetadata.*argument 'env_name'"):
        Rollout(env_name="math", env_example_id="q", metadata=own)  # type: ignore[call-arg]


def test_a_maker_without_a_store_takes_records_one_by_one_and_draws_each_once_with_its_groups_advantage() -> None:
    def drawn(seed: int) -> list[tuple[str, float]]:
        batch_maker = GrpoBatchMaker(rng_seed=seed, environment_name="math_problems")
        for n in range(4):
            batch_maker.add_rollout(record(n, version="v9"))
        for n in (0, 0, 1, 2, 3):
            batch_maker.add_rollout(record(n, version="v10"))
        batch_maker.add_rollout(record(7, version="v9"))
        assert batch_maker.create_batch(batch_size=5) is None, "4 are of the latest version"
        first = batch_maker.create_batch(batch_size=2)
        assert first is not None
        batch_maker.add_rollout(record(4, version="v10"))
        rest = batch_maker.create_batch(batch_size=3)
        assert rest is not None
        assert batch_maker.create_batch(batch_size=1) is None
        metadata = batch_maker.get_batch_metadata(rest)
        assert (metadata["batch_size"], set(metadata["advantage_stats"])) == (3, {"mean", "std", "max", "min"})
        for row in first:  # of rewards 1, 0, 0, 1
            assert float(row.advantage[0]) == pytest.approx(2 / 3 if row.source.uid[-1] in "03" else -2 / 3)
        for row in rest:  # of rewards 1, 0, 0, 1, 0
            assert float(row.advantage[0]) == pytest.approx(3 / 4 if row.source.uid[-1] in "03" else -1 / 2)
        return [(row.source.uid, float(row.advantage[0])) for row in [*first, *rest]]

    assert drawn(42) == drawn(42)
    assert sorted(uid for uid, _advantage in drawn(1)) == [f"q-v10-{n}" for n in range(5)]
    assert drawn(1) != drawn(42)
    with pytest.raises(RecordError, match="this maker accepts only 'math_problems'"):
        GrpoBatchMaker(environment_name="math_problems").add_rollout(record(0, environment="other"))


class CustomBatchMaker(BatchMaker):
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        waiting = list(self.waiting.values())
        return self.pop_waiting(waiting[:batch_size]) if len(waiting) >= batch_size else None

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"size": len(batch)}


def test_a_custom_maker_of_two_methods_makes_batches_and_gets_undelivered_rollouts_again(tmp_path: Path) -> None:
    with GroupReplayBuffer(tmp_path, "math_problems", batch_maker=CustomBatchMaker()) as buffer:
        buffer.add_rollouts(record(n, example) for example in "ab" for n in range(8))
        batch_id = buffer.create_and_store_batch(10)
        assert batch_id is not None
        stored = buffer.read_batch(batch_id)
        assert (len(stored.examples), stored.metadata) == (10, {"size": 10})
        assert buffer.stats()["held"] == 6
    maker = CustomBatchMaker()
    GroupReplayBuffer(tmp_path, "math_problems", batch_maker=maker)
    assert maker.held == 6


def test_a_custom_maker_by_itself_takes_records_and_brings_the_advantages_of_those_that_wait_up_to_date() -> None:
    maker = CustomBatchMaker()
    for n in (0, 1, 1):
        maker.add_rollout(record(n))
    maker.add_rollout(record(0, "other"))
    first = maker.create_batch(1)
    assert first is not None
    assert [(row.source.uid, float(row.advantage[0])) for row in first] == [("q-0-0", 1.0)]
    maker.add_rollout(record(2))  # of rewards 1, 0, 0
    rest = maker.create_batch(3)
    assert rest is not None
    assert {row.source.uid: float(row.advantage[0]) for row in rest} == {"q-0-1": -0.5, "other-0-0": 0.0, "q-0-2": -0.5}
    assert maker.create_batch(1) is None
    assert maker.get_batch_metadata([]) == {"size": 0}
    assert GrpoBatchMaker().get_batch_metadata([])["batch_size"] == 0


def test_samples_are_requested_by_batch_size(tmp_path: Path) -> None:
    episode = {"obs": np.arange(10), "control_mode": np.zeros(10, np.int64)}
    with EpisodeSliceBuffer(tmp_path / "slices", capacity=100, slice_len=4) as slices:
        slices.add(episode)
        assert slices.sample(batch_size=3)["obs"].shape == (3, 4)
    with HilEpisodeBuffer(tmp_path / "hil", capacity=100, slice_len=4) as both:
        both.add(episode)
        both.add({**episode, "control_mode": np.ones(10, np.int64)})
        assert both.sample(batch_size=4)["obs"].shape == (4, 4)
    buffer = RolloutReplayBuffer(
        capacity=100,
        local_batch_size=4,
        alpha=3.0,
        total_processes=1,
        process_id=0,
        max_samples=-1,
        max_rollout_step_delay=1000,
        max_rollout_timestamp_delay=-1.0,
        loss_module=RLOOLoss(),
    )
    rollouts = [
        OldRollout(
            env_name="test_env",
            env_example_id="example_1",
            prompt_tokens=np.array([1, 2], "<i4"),
            response_tokens=np.array([3], "<i4"),
            response_logprobs=np.array([-0.5], "<f4"),
            token_rewards=np.array([reward], "<f4"),
            episode_reward=reward,
            metadata=(OldMetadata(worker_id="test_worker", timestamp=1.0, weight_step=0),),
        )
        for reward in (1.0, 0.0)
    ]
    assert buffer.add_batches([RolloutBatch(groups=(OldGroup(rollouts=tuple(rollouts)),))]) == 2
    sample = buffer.sample(batch_size=2)
    assert sample is not None
    assert sorted(item.advantage for item in sample) == [-1.0, 1.0]


def test_a_follower_without_a_state_gets_the_newest() -> None:
    manager = LocalStateManager()
    assert manager.get_state() is None
    manager.update_state({"w": np.zeros(2)})
    manager.update_state({"w": np.ones(2)})
    state = manager.get_state()
    assert state is not None
    assert (state[0], state[1]["w"].tolist()) == (1, [1.0, 1.0])
    assert manager.get_state(1) is None


def test_every_name_of_the_page_exists() -> None:
    text = section(page("concepts"), "Names from other documents")
    named = re.findall(r"`(rollstream(?:\.[a-z_]+)*)(?:\.([A-Z]\w+))?[`(]", text)
    assert len(named) > 12
    for module, name in named:
        imported = importlib.import_module(module)
        assert not name or hasattr(imported, name), f"{module}.{name}"
    for names, module in re.findall(r"^\|[^|]*\| ((?:`\w+`,? ?)+)of `([a-z_.]+)`", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"

"""A rollout as turns becomes one sequence."""

from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.buffers.rollouts.record import RecordTurn, RolloutRecord, as_rollout
from rollstream.consumers.grouping.makers.batch_maker import MakerContext
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import RecordError
from rollstream.topics.validation import problems


def record(uid: str = "u", version: int | str = "v3", reward: float = 1.0, **changes: Any) -> RolloutRecord:
    values: dict[str, Any] = {
        "environment": "env",
        "example_id": "q",
        "policy_version": version,
        "rollout_uid": uid,
        "turns": [
            RecordTurn(message="2+2", role="user", tokens=[1, 2]),
            RecordTurn(message="4", role="assistant", tokens=[3], logprobs=[-0.5], reward=reward),
            RecordTurn(message="sure?", role="user", tokens=[4]),
            RecordTurn(message="yes", role="assistant", tokens=[5, 6], logprobs=[-1.0, -1.5], reward=0.25),
        ],
        "created_ts": 12.0,
        "metadata": {"worker_id": "w", "difficulty": 3},
    }
    return RolloutRecord(**(values | changes))


def test_turns_become_one_sequence_and_their_rewards_add_up() -> None:
    made = as_rollout(record(), group_size=2)
    assert problems(made) == []
    assert made.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert made.loss_mask.tolist() == [False, False, True, False, True, True]
    assert made.logprobs.tolist() == [0, 0, -0.5, 0, -1.0, -1.5]
    assert made.reward == 1.25
    assert [(turn.start, turn.stop, turn.has_logprobs) for turn in made.turns] == [
        (0, 2, False),
        (2, 3, True),
        (3, 4, False),
        (4, 6, True),
    ]
    assert (made.metadata.worker_id, made.metadata.replica_id, made.metadata.timestamp) == ("w", "unknown", 12.0)
    assert made.extra == {"worker_id": "w", "difficulty": "3"}
    assert (made.policy_version, made.group_size) == (3, 2)


def test_versions_that_are_texts_are_compared_as_numbers(tmp_path: Path) -> None:
    maker = ReservoirBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=2**20))
    buffer = GroupReplayBuffer(tmp_path, "env", GroupStoreConfig(target_group_size=2), batch_maker=maker)
    for version in ("v9", "v10"):
        buffer.add_rollouts(as_rollout(record(f"{version}-{n}", version, float(n))) for n in range(2))
    rows = buffer.sample(2)
    assert rows is not None
    assert {row.source.uid for row in rows} == {"v10-0", "v10-1"}


def test_turns_that_make_no_sequence_are_refused() -> None:
    with pytest.raises(RecordError, match="does not end in a number"):
        as_rollout(record(version="latest"))
    turn = RecordTurn(message="x", role="assistant", tokens=[1, 2], logprobs=[-1.0])
    with pytest.raises(RecordError, match="turn 0 of rollout 'u' has 1 log-probabilities for 2 tokens"):
        as_rollout(record(turns=[turn]))
    assert "tokens is empty" in problems(as_rollout(record(turns=[])))

"""A rollout as turns becomes one sequence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.forwarding import GrpoBatchMaker
from rollstream.consumers.buffers.groups.store import GroupReplayBuffer
from rollstream.consumers.buffers.rollouts.record import RecordTurn, RolloutRecord, as_record, as_rollout
from rollstream.consumers.grouping.makers.batch_maker import MakerContext
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import RecordError
from rollstream.topics.records import InferenceMetadata, Rollout
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.validation import problems


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
    kept = made.extra["rollstream.record"]
    assert made.extra == {"worker_id": "w", "difficulty": "3", "rollstream.record": kept}
    assert (made.policy_version, made.group_size) == (3, 2)


def test_numbers_and_arrays_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    def numpy_turns(reward: float) -> list[RecordTurn]:
        question = {"tokens": np.array([1, 2])}
        answer = {"tokens": np.array([3, 4]), "logprobs": np.array([-0.5, -1.0], "<f4"), "reward": np.float32(reward)}
        return [
            RecordTurn(message="2+2", role="user", **question),  # type: ignore[arg-type]
            RecordTurn(message="4 ok", role="assistant", **answer),  # type: ignore[arg-type]
        ]

    version: Any = np.int64(3)
    metadata = {"x": np.float32(0.5), "n": np.int64(3), "where": {"rows": np.arange(2)}, "weight_step": np.int64(7)}
    records = [record(str(n), version, turns=numpy_turns(n), metadata=metadata) for n in range(2)]
    made = as_rollout(records[0])
    assert (made.tokens.tolist(), made.logprobs.tolist()) == ([1, 2, 3, 4], [0, 0, -0.5, -1.0])
    texts = {"x": "0.5", "n": "3", "where": '{"rows": [0, 1]}', "weight_step": "7"}
    assert made.extra == texts | {"rollstream.record": made.extra["rollstream.record"]}
    assert (made.policy_version, type(made.policy_version), made.metadata.weight_step) == (3, int, 7)
    assert problems(made) == []
    assert problems(decode(encode(made))) == []
    maker = GrpoBatchMaker(0, "env")
    for each in records:
        maker.add_rollout(each)
    assert len(maker.create_batch(2) or ()) == 2
    config = GroupStoreConfig(target_group_size=2)
    reservoir = ReservoirBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=2**20))
    buffer = GroupReplayBuffer(tmp_path, "env", config, batch_maker=reservoir)
    assert buffer.add_rollouts(records) == 2
    assert len(buffer.sample(2) or ()) == 2


def test_versions_that_are_texts_are_compared_as_numbers(tmp_path: Path) -> None:
    maker = ReservoirBatchMaker(MakerContext(partition=0, seed=0, batch_bytes=2**20))
    buffer = GroupReplayBuffer(tmp_path, "env", GroupStoreConfig(target_group_size=2), batch_maker=maker)
    for version in ("v9", "v10"):
        buffer.add_rollouts(as_rollout(record(f"{version}-{n}", version, float(n))) for n in range(2))
    rows = buffer.sample(2)
    assert rows is not None
    assert {row.source.uid for row in rows} == {"v10-0", "v10-1"}


def test_a_record_is_kept_whole_also_in_the_log() -> None:
    whole = record(
        version="run7/ckpt-v3",
        turns=[
            RecordTurn(message="2+2", role="user", tokens=[1, 2], timestamp=1.5),
            RecordTurn(
                message="4",
                role="assistant",
                tokens=[3],
                logprobs=[-0.5],
                reward=0.0,
                inference_metadata={
                    "model_version": "run7/ckpt-v3",
                    "sampling_params": {"temperature": 0.7, "stop": ["x"]},
                    "inference_time": 1.5,
                    "finish_reason": "stop",
                },
            ),
            RecordTurn(
                message="",
                role="assistant",
                tokens=[],
                logprobs=[],
                inference_metadata=InferenceMetadata(model_version=3),
            ),
        ],
        metadata={"worker_id": "w", "weight_step": 7, "text": "[1]", "list": [1, {"a": None}]},
        replica_id="r",
    )
    made = decode(encode(as_rollout(whole)))
    assert problems(made) == []
    assert isinstance(made, Rollout)
    assert as_record(made) == whole


def test_labels_of_two_runs_never_share_a_group(tmp_path: Path) -> None:
    with GroupReplayBuffer(tmp_path, "env", GroupStoreConfig(target_group_size=2, min_group_size=2)) as buffer:
        for number in range(2):
            buffer.add_rollouts(record(f"{run}-{number}", f"{run}/v3", float(number)) for run in ("run7", "run8"))
        groups = [[rollout.uid for rollout in group.rollouts] for group in buffer.groups()]
    assert sorted(groups) == [["run7-0", "run7-1"], ["run8-0", "run8-1"]]


def test_turns_that_make_no_sequence_are_refused() -> None:
    with pytest.raises(RecordError, match="does not end in a number"):
        as_rollout(record(version="latest"))
    with pytest.raises(RecordError, match=r"policy version 3\.5 is neither a whole number nor a text"):
        as_rollout(record(version=3.5))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match=r"metadata 'x' cannot be written as JSON \(it holds a set\); make it a text"):
        as_rollout(record(metadata={"x": {1}}))
    with pytest.raises(RecordError, match="metadata 'weight_step' is 'last', which is not a whole number"):
        as_rollout(record(metadata={"weight_step": "last"}))
    turn = RecordTurn(message="x", role="assistant", tokens=[1, 2], logprobs=[-1.0])
    with pytest.raises(RecordError, match="turn 0 of rollout 'u' has 1 log-probabilities for 2 tokens"):
        as_rollout(record(turns=[turn]))
    assert "tokens is empty" in problems(as_rollout(record(turns=[])))

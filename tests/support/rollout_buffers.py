"""Rollout buffers for tests, and rollouts of whole groups to fill them with."""

from typing import Any

import numpy as np

from rollstream.consumers.buffers.rollouts.buffer import (
    RolloutReplayBuffer,
    RolloutWithCount,
)
from rollstream.consumers.grouping.testing import example_rollout
from rollstream.topics.records import (
    Rollout,
    RolloutMetadata,
)

NOW = 10_000.0


def rollout(
    uid: str, reward: float = 0.0, *, environment: str = "env", step: int = 0, at: float = NOW, length: int = 4
) -> Rollout:
    return example_rollout(
        uid,
        reward,
        environment=environment,
        tokens=np.arange(length, dtype="<i4"),
        metadata=RolloutMetadata(worker_id="w", timestamp=at, weight_step=step),
    )


def group(name: str, rewards: list[float], **fields: Any) -> list[Rollout]:
    return [rollout(f"{name}{i}", reward, **fields) for i, reward in enumerate(rewards)]


def buffer(**settings: Any) -> RolloutReplayBuffer:
    chosen = {"local_batch_size": 4, "max_samples": -1, "clock": lambda: NOW, **settings}
    return RolloutReplayBuffer(**chosen)


def uids(sample: list[RolloutWithCount] | None) -> list[str]:
    assert sample is not None
    return [item.rollout.uid for item in sample]

"""The old form of rollouts: a RolloutBatch holds groups, with metadata on the batch."""

from dataclasses import dataclass

from rollstream.topics.records.arrays import Float32, Int32


@dataclass(frozen=True, kw_only=True)
class OldMetadata:
    """Origin of a RolloutBatch or of one of its rollouts."""

    worker_id: str = ""
    timestamp: float = 0.0
    weight_step: int = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class OldRollout:
    """A rollout of the old form: prompt [P], response [N]."""

    env_name: str
    env_example_id: str
    prompt_tokens: Int32
    response_tokens: Int32
    response_logprobs: Float32
    token_rewards: Float32
    episode_reward: float
    metadata: tuple[OldMetadata, ...] = ()
    """Its own metadata: one entry or none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OldGroup:
    """The rollouts of one prompt, in a RolloutBatch."""

    rollouts: tuple[OldRollout, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """Groups of rollouts with the metadata on the batch: the old form, which rollout_batch_upcast.py converts."""

    groups: tuple[OldGroup, ...]
    metadata: tuple[OldMetadata, ...] = ()
    """One entry or none."""

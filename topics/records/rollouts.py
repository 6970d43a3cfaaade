"""Records of `rollouts`: rollouts, cancellations of members, marks, trajectories, the old form; and of `rescores`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rollstream.topics.records.arrays import NO_FLOATS, Bool, Float32, Int32, NamedArray


@dataclass(frozen=True, kw_only=True)
class RolloutMetadata:
    """Origin of a rollout: worker, server and time."""

    worker_id: str = ""
    replica_id: str = "unknown"
    timestamp: float = 0.0
    weight_step: int = -1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters by which tokens were sampled from the policy's distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens were removed from the distribution, so that logprobs are unfit for importance ratios."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True)
class InferenceMetadata:
    """Data of an inference server about a completion."""

    model_version: int = -1
    sampling_params: Mapping[str, str] = field(default_factory=dict)
    inference_time_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of an episode and the span of tokens it covers."""

    role: str
    text: str
    start: int = 0
    stop: int = 0
    reward: float = 0.0
    has_logprobs: bool = False
    timestamp: float = 0.0
    inference: InferenceMetadata = field(default_factory=InferenceMetadata)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sampled sequence with its reward; tokens, loss_mask and logprobs have shape [T]."""

    uid: str
    group_size: int
    environment: str
    example_id: str
    policy_version: int
    tokens: Int32
    loss_mask: Bool
    logprobs: Float32
    reward: float
    group_id: str = ""
    lowest_version: int
    highest_version: int
    episode_uid: str = ""
    branch: int = 0
    branches: int = 1
    turns: tuple[Turn, ...] = ()
    logprobs_mode: Literal["raw", "processed"] = "processed"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    token_rewards: Float32 = field(default_factory=lambda: NO_FLOATS)
    reward_components: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)
    token_arrays: Mapping[str, NamedArray] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def success(self) -> bool:
        """Whether the task was solved: the reward component `exact`, or the reward if there is none, is at least 1."""
        return self.reward_components.get("exact", self.reward) >= 1.0

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that the policy sampled."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self.tokens)

    @property
    def prompt_tokens(self) -> Int32:
        """View of the tokens before the first sampled one."""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> Int32:
        """View of the tokens from the first sampled one on (later turns' prompts included)."""
        return self.tokens[self.prompt_length :]

    @property
    def response_logprobs(self) -> Float32:
        """View of logprobs over response_tokens, 0 where the policy did not sample the token."""
        return self.logprobs[self.prompt_length :]


# Python puts this name before "() got an unexpected keyword argument"; a wrapper would slow every construction.
Rollout.__init__.__qualname__ = (
    "a rollout with env_name, prompt_tokens and episode_reward is rollstream.topics.records.OldRollout, with "
    "metadata=(OldMetadata(...),); Rollout.__init__"
)


@dataclass(frozen=True, kw_only=True)
class GroupCancelled:
    """Members of a group that it shall not wait for, because of an infrastructure fault or because a labeler left them
    out. Members with these uids that have arrived are dropped."""

    environment: str
    example_id: str
    policy_version: int
    group_size: int
    uids: tuple[str, ...]
    group_id: str = ""
    reason: str = ""
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A message to a grouping task on the partition that it reads, from the task itself or from a tool."""

    kind: Literal["deadline", "policy_version", "drain", "configuration"]
    policy_version: int = -1
    generation: int = -1
    configuration: str = ""
    wall_time: float = 0.0
    author: str = ""


@dataclass(frozen=True, kw_only=True)
class RescoredRollout:
    """The reward of one rollout by another verifier, or the reason why there is none."""

    rescoring: str
    verifier: str
    verifier_digest: str
    verifier_version: str = ""
    partition: int
    offset: int
    uid: str
    environment: str
    reward_before: float
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    wall_time: float = 0.0

    @property
    def changed(self) -> bool:
        """Whether the verifier gave a reward that differs from the earlier reward."""
        return not self.failure and self.reward != self.reward_before


@dataclass(frozen=True, kw_only=True)
class EpisodeSpan:
    """Rows `start` to `stop` of column `column` of a trajectory, all of one episode."""

    uid: str
    column: int
    start: int
    stop: int
    control_mode: int = 0
    """Actor: 0 the policy, 1 a human in the loop."""
    first: bool = True
    """Whether the episode begins in this span; otherwise an earlier trajectory holds its beginning."""
    last: bool = True
    """Whether the episode ends in this span, if only because collecting ended; else a later trajectory continues it."""
    begin: int = -1
    """Number of steps of the episode before `start`; -1 if it is unknown."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRecord:
    """Arrays of a control task, by path; `rollstream.topics.wire.trajectory_arrays` nests them."""

    uid: str
    environment: str
    arrays: Mapping[str, NamedArray]
    policy_version: int = -1
    model_weights_id: str = ""
    max_episode_length: int = 0
    episodes: tuple[EpisodeSpan, ...] = ()
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)
    extra: Mapping[str, str] = field(default_factory=dict)


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

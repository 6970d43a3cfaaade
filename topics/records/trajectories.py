"""Records of control tasks: trajectories, and the episodes in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.topics.records.arrays import NamedArray
from rollstream.topics.records.rollouts import RolloutMetadata


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

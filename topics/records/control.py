"""Records of `control` and `metrics`: exclusions, skipped offsets, paused partitions, retired learners, states of
workers, splits, what operators want of a run, and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of one component at one time."""

    component: str
    timestamp: float
    step: int = -1
    values: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExcludedBatch:
    """A batch that learners leave out from the time of this record."""

    batch_id: str
    reason: str
    generation: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SkippedOffset:
    """Consecutive records of `rollouts`, from `offset` on, that grouping must leave out unread."""

    partition: int
    offset: int
    reason: str
    wall_time: float = 0.0
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class PausedPartition:
    """A partition of `rollouts` that grouping reads no further until a tombstone follows."""

    partition: int
    reason: str
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RetiredLearner:
    """A learner that has stopped for good; nothing is kept for it."""

    learner: str
    reason: str = ""
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EnvironmentState:
    """State of a worker in one environment."""

    environment: str
    drawn: int = 0
    """Prompts that the worker has taken from its order."""
    successes: float = 0.0
    """Sum of the successes of its groups, each from 0 to 1; older ones faded."""
    trials: float = 0.0
    """Number of these groups, faded in the same way."""
    unlocked: bool = True
    """Whether the curriculum lets the environment be played."""


@dataclass(frozen=True, kw_only=True)
class MixtureState:
    """State of a worker's mixture, for its next process and for the other workers."""

    worker_id: str
    environments: tuple[EnvironmentState, ...]
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DesiredProcesses:
    """Number of processes of a role that an operator wants, until a tombstone follows."""

    role: str
    processes: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PausedEnvironment:
    """An environment of which workers begin no group until a tombstone follows."""

    environment: str
    reason: str
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MixtureWeight:
    """Weight of an environment in place of the configured one, until a tombstone follows."""

    environment: str
    weight: float
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A step after which the learners of the run end as if their work were done, until a tombstone follows."""

    at_step: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """A run that ends with nothing in flight, or one whose grouping has nothing more to deliver for such an end."""

    wall_time: float
    """When it was asked for; the answer has the same."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A policy version that is evaluated although it is not due."""

    version: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunSplit:
    """A run that goes on as another with another number of partitions; on `control` of both."""

    run: str
    """The run that ends."""
    successor: str
    """The run that goes on."""
    partitions: int
    """Partitions of the successor."""
    phase: Literal["closing", "moving", "moved"]
    """Closing: the run is being brought to its end, and can still be opened again. Moving: its rollouts without a batch
    are being moved. Moved: the successor has everything."""
    wall_time: float = 0.0
    carried_from: int = -1
    """First offset of the run's index whose entry the successor's index repeats; -1 until they are repeated."""
    carried_at: int = -1
    """Offset of the first of these entries in the successor's index."""
    carried: int = 0
    """Number of entries repeated."""

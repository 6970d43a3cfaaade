"""Records of `control` and `metrics`: exclusions, skipped offsets, paused partitions, retired and forked learners,
states of workers, requests of operators, who supervises a run, and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """A batch that learners leave out from the time of this record on."""

    batch_id: str
    reason: str
    generation: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SkippedOffset:
    """A record of `rollouts` that grouping makes a dead letter without decoding it."""

    partition: int
    offset: int
    reason: str
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PausedPartition:
    """A partition of `rollouts` that grouping does not read until a tombstone follows."""

    partition: int
    reason: str
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RetiredLearner:
    """A learner that has stopped for good; no records are kept for it."""

    learner: str
    reason: str = ""
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ForkedLearner:
    """A learner that was forked into this run from a step of another learner."""

    learner: str
    source_run: str
    source_learner: str
    step: int
    """Step of the source learner after which it continues."""
    input_run: str
    position: int
    """Oldest offset in the index of `input_run` from which it may read."""
    first_version: int = 0
    """Number of the first policy version that it publishes, which continues the numbers of the source run."""
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EnvironmentState:
    """State of a worker in one environment."""

    environment: str
    drawn: int = 0
    """Number of prompts that the worker has drawn."""
    successes: float = 0.0
    """Sum of the successes of its groups, each from 0 to 1; older groups count less."""
    trials: float = 0.0
    """Number of these groups, where older groups count less in the same way."""
    unlocked: bool = True
    """Whether the curriculum allows the environment to be played."""
    pools: bytes = b""
    """Pool of each prompt, as `PromptPools.packed` has them; empty if prompts have no pools."""


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
    """An environment for which workers begin no group until a tombstone follows."""

    environment: str
    reason: str
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MixtureWeight:
    """Weight of an environment that replaces the configured weight until a tombstone follows."""

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
    """A request to end a run with nothing in flight, or the answer that grouping has nothing more to deliver."""

    wall_time: float
    """Time of the request; the answer repeats it."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """A policy version that is evaluated although it is not due."""

    version: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RequestAnswer:
    """The answer of the process that supervises a run to a request of an operator."""

    wall_time: float
    """Time of the request."""
    refused: str = ""
    """Why the request is not followed; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class RunSupervisor:
    """A `rollstream run` that supervises a run; it writes this every few seconds, and a tombstone at its end."""

    supervisor: str
    """Identity of its process."""
    epoch: int
    """One more than the highest epoch before it; the record of the highest epoch is valid."""
    host: str
    pid: int
    directory: str
    """Folder of the run's files on its machine."""
    began: float
    lease_s: float
    """Time without a further record after which another process may supervise the run."""
    wall_time: float = 0.0

    @property
    def rank(self) -> tuple[int, str]:
        """Key by which the valid record is the greatest."""
        return self.epoch, self.supervisor

"""Settings of who writes rollouts: the environment worker, its flow control, and the inference server it asks."""

from dataclasses import dataclass, field
from typing import Literal

from topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One environment worker."""

    worker_id: str = "env-0"
    """Name of the worker, unique within the run; part of every uid."""
    inference_urls: tuple[str, ...] = ("http://127.0.0.1:8000/v1",)
    """OpenAI-compatible servers that return token ids, asked in turn; where one does not answer the next is tried."""
    model: str = "policy"
    """Model name sent to them."""
    api_key: str = ""
    """Bearer token sent to them, as a reference: env:NAME or file:PATH; none when empty."""
    group_size: int = 16
    """Rollouts of one prompt whose rewards are compared."""
    concurrency: int = 4
    """Groups in flight at once."""
    temperature: float = 1.0
    """Sampling temperature."""
    seed: int = 0
    """Seed of the prompts drawn and of sampling; different for each worker by its id."""
    logprobs_mode: Literal["raw", "processed"] = "processed"
    """What the server's logprobs are of: the model (raw), or the distribution sampled from (processed; ours)."""
    assume_version: int = -1
    """Policy version of a server that reports none, e.g. a fixed model; -1 refuses such a server."""
    request_timeout_s: float = 60.0
    """Time for one request, retries included; then the group is cancelled."""
    drain_timeout_s: float = 10.0
    """Time for groups in flight to finish after SIGTERM; then they are cancelled on the log."""
    groups: int = 0
    """Groups to produce before stopping; 0 means until stopped."""
    dual_write_topic: str = ""
    """Full name of a topic that gets every group in the old form (RolloutBatch) too, for old readers; empty: none."""

    def __post_init__(self) -> None:
        for name in ("group_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"worker.{name} is {getattr(self, name)}; it must be at least 1")
        if not self.inference_urls:
            raise ConfigurationError(
                "worker.inference_urls is empty; name at least one server, e.g. http://host:8000/v1"
            )
        if not self.temperature > 0:
            raise ConfigurationError(
                f"worker.temperature is {self.temperature}; it must be above 0, greedy groups have no variance"
            )


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """Processes that play control tasks and write trajectories. A run that has some has none of the token roles."""

    processes: int = 0
    """Collecting processes that `rollstream run` starts."""
    player: str = ""
    """Generator function that plays, package.module:function: it is given a Seat, and yields chunk steps."""
    environment: str = "control"
    """Name of the environment, on every trajectory."""
    steps: int = 80
    """Chunk steps of a trajectory, or as many as a record has room for."""
    max_episode_length: int = 0
    """Most steps of an episode, as trajectories tell it; 0 is no limit."""
    trajectories: int = 0
    """Trajectories that one process sends before it ends; 0 means until the player returns or it is stopped."""
    seed: int = 0
    """Given to the player; the same in all processes."""
    options: dict[str, str] = field(default_factory=dict)
    """Given to the player."""

    def __post_init__(self) -> None:
        if self.processes < 0 or self.trajectories < 0 or self.steps < 1:
            raise ConfigurationError(
                f"collect.processes {self.processes} and collect.trajectories {self.trajectories} must be at least 0, "
                f"and collect.steps {self.steps} at least 1"
            )
        if self.processes and not self.player:
            raise ConfigurationError(
                f"collect.processes is {self.processes}, and no player is named; set collect.player to "
                "package.module:function"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Answers to held-out prompts while a run goes on, onto `evals`. worker.inference_urls says who is asked."""

    every_versions: int = 0
    """Evaluate each policy version that this divides, 0 included; 0 evaluates none."""
    max_prompts: int = 0
    """Take the first so many prompts of the held-out split; 0 takes all."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    concurrency: int = 64
    """Prompts in flight at once."""
    seed: int = 0
    """Of sampling above temperature 0."""

    def __post_init__(self) -> None:
        for name, least in (("every_versions", 0), ("max_prompts", 0), ("temperature", 0), ("concurrency", 1)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"evaluation.{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Gsm8kConfig:
    """The task gsm8k: arithmetic in words (arXiv:2110.14168), from files of one JSON object with question and answer
    a line."""

    train_file: str = ""
    """Problems to train on, as GSM8K's train.jsonl."""
    heldout_file: str = ""
    """Problems to evaluate on, as GSM8K's test.jsonl; empty holds out every fifth of train_file."""
    prompt: Literal["plain", "chatml"] = "chatml"
    """How a problem is put: to a model tuned to chat as Qwen's are, or as plain text that a base model continues."""
    max_tokens: int = 320
    """Most tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Settings of the tasks that have some, by task."""

    gsm8k: Gsm8kConfig = field(default_factory=Gsm8kConfig)
    """Arithmetic in words."""


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """How far producers may run ahead of the learner; every number but `workers` comes from another role's settings."""

    max_policy_lag: int = 4
    """Steps a rollout may be ahead of its training."""
    rollouts_per_step: int = 256
    """Rollouts of one learner step."""
    partitions: int = 4
    """Partitions of rollouts."""
    batch_rollouts: int = 64
    """Rollouts of one training batch."""
    group_size: int = 16
    """Rollouts of one group."""
    workers: int = 1
    """Workers that share the capacity."""

    @property
    def limit(self) -> int:
        """Most rollouts produced and neither trained on, skipped nor dropped."""
        return (self.max_policy_lag + 1) * self.rollouts_per_step

    @property
    def floor(self) -> int:
        """Rollouts that may lie in the pipeline without moving until more come: an incomplete step, and on each
        partition an incomplete batch and an incomplete group."""
        return self.rollouts_per_step + self.partitions * (self.batch_rollouts - 1 + self.group_size)

    @property
    def share(self) -> int:
        """Most rollouts of one worker that grouping has not read yet."""
        return (self.limit - self.floor) // self.workers


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """One inference server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    model: str = "policy"
    """Model name answered to."""
    replica_id: str = "infer-0"
    """Name of the server, reported with each answer."""
    max_rows: int = 256
    """Most sequences decoded together; a request's n times its prompts must fit."""
    gather_ms: float = 3.0
    """How long a batch waits for more requests."""
    refresh_ms: float = 20.0
    """How often an idle server looks for new weights; a busy one looks between batches."""
    seed: int = 0
    """Seed of requests that bring none."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ConfigurationError(f"inference.max_rows is {self.max_rows}; it must be at least 1")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"inference.port is {self.port}; it must be between 0 and 65535 (0: a free one)")

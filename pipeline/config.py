"""The one configuration of a run: a typed tree, from TOML, then the environment, then flags.

Every package owns the settings of its own parts; this module composes them and promises that a key nobody knows, a
value of the wrong type or two settings that contradict each other is one error that says where it stands.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from consumers.buffers.fill_config import FillConfig
from consumers.grouping.config import GrouperConfig, GroupingConfig, check_batch_bytes
from consumers.labelling.config import LabellingConfig
from consumers.learner.config import LearnerConfig
from infra.config import BrokerConfig
from pipeline.settings import (
    ENVIRONMENT_PREFIX,
    Keys,
    Layer,
    environment_layers,
    file_layers,
    fill,
    flag_layers,
    plain,
)
from pipeline.toml import render
from producers.capacity import check_capacity
from producers.config import CapacityConfig, CollectConfig, EvaluationConfig, InferenceConfig, TasksConfig, WorkerConfig
from topics.config import KafkaConfig, TopicsConfig
from topics.errors import ConfigurationError
from topics.secrets import is_secret, reference

_RECORD_OVERHEAD = 4096
PRETRAINED_LEARNING_RATE = 1e-6
PRETRAINED_WARM_START_RATE = 1e-5
"""Of a learner that starts from a checkpoint, where none is set: usual for language models."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """How `rollstream run` treats the processes of a run."""

    workers: int = 2
    """Environment workers; grouping processes are counted by grouper.processes."""
    ready_timeout_s: float = 120.0
    """How long a role may take from its start, or from its last word of progress, until it is ready."""
    stop_timeout_s: float = 20.0
    """How long a role may take from SIGTERM until it has exited; then it is killed."""
    restarts: int = 3
    """How often one role may exit unexpectedly and be started again before the run fails."""
    backoff_s: float = 0.5
    """Pause before the first restart of a role; doubled for each further one."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything about a run."""

    run: str = "main"
    """Name of the run; its topics are called {run}.{topic}."""
    seed: int = 0
    """Of everything that is drawn: the seed of each part that has none of its own."""
    task: str = "dsort3"
    """Environment that is played, one of producers.tasks."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    """Settings of the tasks that have some."""
    data_dir: Path = Path(".rollstream")
    """Where logs, checkpoints, caches and the local broker's data lie."""
    log_level: str = "info"
    """debug, info, warning or error."""
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    grouping: GroupingConfig = field(default_factory=GroupingConfig)
    grouper: GrouperConfig = field(default_factory=GrouperConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    labelling: LabellingConfig = field(default_factory=LabellingConfig)
    fill: FillConfig = field(default_factory=FillConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise ConfigurationError(
                f"run name {self.run!r} cannot be part of a topic name: use letters, digits, '.', '_' and '-'"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigurationError(f"log_level {self.log_level!r} is none of debug, info, warning, error")
        if self.kafka.client.get("group.id") is not None:
            raise ConfigurationError(
                "kafka.client sets group.id, which is derived from the run's name: remove the key, or set run"
            )
        check_batch_bytes(self.grouping, self.kafka.max_record_bytes)
        chunk_bytes = self.learner.weights.chunk_bytes
        if chunk_bytes + _RECORD_OVERHEAD > self.kafka.max_record_bytes:
            raise ConfigurationError(
                f"learner.weights.chunk_bytes {chunk_bytes} leaves no room in kafka.max_record_bytes "
                f"{self.kafka.max_record_bytes}: lower the one or raise the other"
            )
        check_capacity(self.capacity)

    @property
    def is_control(self) -> bool:
        """Whether the run is one of a control task: it has roles collect, label or fill, and no others."""
        return bool(self.collect.processes or self.labelling.processes or self.fill.directory)

    @property
    def capacity(self) -> CapacityConfig:
        """The producers' flow control, from the settings of every role it depends on."""
        return CapacityConfig(
            max_policy_lag=self.learner.max_policy_lag,
            rollouts_per_step=self.learner.rollouts_per_step,
            partitions=self.topics.partitions,
            batch_rollouts=self.grouping.batch_rollouts,
            group_size=self.worker.group_size,
            workers=self.supervisor.workers,
        )

    @property
    def run_dir(self) -> Path:
        """Where what belongs to this run alone lies: logs, the configuration its processes use."""
        return self.data_dir / "runs" / self.run


def load(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    client_flags: Sequence[str] = (),
    options: Sequence[tuple[str, str]] = (),
) -> RunConfig:
    """The configuration of a TOML file, overridden by `environment`, then by flags like `grouping.batch_rollouts=64`.

    `options` are flags with a name of their own, before the others: `("--steps", "learner.max_steps=3")`.
    `client_flags` are librdkafka's own keys, `key=value`. Raises ConfigurationError naming the line of the file, the
    variable or the flag, the key, and the remedy.
    """
    layers = [*file_layers(path), *environment_layers(environment or {}), *flag_layers(flags, client_flags, options)]
    config, origins = fill(RunConfig, layers, by_reference)
    return _derived(config, origins)


def by_reference(layer: Layer, key: str, value: Any) -> Any:
    """The value of a setting, of a secret a reference to it: what is configured is written down, and shown.

    Raises ConfigurationError for a secret that stands in a file or a flag itself.
    """
    if not is_secret(key) or not isinstance(value, str) or not value:
        return value
    found = reference(value)
    if found is not None:
        kind, name = found
        return f"file:{Path(name).absolute()}" if kind == "file" else value
    # A variable of its own; that of a whole table would stand for more.
    own = ".".join(layer.path).replace("_", ".") == key.replace("_", ".")
    if own and layer.origin.startswith(ENVIRONMENT_PREFIX):
        return f"env:{layer.origin}"
    raise ConfigurationError(
        f"{layer.place(key)}: {key} is a secret, and everybody could read it there; name where it is, "
        f"{key}=env:NAME or {key}=file:PATH"
    )


def _derived(config: RunConfig, origins: Mapping[Keys, Layer]) -> RunConfig:
    """What nobody set follows from what is: seeds from seed, paths from data_dir and run, an address from its port,
    learning rates from whether there is a checkpoint to start from."""
    for name in ("inference", "worker", "evaluation", "grouping", "learner", "collect", "fill"):
        if (name, "seed") not in origins:
            config = replace(config, **{name: replace(getattr(config, name), seed=config.seed)})
    if ("learner", "checkpoint", "directory") not in origins:
        checkpoint = replace(config.learner.checkpoint, directory=str(config.run_dir / "checkpoints"))
        config = replace(config, learner=replace(config.learner, checkpoint=checkpoint))
    if config.learner.pretrained:
        config = replace(config, learner=_fine_tuned(config.learner, origins))
    if ("broker", "data_dir") not in origins:
        config = replace(config, broker=replace(config.broker, data_dir=config.data_dir / "broker"))
    if ("worker", "inference_urls") not in origins and config.inference.port:
        config = replace(config, worker=replace(config.worker, inference_urls=(inference_url(config.inference),)))
    return config


def _fine_tuned(learner: LearnerConfig, origins: Mapping[Keys, Layer]) -> LearnerConfig:
    """The settings with learning rates for a trained model where nobody set them: those of a small one that begins at
    random would undo it."""
    optimizer, warm_start = learner.optimizer, learner.warm_start
    if ("learner", "optimizer", "learning_rate") not in origins:
        optimizer = replace(optimizer, learning_rate=PRETRAINED_LEARNING_RATE)
    if ("learner", "optimizer", "final_learning_rate") not in origins:
        optimizer = replace(optimizer, final_learning_rate=optimizer.learning_rate / 5)
    if ("learner", "warm_start", "learning_rate") not in origins:
        warm_start = replace(warm_start, learning_rate=PRETRAINED_WARM_START_RATE)
    return replace(learner, optimizer=optimizer, warm_start=warm_start)


def secret_variables(config: RunConfig) -> frozenset[str]:
    """Variables of the environment that secrets of this configuration are in."""
    values = {"worker.api_key": config.worker.api_key, **config.kafka.client}
    found = (reference(value) for key, value in values.items() if is_secret(key))
    return frozenset(name for kind, name in filter(None, found) if kind == "env")


def inference_url(config: InferenceConfig) -> str:
    """Where the workers of this machine reach an inference server of these settings."""
    return f"http://{config.host}:{config.port}/v1"


def to_toml(config: object) -> str:
    """The configuration as TOML that loads to an equal one."""
    return render(plain(config))

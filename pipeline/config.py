"""The one configuration of a run: a typed tree, from TOML, then the environment, then flags.

Every package owns the settings of its own parts; this module composes them. An unknown key, a value of the wrong type
or settings that contradict each other are errors that name the place of the setting.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import tomli_w

from rollstream.consumers.buffers.trajectories.fill_config import FillConfig
from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig, check_batch_bytes
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.serving.config import ServingConfig
from rollstream.consumers.trackers.config import TrackerConfig
from rollstream.infra.config import BrokerConfig
from rollstream.pipeline.settings import (
    Keys,
    Layer,
    check_variables,
    environment_layers,
    file_layers,
    fill,
    flag_layers,
    known_keys,
    plain,
)
from rollstream.pipeline.ui_config import UiConfig
from rollstream.producers.config import (
    CapacityConfig,
    CollectConfig,
    CurriculumConfig,
    EnvironmentConfig,
    EvaluationConfig,
    InferenceConfig,
    TasksConfig,
    WorkerConfig,
)
from rollstream.producers.flow.flow_control import check_capacity
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig, TracesConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import is_secret, reference

_RECORD_OVERHEAD = 4096
PRETRAINED_LEARNING_RATE = 1e-6
PRETRAINED_WARM_START_RATE = 1e-5
"""Defaults for a learner that starts from a checkpoint; usual values for language models."""
_UNREAD_FACTOR = 4
"""Largest number of a worker's rollouts that grouping has not read, as a multiple of the rollouts played at once."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_GROUP_SETTINGS = ("grouper.group", "labeling.group", "fill.name")
_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""A dot is not allowed, because {run}.{group} of one run could then be the name of another run's group."""


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """How `rollstream run` treats the processes of a run."""

    workers: int = 2
    """Number of environment workers; grouper.processes is the number of grouping processes."""
    learner_gpus: tuple[str, ...] = ()
    """GPUs of each learner process, e.g. ["0,1"] for one process with two GPUs: values of CUDA_VISIBLE_DEVICES by
    process number, from the front again if there are more processes; empty: each process sees all GPUs."""
    inference_gpus: tuple[str, ...] = ()
    """GPUs of each inference server, or of the vLLM of serving.python, as learner_gpus."""
    ready_timeout_s: float = 120.0
    """How long a role may take from its start, or from its last progress report, until it is ready. A role that is
    started by itself waits as long for a broker."""
    stop_timeout_s: float = 20.0
    """How long a role may take from SIGTERM until it exits; then it is killed."""
    restarts: int = 3
    """How often a process that was ready once may exit unexpectedly within restart_window_s and be started again. After
    one more exit, the run fails; if another process does the same work, the process is started again every minute
    instead. A process that exits before it was ever ready fails the run at once, unless it was added while the run went
    on."""
    restart_window_s: float = 600.0
    """Time after which an unexpected exit of a role no longer counts."""
    backoff_s: float = 0.5
    """Pause before the first restart of a role; doubled for each further restart, up to a minute."""
    adoption_s: float = 30.0
    """How long the processes of a run go on after `rollstream run` was killed, so that a new `rollstream run` can adopt
    them; 0: they end at once."""
    step_patience_s: float = 600.0
    """Time without a step, or five times the median step if that is longer, after which a run counts as stalled;
    `rollstream top` and the page then name the stage that blocks it."""

    def __post_init__(self) -> None:
        for name in (
            "ready_timeout_s",
            "stop_timeout_s",
            "restarts",
            "restart_window_s",
            "backoff_s",
            "adoption_s",
            "step_patience_s",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(
                    f"supervisor.{name} is {getattr(self, name)}; it must be a finite number, at least 0"
                )


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The port on which a process answers probes and scrapers: /livez, /readyz, /metrics."""

    host: str = "127.0.0.1"
    """Address to listen on. The port asks for no credentials, so make it reachable from a private network only."""
    port: int = 0
    """Port of a process; 0: none. `rollstream run` itself uses this port, and its processes use the next ports."""
    stall_s: float = 300.0
    """How long one turn of a process's loop, e.g. a compilation or a step, may take before /livez answers 503."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"service.port is {self.port}; it must be a port, or 0 for none")
        if not self.stall_s > 0:
            raise ConfigurationError(f"service.stall_s is {self.stall_s:g}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class ScaleDemoConfig:
    """The load of `rollstream demo --scale`: rollouts of random tokens, written without playing an environment."""

    workers: int = 24
    """Number of workers whose names the rollouts carry."""
    tokens: int = 128
    """Number of tokens of each rollout."""
    low_per_s: float = 60.0
    """Rollouts per second of all workers, at the beginning and at the end."""
    high_per_s: float = 500.0
    """Rollouts per second of all workers, at the peak."""
    low_s: float = 8.0
    """How long the low rate lasts at the beginning; at the end it lasts until only the minimum of processes is left."""
    ramp_s: float = 10.0
    """How long the rate takes to rise from low to high, and to fall again."""
    high_s: float = 25.0
    """How long the high rate lasts."""
    patience_s: float = 180.0
    """Longest wait at the end until only the minimum of processes is left."""

    def __post_init__(self) -> None:
        if not 0 < self.low_per_s <= self.high_per_s:
            raise ConfigurationError(
                f"demo.scale.low_per_s is {self.low_per_s:g} and high_per_s {self.high_per_s:g}; the low rate must be "
                "above 0, and at most the high one"
            )
        if self.workers < 1 or self.tokens < 2 or not min(self.low_s, self.ramp_s, self.high_s, self.patience_s) > 0:
            raise ConfigurationError("demo.scale needs at least one worker, at least two tokens, and times above 0")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """When `rollstream demo` ends, and how much the model must learn for the demo to pass."""

    target: float = 0.9
    """Training ends once exact match is above this, both over the last `window` rollouts and over twice as many."""
    gain: float = 0.5
    """Least rise of exact match, from the first `window` rollouts to the last `window`, with which the demo passes."""
    window: int = 1000
    """Number of rollouts over which exact match is measured."""
    scale: ScaleDemoConfig = field(default_factory=ScaleDemoConfig)

    def __post_init__(self) -> None:
        if not 0 < self.gain <= self.target <= 1:
            raise ConfigurationError(
                f"demo.gain is {self.gain} and demo.target {self.target}; both must be above 0 and at most 1, and the "
                "gain at most the target"
            )
        if self.window < 1:
            raise ConfigurationError(f"demo.window is {self.window}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    run: str = "main"
    """Name of the run; its topics are named {run}.{topic}."""
    seed: int = 0
    """Seed of each part whose own seed is not set."""
    task: str = "dsort3"
    """Environment that workers play, in the form of environments.0.use; unused if environments are listed."""
    environments: tuple[EnvironmentConfig, ...] = ()
    """Environments that workers play as a mixture; empty: the environment that task names."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    """Settings of individual tasks."""
    data_dir: Path = Path(".rollstream")
    """Directory of logs, checkpoints, caches and the local broker's data."""
    log_level: str = "info"
    """debug, info, warning or error."""
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    grouping: GroupingConfig = field(default_factory=GroupingConfig)
    grouper: GrouperConfig = field(default_factory=GrouperConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    labeling: LabelingConfig = field(default_factory=LabelingConfig)
    fill: FillConfig = field(default_factory=FillConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    ui: UiConfig = field(default_factory=UiConfig)
    demo: DemoConfig = field(default_factory=DemoConfig)

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.run):
            raise ConfigurationError(
                f"run name {self.run!r} cannot be part of a topic name: use letters, digits, '.', '_' and '-'"
            )
        for part in (".turn-", ".filler-"):
            if part in self.run:
                raise ConfigurationError(
                    f"run name {self.run!r} contains {part!r}, as only names of consumer groups may: choose another "
                    "name"
                )
        for key in _GROUP_SETTINGS:
            if not _GROUP_NAME.fullmatch(name := attrgetter(key)(self)):
                raise ConfigurationError(
                    f"{key} is {name!r}, part of the name of a consumer group: use letters, digits, '_' and '-'"
                )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigurationError(f"log_level is {self.log_level!r}; it must be debug, info, warning or error")
        check_batch_bytes(self.grouping, self.kafka.max_record_bytes)
        chunk_bytes = self.learner.weights.chunk_bytes
        if chunk_bytes + _RECORD_OVERHEAD > self.kafka.max_record_bytes:
            raise ConfigurationError(
                f"learner.weights.chunk_bytes {chunk_bytes} leaves no room in kafka.max_record_bytes "
                f"{self.kafka.max_record_bytes}: lower the first or raise the second"
            )
        if not self.task and not self.environments:
            raise ConfigurationError("task is empty and no environment is listed; set task, or add [[environments]]")
        if not any(entry.weight for entry in self.mixture):
            raise ConfigurationError("the weight of each of environments is 0, so none is played; raise one")
        for entry in self.mixture:
            samples = entry.samples or self.evaluation.samples
            if samples > 1 and not self.evaluation.temperature:
                raise ConfigurationError(
                    f"an evaluation samples {samples} answers for each prompt of {entry.name or entry.use} "
                    "(evaluation.samples, environments.N.samples), but at evaluation.temperature 0 they are all alike; "
                    "set a temperature, e.g. 1.0"
                )
        idle = all(not entry.weight or 0 < entry.workers < self.supervisor.workers for entry in self.mixture)
        if idle:
            raise ConfigurationError(
                f"every entry of environments has fewer workers than supervisor.workers {self.supervisor.workers}, so "
                "the last worker has nothing to play: let all workers play one of the entries (workers = 0)"
            )
        if self.awaits_labels and (self.collect.processes or self.fill.directory):
            raise ConfigurationError(
                "an environment's rewards come from a labeler, but collect.processes or fill.directory makes this the "
                'run of a control task, which plays no environments: remove these, or set rewards = "environment"'
            )
        check_capacity(self.capacity)

    @property
    def is_control(self) -> bool:
        """Whether this is the run of a control task, which has only the roles collect, label and fill."""
        labels = self.labeling.processes and not self.awaits_labels
        return bool(self.collect.processes or labels or self.fill.directory)

    @property
    def awaits_labels(self) -> bool:
        """Whether the rewards of an environment come from a labeler."""
        return any(entry.rewards == "labeler" for entry in self.mixture)

    @property
    def labelers(self) -> int:
        """Number of labeling processes: at least one if an environment's rewards come from a labeler."""
        return max(self.labeling.processes, int(self.awaits_labels))

    @property
    def mixture(self) -> tuple[EnvironmentConfig, ...]:
        """The environments that workers play: those listed, or the one that `task` names."""
        return self.environments or (EnvironmentConfig(use=self.task),)

    @property
    def capacity(self) -> CapacityConfig:
        """Settings of the producers' flow control, derived from the settings of every role that it depends on."""
        group_size = max(entry.group_size or self.worker.group_size for entry in self.mixture)
        return CapacityConfig(
            max_policy_lag=self.learner.max_policy_lag,
            rollouts_per_step=self.learner.rollouts_per_step,
            partitions=self.topics.partitions,
            batch_rollouts=self.grouping.batch_rollouts,
            group_size=group_size,
            # Each gateway of a run knows the sessions of all gateways, so together they count as one worker.
            # Without either, somebody starts a worker by hand.
            workers=max(1, self.supervisor.workers + (1 if self.gateway.port else 0)),
            in_flight=_UNREAD_FACTOR * self.worker.concurrency * group_size,
        )

    @property
    def run_dir(self) -> Path:
        """Directory of this run's own files: logs, and the configuration its processes use."""
        return self.data_dir / "runs" / self.run


def load(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    client_flags: Sequence[str] = (),
    options: Sequence[tuple[str, str]] = (),
) -> RunConfig:
    """Load a TOML file, overridden by `environment`, then by flags like `grouping.batch_rollouts=64`.

    `environment` has variables such as ROLLSTREAM_GROUPING__BATCH_ROLLOUTS. `options` are named flags, applied before
    other flags: `("--steps", "learner.max_steps=3")`. `client_flags` are librdkafka's own keys, `key=value`. Raises
    ConfigurationError naming the line of the file, the variable or the flag, the key, and the remedy.
    """
    return _derived(*settings_with_origins(path, environment or {}, flags, client_flags, options))


def settings_with_origins(
    path: Path | None,
    environment: Mapping[str, str],
    flags: Sequence[str],
    client_flags: Sequence[str],
    options: Sequence[tuple[str, str]] = (),
) -> tuple[RunConfig, Mapping[Keys, Layer]]:
    """Return the settings before others are derived from them, and the origin of each key that is set.

    Arguments and errors are those of `load`.
    """
    layers = [
        *file_layers(path),
        *environment_layers(RunConfig, environment),
        *flag_layers(flags, client_flags, options),
    ]
    # A variable that names no setting may hold a secret to which a setting refers, so it counts only afterwards.
    known = [layer for layer in layers if not layer.is_variable or _is_setting(layer.path)]
    config, origins = fill(RunConfig, known, by_reference)
    secret = secret_variables(config)
    if any(layer not in known and layer.origin not in secret for layer in layers):
        # It is not one of those: this raises the error that names it.
        fill(RunConfig, [layer for layer in layers if layer in known or layer.origin not in secret], by_reference)
    check_variables(RunConfig, environment, secret)
    return config, origins


def _is_setting(path: Keys) -> bool:
    """Whether a path names a setting or a table of settings; an entry of a list by its number or its name."""

    def matches(key: str) -> bool:
        parts = key.split(".")  # `0` stands for any entry, `*` for the rest of a table
        same = all(part in (name, "0", "*") for part, name in zip(parts, path, strict=False))
        return same and (len(path) <= len(parts) or parts[-1] == "*")

    return any(map(matches, known_keys(RunConfig)))


def by_reference(layer: Layer, key: str, value: Any) -> Any:
    """Return the value of a setting, or a reference to it if it is a secret.

    Configurations are written to files and shown, so they must not contain secrets. Raises ConfigurationError for a
    secret written into a file or a flag.
    """
    if not is_secret(key) or not isinstance(value, str) or not value:
        return value
    parts = reference(value)
    if parts is not None:
        kind, name = parts
        return f"file:{Path(name).absolute()}" if kind == "file" else value
    # The variable must hold this setting alone, not a whole table.
    if layer.is_variable and value == layer.value:
        return f"env:{layer.origin}"
    raise ConfigurationError(
        f"{layer.place(key)}: {key} is a secret, and everybody could read it there; refer to it instead, "
        f"{key}=env:NAME or {key}=file:PATH"
    )


def _derived(config: RunConfig, origins: Mapping[Keys, Layer]) -> RunConfig:
    """Derive settings that are not set: seeds from seed, paths from data_dir and run, workers' servers and key from
    those of inference, the length of a context from the learner's rows, the number of inference servers from the
    workers' servers, learning rates of a learner that starts from a checkpoint, no warm start on an unnamed task."""
    for name in ("inference", "worker", "evaluation", "grouping", "learner", "collect", "fill"):
        if (name, "seed") not in origins:
            config = replace(config, **{name: replace(getattr(config, name), seed=config.seed)})
    if ("learner", "checkpoint", "directory") not in origins:
        checkpoint = replace(config.learner.checkpoint, directory=str(config.run_dir / "checkpoints"))
        config = replace(config, learner=replace(config.learner, checkpoint=checkpoint))
    if ("inference", "max_model_len") not in origins:
        length = max(2, config.learner.sequence_length)
        config = replace(config, inference=replace(config.inference, max_model_len=length))
    if config.learner.pretrained:
        config = replace(config, learner=_fine_tuned(config.learner, origins))
    chosen = {("task",), ("learner", "warm_start", "steps"), ("learner", "warm_start", "file")} & origins.keys()
    named = chosen or any(keys[0] == "environments" for keys in origins)
    if not named and (config.learner.pretrained or not config.supervisor.workers):
        # The examples would be those of the default task, which nobody asked this model to learn.
        config = replace(
            config, learner=replace(config.learner, warm_start=replace(config.learner.warm_start, steps=0))
        )
    if ("broker", "data_dir") not in origins:
        config = replace(config, broker=replace(config.broker, data_dir=config.data_dir / "broker"))
    if ("worker", "inference_urls") not in origins:
        if config.inference.port and config.inference.replicas:
            config = replace(config, worker=replace(config.worker, inference_urls=inference_urls(config.inference)))
    elif not {("inference", "replicas"), ("inference", "port")} & origins.keys():
        config = replace(config, inference=replace(config.inference, replicas=0))
    if ("worker", "api_key") not in origins and config.inference.api_key:
        config = replace(config, worker=replace(config.worker, api_key=config.inference.api_key))
    return config


def _fine_tuned(learner: LearnerConfig, origins: Mapping[Keys, Layer]) -> LearnerConfig:
    """Return the settings with other defaults for a trained model, because the usual rates would ruin it."""
    optimizer, warm_start = learner.optimizer, learner.warm_start
    if ("learner", "optimizer", "learning_rate") not in origins:
        optimizer = replace(optimizer, learning_rate=PRETRAINED_LEARNING_RATE)
    if ("learner", "optimizer", "final_learning_rate") not in origins:
        optimizer = replace(optimizer, final_learning_rate=optimizer.learning_rate / 5)
    if ("learner", "warm_start", "learning_rate") not in origins:
        warm_start = replace(warm_start, learning_rate=PRETRAINED_WARM_START_RATE)
    return replace(learner, optimizer=optimizer, warm_start=warm_start)


def secret_references(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Kind (env or file) and name of each secret of this configuration, by dotted key."""
    references = {key: reference(value) for key, value in _texts(config) if is_secret(key)}
    return {key: parts for key, parts in references.items() if parts is not None}


def _texts(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every text among a section's settings, including lists and tables."""
    for name, value in _settings_of(section):
        if isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield from _texts(value, f"{prefix}{name}.")


def _settings_of(section: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a section, a list or a table; nothing for other values."""
    if is_dataclass(section):
        yield from ((setting.name, getattr(section, setting.name)) for setting in fields(section))
    elif isinstance(section, Mapping):
        yield from section.items()
    elif isinstance(section, list | tuple):
        yield from ((str(place), value) for place, value in enumerate(section))


def secret_variables(config: RunConfig) -> frozenset[str]:
    """Environment variables that hold secrets of this configuration."""
    return frozenset(name for kind, name in secret_references(config).values() if kind == "env")


def inference_urls(config: InferenceConfig) -> tuple[str, ...]:
    """URLs at which workers on this machine reach the inference servers with these settings."""
    return tuple(f"http://{config.host}:{config.port + ordinal}/v1" for ordinal in range(config.replicas))


def servers_of(config: RunConfig) -> Callable[[int], tuple[str, ...]] | None:
    """Return a function from the number of the run's inference servers to their URLs; None if the workers use servers
    other than those of `inference`."""
    inference = config.inference
    if not inference.port or config.worker.inference_urls != inference_urls(inference):
        return None
    return lambda replicas: inference_urls(replace(inference, replicas=replicas))


def to_toml(config: object) -> str:
    """Return a configuration as TOML that loads to an equal configuration."""
    return tomli_w.dumps(plain(config))

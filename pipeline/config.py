"""The one configuration of a run: a typed tree, from TOML, then the environment, then flags.

Every package owns the settings of its own parts; this module composes them and promises that a key nobody knows, a
value of the wrong type or two settings that contradict each other is one error that says where it stands.
"""

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from consumers.grouping.config import GrouperConfig, GroupingConfig
from consumers.learner.config import LearnerConfig
from infra.config import BrokerConfig
from pipeline.toml import render
from producers.capacity import check_capacity
from producers.config import CapacityConfig, InferenceConfig, WorkerConfig
from topics.config import KafkaConfig, TopicsConfig
from topics.errors import ConfigurationError

ENVIRONMENT_PREFIX = "ROLLSTREAM__"
BOOTSTRAP_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
_RECORD_OVERHEAD = 4096
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """How `rollstream run` treats the processes of a run."""

    workers: int = 2
    """Environment workers; grouping processes are counted by grouper.processes."""
    ready_timeout_s: float = 120.0
    """How long a role may take from its start until it is ready."""
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
    data_dir: Path = Path(".rollstream")
    """Where logs, checkpoints, caches and the local broker's data lie."""
    log_level: str = "info"
    """debug, info, warning or error."""
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    grouping: GroupingConfig = field(default_factory=GroupingConfig)
    grouper: GrouperConfig = field(default_factory=GrouperConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
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
        for name, size in (
            ("grouping.batch_bytes", self.grouping.batch_bytes),
            ("learner.weights.chunk_bytes", self.learner.weights.chunk_bytes),
        ):
            if size + _RECORD_OVERHEAD > self.kafka.max_record_bytes:
                raise ConfigurationError(
                    f"{name} {size} leaves no room in kafka.max_record_bytes {self.kafka.max_record_bytes}: "
                    f"lower the one or raise the other"
                )
        check_capacity(self.capacity)

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


class Layer(NamedTuple):
    """Settings of one origin, e.g. a file; strings of the environment and of flags are parsed by the field's type."""

    origin: str
    path: tuple[str, ...]
    value: Any
    textual: bool


def load(
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    client_flags: Sequence[str] = (),
) -> RunConfig:
    """The configuration of a TOML file, overridden by `environment`, then by flags like `grouping.batch_rollouts=64`.

    `client_flags` are librdkafka's own keys, `key=value`. Raises ConfigurationError naming file, variable or flag, the
    key, and the remedy.
    """
    tree: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    layers = [*_file_layers(path), *_environment_layers(environment or {}), *_flag_layers(flags, client_flags)]
    for layer in layers:
        _place(tree, origins, layer)
    config: RunConfig = _build(RunConfig, tree, (), origins)
    return _derived(config, origins)


def _derived(config: RunConfig, origins: Mapping[tuple[str, ...], str]) -> RunConfig:
    """What nobody set follows from what is: seeds from seed, paths from data_dir and run, an address from its port."""
    for name in ("inference", "worker", "grouping", "learner"):
        if (name, "seed") not in origins:
            config = replace(config, **{name: replace(getattr(config, name), seed=config.seed)})
    if ("learner", "checkpoint", "directory") not in origins:
        checkpoint = replace(config.learner.checkpoint, directory=str(config.run_dir / "checkpoints"))
        config = replace(config, learner=replace(config.learner, checkpoint=checkpoint))
    if ("broker", "data_dir") not in origins:
        config = replace(config, broker=replace(config.broker, data_dir=config.data_dir / "broker"))
    if ("worker", "inference_urls") not in origins and config.inference.port:
        config = replace(config, worker=replace(config.worker, inference_urls=(inference_url(config.inference),)))
    return config


def inference_url(config: InferenceConfig) -> str:
    """Where the workers of this machine reach an inference server of these settings."""
    return f"http://{config.host}:{config.port}/v1"


def known_keys() -> tuple[str, ...]:
    """Every key of the tree, dotted, e.g. `kafka.bootstrap_servers`; tables of free keys end in `.*`."""
    return tuple(_keys(RunConfig, ()))


def to_toml(config: object) -> str:
    """The configuration as TOML that loads to an equal one."""
    return render(_plain(config))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _file_layers(path: Path | None) -> Iterator[Layer]:
    if path is None:
        return
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigurationError(f"configuration file {path} is not TOML: {error}") from error
    yield Layer(str(path), (), content, False)


def _environment_layers(environment: Mapping[str, str]) -> Iterator[Layer]:
    if environment.get(BOOTSTRAP_VARIABLE, "").strip():
        yield Layer(BOOTSTRAP_VARIABLE, ("kafka", "bootstrap_servers"), environment[BOOTSTRAP_VARIABLE].strip(), True)
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            yield Layer(name, path, environment[name], True)


def _flag_layers(flags: Sequence[str], client_flags: Sequence[str]) -> Iterator[Layer]:
    for flag in flags:
        key, separator, value = flag.partition("=")
        if not separator or not key.strip():
            raise ConfigurationError(f"--set {flag}: give key=value, e.g. --set grouping.batch_rollouts=64")
        yield Layer(f"--set {key.strip()}", tuple(key.strip().split(".")), value, True)
    for flag in client_flags:
        key, separator, value = flag.partition("=")
        if not separator or not key.strip():
            raise ConfigurationError(f"-X {flag}: give key=value, e.g. -X security.protocol=SASL_SSL")
        yield Layer(f"-X {key.strip()}", ("kafka", "client", key.strip()), value, True)


def _place(tree: dict[str, Any], origins: dict[tuple[str, ...], str], layer: Layer) -> None:
    """Check a layer's keys against the tree of dataclasses and merge its values, each parsed to its field's type."""

    def walk(cls: type, at: tuple[str, ...], values: Mapping[str, Any], into: dict[str, Any]) -> None:
        for name, value in values.items():
            here = (*at, name)
            hint = _hints(cls).get(name)
            if hint is None:
                raise ConfigurationError(_unknown(layer.origin, here))
            if dataclasses.is_dataclass(hint):
                if not isinstance(value, dict):
                    raise ConfigurationError(
                        f"{layer.origin}: {'.'.join(here)} is a table of settings, not {value!r}; "
                        f"set one of {', '.join(_hints(cast(type, hint)))} in it"
                    )
                walk(cast(type, hint), here, value, into.setdefault(name, {}))
            elif _is_table(hint) and isinstance(value, dict):
                into.setdefault(name, {}).update(_leaf(layer.origin, here, dict(_flatten(value)), hint))
                origins[here] = layer.origin
            else:
                into[name] = _leaf(layer.origin, here, _parsed(layer, here, value, hint), hint)
                origins[here] = layer.origin

    nested: Any = layer.value
    for part in reversed(layer.path):
        nested = {part: nested}
    if layer.path:
        nested = _rejoin_table_keys(nested, layer.origin.startswith(ENVIRONMENT_PREFIX))
    walk(RunConfig, (), nested, tree)


def _rejoin_table_keys(nested: dict[str, Any], from_environment: bool) -> dict[str, Any]:
    """Below a table of free keys the rest of the path is one dotted key; in variables `_` stands for the dot."""
    path = []
    value: Any = nested
    while isinstance(value, dict):
        [(part, value)] = value.items()
        path.append(part)
    hint: Any = RunConfig
    for depth, part in enumerate(path):
        hint = _hints(cast(type, hint)).get(part) if dataclasses.is_dataclass(hint) else None
        if hint is not None and _is_table(hint) and depth + 1 < len(path):
            key = ".".join(path[depth + 1 :])
            path[depth + 1 :] = [key.replace("_", ".") if from_environment else key]
            break
    for part in reversed(path):
        value = {part: value}
    return cast(dict[str, Any], value)


def _parsed(layer: Layer, here: tuple[str, ...], value: Any, hint: Any) -> Any:
    """Text of a variable or flag as what its field holds: lists and tables are written as in TOML."""
    if not (layer.textual and isinstance(value, str)) or hint in (str, Path):
        return value
    if typing.get_origin(hint) in (list, tuple) or _is_table(hint) or "Sequence" in str(hint):
        try:
            return tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(
                f"{layer.origin}: {'.'.join(here)} expects {_describe(hint)} as in TOML, got {value!r}"
            ) from error
    try:
        # Numbers and booleans; a string where one may stand too stays as it is.
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        return value


def _leaf(origin: str, here: tuple[str, ...], value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint, dec_hook=_path_hook)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{origin}: {'.'.join(here)} expects {_describe(hint)}, got {value!r}") from error


def _path_hook(hint: type, value: Any) -> Any:
    if hint is Path and isinstance(value, str):
        return Path(value)
    raise msgspec.ValidationError(f"{value!r} is no {hint.__name__}")


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a table, whether written `"a.b" = 1` or `a.b = 1`; values as librdkafka and Kafka spell them."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value).lower() if isinstance(value, bool) else str(value)


def _build(cls: type, values: Mapping[str, Any], at: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> Any:
    arguments = {
        name: _build(cast(type, hint), values.get(name, {}), (*at, name), origins) if nested else values[name]
        for name, hint in _hints(cls).items()
        for nested in [dataclasses.is_dataclass(hint)]
        if nested or name in values
    }
    try:
        return cls(**arguments)
    except (ConfigurationError, ValueError) as error:
        given = {o: None for path, o in origins.items() if path[: len(at)] == at}
        where = ", ".join(given) or "defaults"
        section = f"[{'.'.join(at)}] " if at else ""
        raise ConfigurationError(f"{where}: {section}{error}") from error


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _is_table(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _keys(cls: type, at: tuple[str, ...]) -> Iterator[str]:
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _keys(cast(type, hint), (*at, name))
        else:
            yield ".".join((*at, name)) + (".*" if _is_table(hint) else "")


def _unknown(origin: str, path: tuple[str, ...]) -> str:
    """Name the nearest key: spelled most alike, siblings before the same name in another section."""
    key = ".".join(path)
    parent = ".".join(path[:-1])
    keys = known_keys()
    sections = {".".join(k.split(".")[:n]) for k in keys for n in range(1, k.count(".") + 1)}
    siblings = [k for k in (*keys, *sections) if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(key, siblings, 1, 0.75) or difflib.get_close_matches(
        key, (*keys, *sections), 1, 0.6
    )
    if not near:
        near = [k for k in keys if k.rpartition(".")[2] == path[-1]][:1]
    hint = (
        f"did you mean {near[0].removesuffix('.*')}?" if near else f"sections and keys: {', '.join(_hints(RunConfig))}"
    )
    return f"{origin}: unknown key {key}; {hint}"


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    if hint in names:
        return names[hint]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in typing.get_args(hint) if a is not type(None))
    if _is_table(hint):
        return "a table of strings"
    if origin is not None and typing.get_args(hint):
        return f"a list, each item {_describe(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))

"""Settings of grouping. The settings of the fold are part of the log; the settings of the process are not.

A fold never reads a file: its configuration is in the first journal record and in configuration marks.
"""

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, get_type_hints

from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.core.limits import BOUNDS, Bounds, Quota, parse_bounds, parse_quotas
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.records.journal import OffsetRange
from rollstream.topics.wire.signatures import check_public_key, parse_environment_keys

_LEAST = {
    "generation": 0,
    "core_version": 1,
    "batch_rollouts": 1,
    "batch_bytes": 1,
    "min_group_size": 0,
    "capacity_bytes": 1,
    "remembered_bytes": 0,
}
_LONGEST_S = 1e9
CONFIGURATION_BYTES = 128 * 1024
"""Largest configuration, as JSON."""
GENERATION_STEP = 2**32
"""Maximum rise of a generation at once, which leaves numbers for later rises and allows dates and Unix times."""


class ForeignConfiguration(StateRefused):
    """Refusal of a configuration in the log that other code may be able to run but this code cannot."""

    def __init__(self, message: str, core_version: int) -> None:
        super().__init__(message)
        self.core_version = core_version

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.core_version)  # The error may be raised in another process.


EXCLUSIONS = ("exclude_environments", "exclude_workers", "exclude_offsets")
"""Settings that exclude groups."""


def milliseconds(seconds: float) -> int:
    """Return a setting in seconds as whole milliseconds of stream time, at least 1 if it is above 0."""
    return max(1, int(seconds * 1000)) if seconds > 0 else 0


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(GroupingConfig)


@dataclass(frozen=True, kw_only=True)
class GroupingConfig:
    """Settings that decide the batches. Changing them for a running run needs a higher `generation`.

    New limits also apply to existing groups; deadlines that were set before a change stay unchanged.
    """

    generation: int = 0
    """Number of the configuration; a configuration is ignored unless its number exceeds the generation in force."""
    core_version: int = CORE_VERSION
    """Version of the fold's behaviour; a run keeps its first version until a higher generation names another."""
    estimator: str = "rloo"
    """Advantage estimator: one of docs/grouping.md, or an estimator of yours that grouper.estimators names."""
    estimators: tuple[str, ...] = ()
    """Estimators of single environments, as ENVIRONMENT=ESTIMATOR, e.g. gsm8k=grpo; all others have `estimator`."""
    maker: str = "fifo"
    """Batch maker: fifo, reservoir, sft, pairs, or a maker of yours that grouper.makers names."""
    seed: int = 0
    """Seed of batch makers that choose at random."""
    batch_rollouts: int = 64
    """A batch is cut when this many rollouts of whole groups are waiting."""
    batch_bytes: int = 4 * 1024 * 1024
    """A batch is cut when this many bytes are waiting; no batch holds more. It must leave room in the record limit."""
    max_batch_age_s: float = 30.0
    """A batch is cut when its oldest group has waited this long in stream time."""
    min_group_size: int = 0
    """Minimum number of complete episodes of a group when it seals, at the latest at its deadline; 0 means its declared
    size less the cancelled episodes."""
    group_deadline_s: float = 600.0
    """Stream time after which an incomplete group seals or is dropped: the producer's episode limit plus a margin."""
    max_policy_lag: int = 4
    """Policy versions that a group may lag behind the policy clock; negative means no limit."""
    max_age_s: float = -1.0
    """Maximum stream time from a group's first record to its batch; negative means no limit."""
    future_deadline_s: float = 600.0
    """Stream time that a group waits for the policy clock to reach its version."""
    capacity_bytes: int = 256 * 1024 * 1024
    """Memory that unfinished groups of one partition may take. Beyond it, the oldest incomplete group is dropped, or,
    if there is none, the oldest that waits for the policy clock."""
    remembered_bytes: int = 64 * 1024 * 1024
    """Memory that finished groups of one partition may take; beyond it, the oldest are forgotten before `horizon_s`."""
    horizon_s: float = 3600.0
    """Stream time for which finished groups are remembered."""
    keep_zero_variance: bool = False
    """Whether groups of equal rewards are batched, for losses that learn from more than rewards, such as distillation.
    Otherwise, they are dropped unless the estimator keeps them."""
    drop_superseded: bool = False
    """Whether groups of older versions of an example are dropped once a group of a newer version was offered for
    batches."""
    allow_filtered_sampling: bool = False
    """Whether rollouts sampled with top_p, top_k or min_p may be trained on without their sampling_mask."""
    exclude_environments: tuple[str, ...] = ()
    """Environments whose groups are dropped."""
    exclude_workers: tuple[str, ...] = ()
    """Workers whose groups are dropped."""
    exclude_offsets: tuple[str, ...] = ()
    """Rollouts whose groups are dropped, as ranges PARTITION:FIRST-LAST of offsets, the last one included."""
    min_reward: float = -1e9
    """Minimum reward of a rollout; a rollout with a lower reward is dropped as invalid."""
    max_reward: float = 1e9
    """Maximum reward. The range depends on the environment, so the default only refuses absurd rewards."""
    min_temperature: float = 0.01
    """Minimum sampling temperature; 0, which is greedy, is always allowed."""
    max_temperature: float = 100.0
    """Maximum sampling temperature."""
    vocabulary_size: int = 2**24
    """Exclusive upper bound of token ids. With the model's vocabulary size, no learner gets an unknown id."""
    max_tokens: int = 2**20
    """Maximum number of tokens of a rollout."""
    bounds: tuple[str, ...] = ()
    """Bounds of single environments: ENVIRONMENT:KEY=VALUE with one of the six keys above, e.g. gsm8k:max_reward=1."""
    token_arrays: tuple[str, ...] = ()
    """Arrays of rollouts' `token_arrays` that batches carry, by name, e.g. weight_version. They count in batch_bytes
    and in capacity_bytes. The reference log-probabilities, routed_experts and sampling_mask need no entry
    here."""
    mark_keys: tuple[str, ...] = ()
    """Public keys of the processes that may write marks, such as grouping processes; other marks are dropped as
    invalid, unless they only move stream time. If empty, whoever may write to `rollouts` may write marks."""
    environment_keys: tuple[str, ...] = ()
    """Public keys of the processes that may write rollouts of an environment, as ENVIRONMENT:KEY; other rollouts and
    cancellations are dropped as invalid. Rollouts of an environment without a key need no signature."""
    quotas: tuple[str, ...] = ()
    """Limits for the groups of an environment on a partition, as ENVIRONMENT:KEY=NUMBER with open_groups, held_bytes,
    rollouts_per_s or bytes_per_s. Beyond a limit, groups of this environment are dropped."""

    def __post_init__(self) -> None:
        for name, kind in _types().items():
            value = getattr(self, name)
            if kind is float and type(value) is int and abs(value) < 2**1023:
                object.__setattr__(self, name, float(value))
            elif kind == tuple[str, ...]:
                if type(value) is not tuple or not all(type(item) is str for item in value):
                    raise ConfigurationError(f"grouping.{name} is {value!r}; it must be a list of strings")
            elif type(value) is not kind:
                raise ConfigurationError(f"grouping.{name} is {value!r}; it must be of type {kind.__name__}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigurationError(f"grouping.{name} is {getattr(self, name)}; it must be at least {least}")
        if self.core_version > CORE_VERSION:
            raise ConfigurationError(
                f"grouping.core_version is {self.core_version}; this release knows versions up to {CORE_VERSION}"
            )
        for name in ("max_batch_age_s", "group_deadline_s", "future_deadline_s", "horizon_s"):
            if not 0.001 <= getattr(self, name) <= _LONGEST_S:
                raise ConfigurationError(
                    f"grouping.{name} is {getattr(self, name)}; it must be 0.001 to {_LONGEST_S:g} seconds"
                )
        if not abs(self.max_age_s) <= _LONGEST_S:
            raise ConfigurationError(
                f"grouping.max_age_s is {self.max_age_s}; it must be at most {_LONGEST_S:g} seconds; a negative number "
                "means no limit"
            )
        for text in self.exclude_offsets:
            try:
                OffsetRange.parse(text)
            except ConfigurationError as error:
                raise ConfigurationError(f"grouping.exclude_offsets: {error}") from error
        self._default_bounds.check("grouping")
        parse_bounds(self.bounds, self._default_bounds)
        for key in self.mark_keys:
            check_public_key(key, "grouping.mark_keys")
        parse_environment_keys(self.environment_keys)
        parse_quotas(self.quotas)
        for text in self.estimators:
            if not all(text.partition("=")):
                raise ConfigurationError(
                    f"grouping.estimators: {text!r} names no environment and its estimator; write "
                    "ENVIRONMENT=ESTIMATOR, e.g. gsm8k=grpo"
                )
        if (size := len(self.to_json())) > CONFIGURATION_BYTES:
            raise ConfigurationError(
                f"grouping takes {size} bytes as JSON, but every journal record contains it, and at most "
                f"{CONFIGURATION_BYTES} are allowed; exclude fewer environments, workers and ranges of offsets"
            )

    def excludes_offset(self, partition: int, offset: int) -> bool:
        """Whether `exclude_offsets` names an offset of a partition of `rollouts`."""
        firsts, lasts = self._excluded_offsets.get(partition, ((), ()))
        at = bisect_right(firsts, offset) - 1
        return at >= 0 and offset <= lasts[at]

    def estimator_of(self, environment: str) -> str:
        """Return the name of an environment's estimator."""
        return self._estimators.get(environment, self.estimator)

    @property
    def estimator_names(self) -> tuple[str, ...]:
        """Names of all estimators, in the order of the settings, each once."""
        return tuple(dict.fromkeys((self.estimator, *self._estimators.values())))

    def bounds_of(self, environment: str) -> Bounds:
        """Return the bounds of an environment."""
        return self._bounds.get(environment, self._default_bounds)

    @cached_property
    def _estimators(self) -> Mapping[str, str]:
        pairs = (text.partition("=") for text in self.estimators)
        return {environment: name for environment, _equals, name in pairs}

    @cached_property
    def keys_by_environment(self) -> Mapping[str, tuple[str, ...]]:
        """Public keys of the processes that may write rollouts, by environment."""
        return parse_environment_keys(self.environment_keys)

    @cached_property
    def quotas_by_environment(self) -> Mapping[str, Quota]:
        """Quotas by environment."""
        return parse_quotas(self.quotas)

    @cached_property
    def _default_bounds(self) -> Bounds:
        return Bounds(*(getattr(self, name) for name in BOUNDS))

    @cached_property
    def _bounds(self) -> Mapping[str, Bounds]:
        return parse_bounds(self.bounds, self._default_bounds)

    @cached_property
    def _excluded_offsets(self) -> dict[int, tuple[list[int], list[int]]]:
        return _merged(map(OffsetRange.parse, self.exclude_offsets))

    def to_json(self) -> str:
        """Return the whole configuration as it is written to the log."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "GroupingConfig":
        """Decode a configuration; a text without a core version has core version 1 in every release.

        Raises ForeignConfiguration for a text from newer code (a newer core version or unknown keys), and
        ConfigurationError if no code can have run it.
        """
        try:
            values: dict[str, Any] = {"core_version": 1, **json.loads(text)}
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(f"the log holds a grouping configuration that is none: {error}") from error
        unknown = sorted(set(values) - set(_types()))
        version = values["core_version"]
        if unknown or (type(version) is int and version > CORE_VERSION):
            what = f"keys {', '.join(unknown[:5])}" if unknown else f"core version {version}"
            raise ForeignConfiguration(
                f"the log holds a grouping configuration with {what}, which this release (core version {CORE_VERSION}) "
                f"does not know: upgrade rollstream",
                version if type(version) is int else 0,
            )
        for name, kind in _types().items():
            if kind == tuple[str, ...] and isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


@lru_cache(maxsize=64)
def _to_json(config: GroupingConfig) -> str:
    # Cached, because every commit of every task encodes one of a few configurations.
    values = dataclasses.asdict(config)
    if not config.estimators:
        del values["estimators"]  # A run that does not use it has the bytes that it had before this key existed.
    return json.dumps(values, sort_keys=True)


def _merged(ranges: Iterable[OffsetRange]) -> dict[int, tuple[list[int], list[int]]]:
    """Merge ranges that overlap; return ascending first and last offsets by partition."""
    merged: dict[int, tuple[list[int], list[int]]] = {}
    for partition, first, last in sorted(ranges):
        firsts, lasts = merged.setdefault(partition, ([], []))
        if lasts and first <= lasts[-1]:
            lasts[-1] = max(lasts[-1], last)
        else:
            firsts.append(first)
            lasts.append(last)
    return merged


def largest_batch_bytes(max_record_bytes: int) -> int:
    """Return the largest grouping.batch_bytes for a record limit, of which a fifth is left for the encoding."""
    return max_record_bytes * 4 // 5


def check_batch_bytes(grouping: GroupingConfig, max_record_bytes: int) -> None:
    """Raise ConfigurationError if a batch may exceed the record limit."""
    most = largest_batch_bytes(max_record_bytes)
    if grouping.batch_bytes > most:
        raise ConfigurationError(
            f"grouping.batch_bytes {grouping.batch_bytes} leaves no room in kafka.max_record_bytes {max_record_bytes}: "
            f"lower grouping.batch_bytes to at most {most}, or raise kafka.max_record_bytes"
        )


@dataclass(frozen=True, kw_only=True)
class AutoscaleConfig:
    """Settings for adding and removing grouping processes by their lag, in `rollstream run` or on Kubernetes."""

    enabled: bool = False
    """Whether `rollstream run` adds and removes grouping processes by their lag."""
    min_processes: int = 1
    """Minimum number of processes."""
    max_processes: int = 0
    """Maximum number of processes. 0, like any number above the number of partitions, means one per partition."""
    lag_per_process: int = 2000
    """Lag on `rollouts`, in records, that one process may have. The number of processes is the lag divided by this."""
    interval_s: float = 15.0
    """Time between two decisions."""
    cooldown_s: float = 300.0
    """Time for which a process must not have been needed before it is removed."""

    def __post_init__(self) -> None:
        for name, least in (("min_processes", 1), ("max_processes", 0), ("lag_per_process", 1), ("cooldown_s", 0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(
                    f"grouper.autoscale.{name} is {getattr(self, name)}; it must be at least {least}"
                )
        if not self.interval_s > 0:
            raise ConfigurationError(f"grouper.autoscale.interval_s is {self.interval_s:g}; it must be above 0")
        if 0 < self.max_processes < self.min_processes:
            raise ConfigurationError(
                f"grouper.autoscale.max_processes {self.max_processes} is below min_processes {self.min_processes}: "
                "raise max_processes, or lower min_processes"
            )


@dataclass(frozen=True, kw_only=True)
class GrouperConfig:
    """Settings that decide how a grouping process runs; they never change its batches."""

    processes: int = 2
    """Grouping processes that a supervised run starts."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    group: str = "grouper"
    """Consumer group, prefixed with the run's name."""
    leave_on_stop: bool = False
    """Whether a process that is told to stop leaves the group, so that its partitions move to other processes at once
    and not after kafka.session_timeout_s. This is for processes that an autoscaler stops, because they cannot know
    whether they will be started again. Each restart then moves partitions twice."""
    commit_interval_s: float = 0.03
    """Time that effects wait for their transaction; a batch waits only until the previous transaction has ended."""
    max_poll_records: int = 500
    """Maximum number of records of one call to the Kafka client; a transaction begins at the latest after this many."""
    records_per_s: float = 0.0
    """Maximum number of records per second that a process reads, to leave a machine to other programs or to simulate a
    slow process; 0 means no limit."""
    snapshot_every: int = 2000
    """Records between full snapshots of a task's unfinished offsets in the journal."""
    mark_interval_s: float = 0.25
    """Minimum time between two deadline marks of one task."""
    metrics_interval_s: float = 5.0
    """Time between metrics of the process on the metrics topic; 0 writes none."""
    signing_key: str = ""
    """Private key with which marks are signed, in PEM, as a reference: env:NAME or file:PATH. It must match one of
    grouping.mark_keys once they are in force. Needs the extra `signatures`."""
    makers: tuple[str, ...] = ()
    """Your batch makers that grouping.maker may name, as package.module:Class or path/to/file.py:Class. No other makers
    are imported."""
    estimators: tuple[str, ...] = ()
    """Your estimators that grouping.estimator may name, as package.module:function or path/to/file.py:function. No
    other estimators are imported."""

    def __post_init__(self) -> None:
        if not self.records_per_s >= 0:
            raise ConfigurationError(
                f"grouper.records_per_s is {self.records_per_s:g}; it must be above 0, or 0 for no limit"
            )
        if self.autoscale.enabled and not self.metrics_interval_s > 0:
            raise ConfigurationError(
                "grouper.autoscale.enabled needs the lag that processes write, but grouper.metrics_interval_s is "
                f"{self.metrics_interval_s:g}; set it above 0"
            )

    def group_id(self, run: str) -> str:
        """Return the full name of the consumer group of a run."""
        return f"{run}.{self.group}"

    def member(self, run: str, ordinal: int) -> str:
        """Return the name of a process in its consumer group and in metrics."""
        return f"grouper-{run}-{ordinal}"

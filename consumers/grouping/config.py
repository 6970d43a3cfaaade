"""Settings of grouping: those of the fold are part of the log, those of the process are not.

A fold never reads a file: its configuration comes with the first journal record and with configuration marks.
"""

import dataclasses
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, get_type_hints

from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.consumers.grouping.core.quotas import Quota, parse_quotas
from rollstream.consumers.grouping.core.rollout_bounds import BOUNDS, Bounds, parse_bounds
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.offset_ranges import OffsetRange
from rollstream.topics.signatures import check_public_key, parse_environment_keys

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
"""Most by which a generation may rise at once, so that enough remain for later ones; dates and seconds fit."""


class ForeignConfiguration(StateRefused):
    """Refusal of a configuration in the log that other code may run and this code cannot."""

    def __init__(self, message: str, core_version: int) -> None:
        super().__init__(message)
        self.core_version = core_version

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.core_version)  # It may come from another process.


KEYS_SINCE = {
    3: (*BOUNDS, "bounds", "remembered_bytes"),
    5: ("token_arrays",),
    6: ("keep_zero_variance", "mark_keys", "environment_keys", "quotas"),
}
"""Keys that a core version introduced: configurations of earlier versions do not have them."""

EXCLUSIONS = ("exclude_environments", "exclude_workers", "exclude_offsets")
"""Settings that exclude groups."""


def milliseconds(seconds: float) -> int:
    """Return a setting in whole milliseconds of stream time, at least one if it is above 0."""
    return max(1, int(seconds * 1000)) if seconds > 0 else 0


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(GroupingConfig)


@dataclass(frozen=True, kw_only=True)
class GroupingConfig:
    """Settings that decide the batches. Changing them for a running run needs a higher `generation`.

    New limits apply to the groups that exist already; deadlines that were set before a change stay as they were.
    """

    generation: int = 0
    """Number of the configuration; one that is not higher than the generation in force is ignored."""
    core_version: int = CORE_VERSION
    """Version of the fold's behaviour; a run keeps its first one until a higher generation names another."""
    estimator: str = "rloo"
    """Advantage estimator: one of docs/grouping.md, or one of your own that grouper.estimators names."""
    maker: str = "fifo"
    """Batch maker: fifo, reservoir, or one of your own that grouper.makers names."""
    seed: int = 0
    """Seed of batch makers that choose at random."""
    batch_rollouts: int = 64
    """A batch is cut when this many rollouts of whole groups are waiting."""
    batch_bytes: int = 4 * 1024 * 1024
    """A batch is cut when this many bytes are waiting, and holds no more; must leave room in the record limit."""
    max_batch_age_s: float = 30.0
    """A batch is cut when its oldest group has waited this long in stream time."""
    min_group_size: int = 0
    """Least members that a group needs at its deadline; 0 means its declared size."""
    group_deadline_s: float = 600.0
    """Stream time after which an incomplete group seals or is dropped: the producer's episode limit plus a margin."""
    max_policy_lag: int = 4
    """Policy versions that a group may lag behind the policy clock; negative means no limit."""
    max_age_s: float = -1.0
    """Stream time from a group's first record to its batch, at most; negative means no limit."""
    future_deadline_s: float = 600.0
    """Stream time that a group waits for the policy clock to reach its version."""
    capacity_bytes: int = 256 * 1024 * 1024
    """Memory that groups of one partition may take; beyond it the oldest incomplete group is dropped. Before core
    version 3, bytes of their records."""
    remembered_bytes: int = 64 * 1024 * 1024
    """Memory that finished groups of one partition may take; beyond it the oldest are forgotten before `horizon_s`."""
    horizon_s: float = 3600.0
    """Stream time for which finished groups are remembered."""
    keep_zero_variance: bool = False
    """Whether groups of equal rewards are batched: for losses that learn from more than rewards, such as distillation.
    Otherwise they are dropped, unless the estimator keeps them."""
    drop_superseded: bool = False
    """Whether older groups of an example are dropped once a newer one sealed."""
    allow_filtered_sampling: bool = False
    """Whether rollouts sampled with top_p, top_k or min_p may be trained on."""
    exclude_environments: tuple[str, ...] = ()
    """Environments whose groups are dropped."""
    exclude_workers: tuple[str, ...] = ()
    """Workers whose groups are dropped."""
    exclude_offsets: tuple[str, ...] = ()
    """Rollouts whose groups are dropped, as ranges PARTITION:FIRST-LAST of offsets, the last one included."""
    min_reward: float = -1e9
    """Least reward of a rollout; a lower one is dropped as invalid."""
    max_reward: float = 1e9
    """Greatest reward. The range depends on the environment, so the default only refuses absurd rewards."""
    min_temperature: float = 0.01
    """Least sampling temperature; 0, which is greedy, is always allowed."""
    max_temperature: float = 100.0
    """Greatest sampling temperature."""
    vocabulary_size: int = 2**24
    """Upper bound of token ids, itself excluded: with the model's, no learner meets an id that it has no row for."""
    max_tokens: int = 2**20
    """Most tokens of a rollout."""
    bounds: tuple[str, ...] = ()
    """Bounds of single environments: ENVIRONMENT:KEY=VALUE with one of the six keys above, e.g. gsm8k:max_reward=1."""
    token_arrays: tuple[str, ...] = ()
    """Arrays of rollouts' `token_arrays` that batches carry, by name, e.g. weight_version. They count in batch_bytes
    and in capacity_bytes. The reference log-probabilities are always carried."""
    mark_keys: tuple[str, ...] = ()
    """Public keys of those who may write marks, such as grouping processes; marks of others are dropped as invalid.
    Empty: whoever may write to `rollouts`."""
    environment_keys: tuple[str, ...] = ()
    """Public keys of those who may write rollouts of an environment, as ENVIRONMENT:KEY; rollouts and cancellations of
    others are dropped as invalid. Environments without a key: whoever may write to `rollouts`."""
    quotas: tuple[str, ...] = ()
    """Most that the groups of an environment may take on a partition, as ENVIRONMENT:KEY=NUMBER with open_groups,
    held_bytes, rollouts_per_s or bytes_per_s; beyond it, groups of its own are dropped."""

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
        if not math.isfinite(self.max_age_s):
            raise ConfigurationError(f"grouping.max_age_s is {self.max_age_s}; no limit is a negative number")
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
        quotas = parse_quotas(self.quotas).values()
        if self.core_version < 7 and any(quota.limits_rates for quota in quotas):
            raise ConfigurationError(
                f"grouping.quotas limits rates, which came with core version 7, and core_version is {self.core_version}"
            )
        if (size := len(self.to_json())) > CONFIGURATION_BYTES:
            raise ConfigurationError(
                f"grouping takes {size} bytes as JSON, as part of every journal record, at most {CONFIGURATION_BYTES}; "
                f"exclude fewer environments, workers and ranges of offsets"
            )

    def excludes_offset(self, partition: int, offset: int) -> bool:
        """Whether `exclude_offsets` names an offset of a partition of `rollouts`."""
        firsts, lasts = self._excluded_offsets.get(partition, ((), ()))
        at = bisect_right(firsts, offset) - 1
        return at >= 0 and offset <= lasts[at]

    def bounds_of(self, environment: str) -> Bounds:
        """Return the bounds of an environment."""
        return self._bounds.get(environment, self._default_bounds)

    @cached_property
    def keys_by_environment(self) -> Mapping[str, tuple[str, ...]]:
        """Public keys of those who may write rollouts, by environment."""
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
        """Decode a configuration; a text without a core version is of version 1, which had no such key.

        Raises ForeignConfiguration for a text of newer code (a newer core version or unknown keys), and
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
        for since, names in KEYS_SINCE.items():
            early = [name for name in names if name in values]
            if early and type(version) is int and version < since:
                raise ConfigurationError(
                    f"grouping.{early[0]} came with core version {since}, and core_version is {version}"
                )
        for name, kind in _types().items():
            if kind == tuple[str, ...] and isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


@lru_cache(maxsize=64)
def _to_json(config: GroupingConfig) -> str:
    # Every commit of every task asks for the same few configurations.
    values = dataclasses.asdict(config)
    if not config.exclude_offsets:
        # Releases that do not know the key can run every configuration that does not use it.
        del values["exclude_offsets"]
    for since, names in KEYS_SINCE.items():
        for name in names if config.core_version < since else ():
            del values[name]
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
    """Return the greatest grouping.batch_bytes for records of that size: a fifth is left for the rest of the batch."""
    return max_record_bytes * 4 // 5


def check_batch_bytes(grouping: GroupingConfig, max_record_bytes: int) -> None:
    """Raise ConfigurationError if a batch may be larger than a record."""
    most = largest_batch_bytes(max_record_bytes)
    if grouping.batch_bytes > most:
        raise ConfigurationError(
            f"grouping.batch_bytes {grouping.batch_bytes} leaves no room in kafka.max_record_bytes {max_record_bytes}: "
            f"lower it to at most {most}, or raise the other"
        )


@dataclass(frozen=True, kw_only=True)
class AutoscaleConfig:
    """When grouping processes are added and removed: by their lag, in `rollstream run` or on Kubernetes."""

    enabled: bool = False
    """Whether `rollstream run` adds and removes grouping processes by their lag."""
    min_processes: int = 1
    """Fewest processes."""
    max_processes: int = 0
    """Most processes; 0, or more than there are partitions: as many as partitions."""
    lag_per_process: int = 2000
    """Records of `rollouts` that may wait for each process; for one process more there must be as many more."""
    interval_s: float = 15.0
    """Time between two decisions."""
    cooldown_s: float = 300.0
    """Processes are removed only when so many were not needed for this long."""

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
                "raise the one, or lower the other"
            )


@dataclass(frozen=True, kw_only=True)
class GrouperConfig:
    """Settings that decide how a grouping process runs, never its batches."""

    processes: int = 2
    """Grouping processes that a supervised run starts."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    group: str = "grouper"
    """Consumer group, prefixed with the run's name."""
    leave_on_stop: bool = False
    """Whether a process that is told to stop leaves the group, so that its partitions go to others at once and not
    after kafka.session_timeout_s: for processes that others scale, and cannot know whether they come back. Each restart
    then moves partitions twice."""
    commit_interval_s: float = 0.03
    """Time that effects wait for their transaction; one with a batch begins as soon as the one before has ended."""
    max_poll_records: int = 500
    """Most records of one call to the Kafka client."""
    records_per_s: float = 0.0
    """Most records that a process reads in a second, to leave a machine to others or to show what a slow one does; 0:
    as many as it can."""
    snapshot_every: int = 2000
    """Records between full snapshots of a task's unfinished offsets in the journal."""
    mark_interval_s: float = 0.25
    """Least time between two deadline marks of one task."""
    metrics_interval_s: float = 5.0
    """Time between metrics of the process on the metrics topic; 0 writes none."""
    signing_key: str = ""
    """Private key with which marks are signed, in PEM, as a reference: env:NAME or file:PATH. It must go with one of
    grouping.mark_keys once they are in force. Needs the extra `signatures`."""
    makers: tuple[str, ...] = ()
    """Your batch makers that grouping.maker may name, as package.module:Class or path/to/file.py:Class. No others are
    imported."""
    estimators: tuple[str, ...] = ()
    """Your estimators that grouping.estimator may name, as package.module:function or path/to/file.py:function. No
    others are imported."""

    def __post_init__(self) -> None:
        if not self.records_per_s >= 0:
            raise ConfigurationError(
                f"grouper.records_per_s is {self.records_per_s:g}; it must be above 0, or 0 for no limit"
            )
        if self.autoscale.enabled and not self.metrics_interval_s > 0:
            raise ConfigurationError(
                "grouper.autoscale.enabled needs the lag that processes write, and grouper.metrics_interval_s is "
                f"{self.metrics_interval_s:g}; set it above 0"
            )

    def group_id(self, run: str) -> str:
        """Return the full name of the consumer group of a run."""
        return f"{run}.{self.group}"

    def member(self, run: str, ordinal: int) -> str:
        """Return the name of a process as a member of that group, and in metrics."""
        return f"grouper-{run}-{ordinal}"

"""Settings of grouping: those of the fold travel in the log itself, those of the process do not.

A fold never reads a file: its configuration arrives with generation 0 and with configuration marks.
"""

import dataclasses
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, get_type_hints

from consumers.grouping.bounds import BOUNDS, Bounds, by_environment
from consumers.grouping.changes import CORE_VERSION
from topics.errors import ConfigurationError, StateRefused

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
_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class OffsetRange(NamedTuple):
    """Offsets of a partition, the last one included."""

    partition: int
    first: int
    last: int


def offset_range(text: str) -> OffsetRange:
    """Read `PARTITION:FIRST-LAST`, or `PARTITION:OFFSET` for one. Raises ConfigurationError for anything else."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is no range of offsets; write PARTITION:FIRST-LAST, e.g. 0:1200-1450")
    partition, first, last = (int(part) for part in (found[1], found[2], found[3] or found[2]))
    if first > last:
        raise ConfigurationError(f"{text!r} is no range of offsets: it ends before it begins")
    return OffsetRange(partition, first, last)


GENERATION_STEP = 2**32
"""Most a generation rises at once, so that none leaves too few for those after it; dates and seconds fit."""


class ForeignConfiguration(StateRefused):
    """A configuration in the log that other code may run, and this cannot."""

    def __init__(self, message: str, core_version: int) -> None:
        super().__init__(message)
        self.core_version = core_version

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.core_version)  # It may come from another process.


SINCE_3 = (*BOUNDS, "bounds", "remembered_bytes")
"""Keys that came with core version 3: a configuration of an earlier version does not have them."""

EXCLUSIONS = ("exclude_environments", "exclude_workers", "exclude_offsets")
"""Settings that name what is excluded."""


def milliseconds(seconds: float) -> int:
    """Stream time of a setting: whole milliseconds, at least one where it is above 0."""
    return max(1, int(seconds * 1000)) if seconds > 0 else 0


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(GroupingConfig)


@dataclass(frozen=True, kw_only=True)
class GroupingConfig:
    """What decides the batches. Changing it for a running run needs a higher `generation`.

    Limits apply to groups as they are found; deadlines set before a change stay as they were.
    """

    generation: int = 0
    """Counts configurations of a run; a configuration whose generation is not higher than the current is ignored."""
    core_version: int = CORE_VERSION
    """Version of the fold's behaviour; a run keeps the one it started with until a higher generation says otherwise."""
    estimator: str = "rloo"
    """Advantage estimator, one of consumers.grouping.estimators.ESTIMATORS."""
    maker: str = "fifo"
    """Batch maker: fifo, reservoir, or one of yours that grouper.makers names."""
    seed: int = 0
    """Seed of makers that choose at random."""
    batch_rollouts: int = 64
    """A batch is cut when this many rollouts of whole groups are waiting."""
    batch_bytes: int = 4 * 1024 * 1024
    """A batch is cut when this many bytes are waiting, and holds no more; must leave room in the record limit."""
    max_batch_age_s: float = 30.0
    """A batch is cut when its oldest group has waited this long in stream time."""
    min_group_size: int = 0
    """Least members a group needs at its deadline; 0 means its declared size."""
    group_deadline_s: float = 600.0
    """Stream time after which an incomplete group is over: the producer's episode limit plus a margin."""
    max_policy_lag: int = 4
    """Versions a group may lag behind the policy clock; negative means no limit."""
    max_age_s: float = -1.0
    """Stream time a group may take from its first record to its batch; negative means no limit."""
    future_deadline_s: float = 600.0
    """How long a group waits for the policy clock to reach its version."""
    capacity_bytes: int = 256 * 1024 * 1024
    """Memory that groups of one partition take; beyond it the oldest incomplete group is dropped. Before core version 3
    the bytes of their records."""
    remembered_bytes: int = 64 * 1024 * 1024
    """Memory that finished groups of one partition take; beyond it the oldest are forgotten before `horizon_s`."""
    horizon_s: float = 3600.0
    """How long finished groups are remembered, in stream time."""
    drop_superseded: bool = False
    """Whether an older group of an example is dropped once a newer one of it sealed."""
    allow_filtered_sampling: bool = False
    """Whether rollouts sampled with top_p, top_k or min_p may be trained on."""
    exclude_environments: tuple[str, ...] = ()
    """Environments whose groups are dropped."""
    exclude_workers: tuple[str, ...] = ()
    """Workers whose groups are dropped."""
    exclude_offsets: tuple[str, ...] = ()
    """Rollouts whose groups are dropped, as ranges PARTITION:FIRST-LAST of offsets, the last one included."""
    min_reward: float = -1e9
    """Least reward of a rollout that is grouped; one below it is dropped as invalid."""
    max_reward: float = 1e9
    """Greatest reward. What rewards mean is the environment's affair, so the default refuses only what is absurd."""
    min_temperature: float = 0.01
    """Least sampling temperature; 0, which is greedy, is always taken."""
    max_temperature: float = 100.0
    """Greatest sampling temperature."""
    vocabulary_size: int = 2**24
    """Token ids must be below it: give the model's, and no learner meets an id it has no row for."""
    max_tokens: int = 2**20
    """Most tokens of a rollout."""
    bounds: tuple[str, ...] = ()
    """Bounds of single environments: ENVIRONMENT:KEY=VALUE with one of the six keys above, e.g. gsm8k:max_reward=1."""

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
                offset_range(text)
            except ConfigurationError as error:
                raise ConfigurationError(f"grouping.exclude_offsets: {error}") from error
        self._default_bounds.check("grouping")
        by_environment(self.bounds, self._default_bounds)
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
        """What holds for rollouts of an environment."""
        return self._bounds.get(environment, self._default_bounds)

    @cached_property
    def _default_bounds(self) -> Bounds:
        return Bounds(*(getattr(self, name) for name in BOUNDS))

    @cached_property
    def _bounds(self) -> Mapping[str, Bounds]:
        return by_environment(self.bounds, self._default_bounds)

    @cached_property
    def _excluded_offsets(self) -> dict[int, tuple[list[int], list[int]]]:
        return _merged(map(offset_range, self.exclude_offsets))

    def to_json(self) -> str:
        """The whole configuration, as it is written to the log."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "GroupingConfig":
        """Read it back; a text that names no core version is of version 1, which had no such key.

        Raises ForeignConfiguration for a text of newer code (a newer core version, or keys that are unknown here) and
        ConfigurationError for what no code can have run.
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
        early = [name for name in SINCE_3 if name in values]
        if early and type(version) is int and version < 3:
            raise ConfigurationError(f"grouping.{early[0]} came with core version 3, and core_version is {version}")
        for name in (*EXCLUSIONS, "bounds"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)


@lru_cache(maxsize=64)
def _to_json(config: GroupingConfig) -> str:
    # Asked at every commit of every task, for the same few configurations.
    values = dataclasses.asdict(config)
    if not config.exclude_offsets:
        # Releases that do not know the key go on with every configuration that makes no use of it.
        del values["exclude_offsets"]
    if config.core_version < 3:
        for name in SINCE_3:
            del values[name]
    return json.dumps(values, sort_keys=True)


def _merged(ranges: Iterable[OffsetRange]) -> dict[int, tuple[list[int], list[int]]]:
    """First and last offsets of ranges that do not overlap, ascending, by partition."""
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
    """Greatest grouping.batch_bytes for which a record of so many bytes has room: a fifth is for what else it holds."""
    return max_record_bytes * 4 // 5


def check_batch_bytes(grouping: GroupingConfig, max_record_bytes: int) -> None:
    """Raise ConfigurationError where a batch may be larger than a record."""
    most = largest_batch_bytes(max_record_bytes)
    if grouping.batch_bytes > most:
        raise ConfigurationError(
            f"grouping.batch_bytes {grouping.batch_bytes} leaves no room in kafka.max_record_bytes {max_record_bytes}: "
            f"lower it to at most {most}, or raise the other"
        )


@dataclass(frozen=True, kw_only=True)
class GrouperConfig:
    """What decides how a grouping process runs, never what it cuts."""

    processes: int = 2
    """Grouping processes a supervised run starts."""
    group: str = "grouper"
    """Consumer group, prefixed with the run's name."""
    commit_interval_s: float = 0.03
    """How long effects may wait for their transaction."""
    max_poll_records: int = 500
    """Most records taken from the client at once."""
    snapshot_every: int = 2000
    """Records between full snapshots of a task's unfinished offsets in the journal."""
    mark_interval_s: float = 0.25
    """Least time between two deadline marks of one task."""
    metrics_interval_s: float = 5.0
    """Time between figures of the process on the metrics topic; 0 writes none."""
    makers: tuple[str, ...] = ()
    """Batch makers of yours that grouping.maker may name, as package.module:Class. Only these are ever imported."""

    def group_id(self, run: str) -> str:
        """Full name of the consumer group of a run."""
        return f"{run}.{self.group}"

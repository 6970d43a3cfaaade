"""Settings of the store of groups and batches."""

from dataclasses import dataclass

from consumers.grouping.estimators import estimator
from topics.errors import ConfigurationError

_COMPRESSIONS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")
_TARGET, _LEAST = 8, 2


@dataclass(frozen=True, kw_only=True)
class GroupStoreConfig:
    """When groups seal, which rollouts they take, and how they are written."""

    compression: str = "zstd"
    """Of Parquet files: zstd, snappy, gzip, brotli, lz4 or none."""
    capacity_groups: int = 50_000
    """Most groups held in memory, of an environment: open ones, and sealed ones that wait in the batch maker. Beyond it
    the oldest leave; files stay."""
    target_group_size: int | None = None
    """Rollouts at which a group seals; 0 takes the size its rollouts declare, and keeps the producer's groups apart.
    None does so for rollouts of a log, and takes 8 for those added by hand."""
    min_group_size: int | None = None
    """Least rollouts of a group that seals by time or at the end;
    None is the declared size where that rules, else 2."""
    seal_timeout_s: float = 30.0
    """How long a group waits for more, from its first rollout on; negative: for ever."""
    max_per_replica: int = 0
    """Most rollouts of one replica in a group; 0 sets no limit."""
    accept_policy_versions: tuple[int, ...] = ()
    """The policy versions whose rollouts are taken; all of them when empty."""
    estimator: str = "rloo"
    """How advantages come about, within each group: as grouping.estimator."""
    seed: int = 0
    """Of the batch maker's random choices."""

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSIONS:
            raise ConfigurationError(f"compression is {self.compression!r}; it is one of {', '.join(_COMPRESSIONS)}")
        for name, value, least in (
            ("capacity_groups", self.capacity_groups, 1),
            ("target_group_size", self.target_group_size, 0),
            ("min_group_size", self.min_group_size, 1),
            ("max_per_replica", self.max_per_replica, 0),
        ):
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
        target = _TARGET if self.target_group_size is None else self.target_group_size
        if 0 < target < (self.min_group_size or 0):
            raise ConfigurationError(f"min_group_size {self.min_group_size} is above target_group_size {target}")
        if estimator(self.estimator).over_batch is not None:
            raise ConfigurationError(
                f"estimator {self.estimator!r} looks at whole batches of grouping; take one that looks at groups alone"
            )

    def declared_size_rules(self, *, from_log: bool) -> bool:
        """Whether groups are the producer's, of the size their rollouts declare."""
        return self.target_group_size == 0 or (self.target_group_size is None and from_log)

    def target(self, declared: int, *, from_log: bool) -> int:
        """Rollouts at which a group seals whose rollouts declare a size."""
        return declared if self.declared_size_rules(from_log=from_log) else self.target_group_size or _TARGET

    def least(self, target: int, *, from_log: bool) -> int:
        """Least rollouts of a group that seals by time or at the end, where it seals at `target` otherwise."""
        if self.min_group_size is not None:
            return min(self.min_group_size, target)
        return target if self.declared_size_rules(from_log=from_log) else min(_LEAST, target)

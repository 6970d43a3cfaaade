"""Settings of the store of groups and batches."""

from dataclasses import dataclass

from consumers.grouping.estimators import estimator
from topics.errors import ConfigurationError

_COMPRESSIONS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")


@dataclass(frozen=True, kw_only=True)
class GroupStoreConfig:
    """When groups seal, which rollouts they take, and how they are written."""

    compression: str = "zstd"
    """Of Parquet files: zstd, snappy, gzip, brotli, lz4 or none."""
    capacity_groups: int = 50_000
    """Most groups held in memory, of an environment: open ones, and sealed ones that wait in the batch maker. Beyond it
    the oldest leave; files stay."""
    target_group_size: int = 8
    """Rollouts at which a group seals; 0 takes the size its rollouts declare, and keeps the producer's groups apart."""
    min_group_size: int = 2
    """Least rollouts of a group that seals by time or at the end."""
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
        for name, least in (
            ("capacity_groups", 1),
            ("target_group_size", 0),
            ("min_group_size", 1),
            ("max_per_replica", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if 0 < self.target_group_size < self.min_group_size:
            raise ConfigurationError(
                f"min_group_size {self.min_group_size} is above target_group_size {self.target_group_size}"
            )
        if estimator(self.estimator).over_batch is not None:
            raise ConfigurationError(
                f"estimator {self.estimator!r} looks at whole batches of grouping; take one that looks at groups alone"
            )

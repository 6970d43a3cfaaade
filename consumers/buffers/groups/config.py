"""Settings of a store of groups and batches."""

from dataclasses import dataclass

from rollstream.consumers.grouping.core.estimators import estimator
from rollstream.topics.errors import ConfigurationError

_COMPRESSIONS = ("zstd", "snappy", "gzip", "brotli", "lz4", "none")
_TARGET, _LEAST = 8, 2


@dataclass(frozen=True, kw_only=True)
class GroupStoreConfig:
    """Settings for sealing groups, accepting rollouts and writing files."""

    compression: str = "zstd"
    """Compression of Parquet files: zstd, snappy, gzip, brotli, lz4 or none."""
    capacity_groups: int = 50_000
    """Maximum number of open groups of an environment, and of sealed groups in its batch maker. Beyond it, the oldest
    open group seals, or is dropped if it is below the minimum size; the oldest sealed group leaves the batch maker, and
    its file stays."""
    target_group_size: int | None = None
    """Number of rollouts at which a group seals. 0 uses the number of episodes that its rollouts declare, and keeps the
    producer's groups apart. None means 0 for rollouts from the log, and 8 for rollouts added by hand."""
    min_group_size: int | None = None
    """Minimum number of rollouts, or of complete episodes if groups have a declared size, of a group that seals by time
    or on closing. None means the declared size if groups have one, else 2."""
    seal_timeout_s: float = 30.0
    """Time a group waits for more rollouts after its first; negative: no limit."""
    max_per_replica: int = 0
    """Maximum number of rollouts of one replica in a group; 0: no limit."""
    accept_policy_versions: tuple[int, ...] = ()
    """Policy versions whose rollouts are accepted; empty: all."""
    estimator: str = "rloo"
    """Estimator of advantages within each group, named as in the setting grouping.estimator."""
    seed: int = 0
    """Seed of the batch maker's random choices."""

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSIONS:
            raise ConfigurationError(f"compression is {self.compression!r}; choose one of {', '.join(_COMPRESSIONS)}")
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
                f"estimator {self.estimator!r} normalises over the batches that grouping cuts; choose an estimator "
                "that needs only the group"
            )

    def declared_size_rules(self, *, from_log: bool) -> bool:
        """Whether the producer's groups are kept, with the size that their rollouts declare."""
        return self.target_group_size == 0 or (self.target_group_size is None and from_log)

    def target(self, declared: int, *, from_log: bool) -> int:
        """Size at which a group seals, given the declared size."""
        return declared if self.declared_size_rules(from_log=from_log) else self.target_group_size or _TARGET

    def least(self, target: int, *, from_log: bool) -> int:
        """Minimum size of a group that seals by time or on closing, given its target size."""
        if self.min_group_size is not None:
            return min(self.min_group_size, target)
        return target if self.declared_size_rules(from_log=from_log) else min(_LEAST, target)

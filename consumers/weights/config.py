"""Settings of publishing and following weights, without JAX."""

from dataclasses import dataclass
from typing import Literal

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Settings for policy versions on the log."""

    dtype: Literal["bfloat16", "float32", "model"] = "bfloat16"
    """Dtype that a learner publishes its float32 parameters in; "model" is that of config.json of learner.pretrained.
    Trainers of other kinds publish what they give."""
    chunk_bytes: int = 1024 * 1024
    """Largest chunk; well below KafkaConfig.max_record_bytes."""
    keep_versions: int = 4
    """Newest versions whose chunks are kept, with all versions they build on; chunks of older ones are tombstoned, and
    all manifests are kept."""
    anchor_every: int = 10
    """Versions from one full version to the next; those between are deltas of the version before, if these are at most
    half as large. 1 publishes every version in full."""
    fetch_timeout_s: float = 60.0
    """Longest wait of a follower for the next chunk of a version; afterwards it retries with growing delays."""

    def __post_init__(self) -> None:
        if min(self.chunk_bytes, self.keep_versions, self.anchor_every) < 1:
            raise ConfigurationError(
                f"chunk_bytes {self.chunk_bytes}, keep_versions {self.keep_versions} and anchor_every "
                f"{self.anchor_every} must be at least 1"
            )
        if not self.fetch_timeout_s > 0:
            raise ConfigurationError(f"fetch_timeout_s is {self.fetch_timeout_s}; it must be above 0")

"""Settings of publishing and following weights, without JAX."""

from dataclasses import dataclass
from typing import Literal

from rollstream.topics.config import holds_secret
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.stores import shown

CHUNKS_AT_ONCE = 16
"""Number of `weights` records that a reader of the whole topic holds at once, because each may have a MiB."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Settings for policy versions on the log."""

    dtype: Literal["bfloat16", "float32", "model"] = "bfloat16"
    """Dtype in which a learner publishes its float32 parameters; "model" means the dtype in the config.json of
    learner.pretrained. Trainers of other kinds choose the dtype themselves."""
    chunk_bytes: int = 1024 * 1024
    """Largest chunk; well below KafkaConfig.max_record_bytes."""
    keep_versions: int = 4
    """Number of newest versions whose chunks are kept, with all versions that they build on. Chunks of older versions
    are tombstoned; all manifests are kept. Only versions that are kept can be published again by
    `rollstream weights rollback`."""
    anchor_every: int = 10
    """Number of versions from one full version to the next. The versions between them are published as deltas of the
    previous version, if a delta is at most half as large. 1 publishes every version in full."""
    fetch_timeout_s: float = 60.0
    """Maximum time that a follower waits for the next chunk of a version, including retries at a store of files. After
    that, it retries the version with growing delays."""
    transport: Literal["auto", "log", "files"] = "auto"
    """Place of the bytes of a version: "log" means the topic, "files" means files at url, and "auto" means files if url
    is set and the version has more than files_above_bytes, otherwise the topic."""
    url: str = ""
    """Directory, or fsspec URL, for the bytes of versions. The publisher and all readers must reach it under this name.
    Credentials are read from the environment."""
    files_above_bytes: int = 64 * 1024 * 1024
    """Largest version, or delta, that transport "auto" leaves on the topic if url is set, in bytes before
    compression."""
    file_bytes: int = 16 * 1024 * 1024
    """Largest chunk in a file, before compression."""
    files_at_once: int = 8
    """Number of files that a publisher writes, or a reader reads, at a time; all of them are in memory."""
    store_timeout_s: float = 120.0
    """Maximum time that a publisher tries to write the next file, or waits for the brokers to acknowledge chunks; after
    that, it ends with an error."""
    shards_timeout_s: float = 600.0
    """Maximum time that a process of a learner waits for the other processes at a policy version, after its own part is
    stored. After that, it ends with an error that names the missing processes. Only used if learner.processes is
    above 1."""
    orphan_hours: float = 24.0
    """Age in hours at which `rollstream prune` removes files that no kept version needs."""

    def __post_init__(self) -> None:
        if min(self.chunk_bytes, self.keep_versions, self.anchor_every) < 1:
            raise ConfigurationError(
                f"chunk_bytes {self.chunk_bytes}, keep_versions {self.keep_versions} and anchor_every "
                f"{self.anchor_every} must be at least 1"
            )
        if min(self.file_bytes, self.files_at_once) < 1 or self.files_above_bytes < 0:
            raise ConfigurationError(
                f"file_bytes {self.file_bytes} and files_at_once {self.files_at_once} must be at least 1, and "
                f"files_above_bytes {self.files_above_bytes} at least 0"
            )
        for name in ("fetch_timeout_s", "store_timeout_s", "shards_timeout_s", "orphan_hours"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.transport == "files" and not self.url:
            raise ConfigurationError(
                'learner.weights.transport is "files", but learner.weights.url is empty: set it to a directory or a '
                "URL such as s3://bucket/weights"
            )
        if holds_secret(self.url):
            raise ConfigurationError(
                f"learner.weights.url {shown(self.url)} holds a password or a query, which everybody who reads the log "
                "would see: give credentials in the environment, as the fsspec file system expects them"
            )

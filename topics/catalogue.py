"""The one catalogue of a run's topics: key, value, partitions, cleanup, who writes and who reads.

Provisioning, documentation and access rules are generated from it; nothing else names a topic's settings.
"""

from dataclasses import dataclass
from typing import Literal

from topics.config import KafkaConfig, TopicsConfig
from topics.errors import ConfigurationError

_KEEP = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
_COMPACT = {
    "cleanup.policy": "compact",
    "segment.ms": "5000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "60000",
    "delete.retention.ms": "60000",
}


@dataclass(frozen=True, kw_only=True)
class TopicSpec:
    """One topic of every run."""

    name: str
    key: str
    """What the parts of the key are."""
    values: tuple[str, ...]
    """Records its values hold; empty where they are raw bytes."""
    partitions: Literal["P", "W", "1"]
    cleanup: Literal["none", "compact"]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    doc: str
    append_time: bool = False
    """Whether the broker stamps records (LogAppendTime) instead of the producer."""
    or_one: bool = False
    """Whether one partition does as well: runs that an earlier release made have one, and keep it."""

    def partition_count(self, config: TopicsConfig) -> int:
        """Partitions of the topic in a run of these settings."""
        return {"P": config.partitions, "W": config.weights_partitions, "1": 1}[self.partitions]

    def settings(self, config: TopicsConfig, kafka: KafkaConfig) -> dict[str, str]:
        """The topic's Kafka configuration."""
        settings = dict(_KEEP if self.cleanup == "none" else _COMPACT)
        settings["max.message.bytes"] = str(kafka.max_record_bytes)
        settings["min.insync.replicas"] = str(config.min_insync_replicas)
        if self.append_time:
            settings["message.timestamp.type"] = "LogAppendTime"
        if "env" in self.writers:
            # The broker compresses again what comes otherwise. Clients bound what they decompress of zstd alone: of
            # gzip a megabyte may be a gigabyte for whoever reads it.
            settings["compression.type"] = "zstd"
        return settings


_EVERYONE = ("group", "learn", "infer", "env", "label", "tools")

CATALOGUE: tuple[TopicSpec, ...] = (
    TopicSpec(
        name="rollouts",
        key="environment, example",
        values=("Rollout", "GroupCancelled", "Mark"),
        partitions="P",
        cleanup="none",
        writers=("env", "group", "tools"),
        readers=("group", "tools"),
        append_time=True,
        doc="Every rollout produced, and the marks grouping tasks leave for themselves.",
    ),
    TopicSpec(
        name="batches",
        key="batch id",
        values=("TrainingBatch",),
        partitions="P",
        cleanup="none",
        writers=("group",),
        readers=("learn", "tools"),
        doc="Training batches, on the partition their rollouts came from.",
    ),
    TopicSpec(
        name="batch-index",
        key="batch id",
        values=("BatchIndexEntry",),
        partitions="1",
        cleanup="none",
        writers=("group",),
        readers=("learn", "env", "tools"),
        doc="Where each batch lies; the total order learners follow.",
    ),
    TopicSpec(
        name="journal",
        key="partition",
        values=("JournalRecord",),
        partitions="P",
        cleanup="none",
        writers=("group",),
        readers=("group", "env", "tools"),
        doc="What each transaction of each grouping task changed; snapshots now and then.",
    ),
    TopicSpec(
        name="evals",
        key="environment, example",
        values=("Rollout",),
        partitions="P",
        cleanup="none",
        writers=("env",),
        readers=("tools",),
        append_time=True,
        doc="Rollouts made for evaluation; never trained on.",
    ),
    TopicSpec(
        name="weights",
        key="policy version, publisher epoch, chunk",
        values=(),
        partitions="W",
        cleanup="compact",
        writers=("learn",),
        readers=("infer",),
        doc="Bytes of parameters in chunks; chunks of old versions are tombstoned.",
    ),
    TopicSpec(
        name="policies",
        key="policy version",
        values=("PolicyManifest",),
        partitions="1",
        cleanup="compact",
        writers=("learn",),
        readers=_EVERYONE,
        doc="The manifest of each policy version: its commit point.",
    ),
    TopicSpec(
        name="steps",
        key="learner, step",
        values=("LearnerStep",),
        partitions="1",
        cleanup="compact",
        writers=("learn",),
        readers=("learn", "env", "tools"),
        doc="Which batches each optimizer step used or skipped.",
    ),
    TopicSpec(
        name="metrics",
        key="component",
        values=("Metrics",),
        partitions="1",
        cleanup="none",
        writers=_EVERYONE,
        readers=("tools",),
        doc="Figures of every component.",
    ),
    TopicSpec(
        name="dead-letters",
        key="as the source",
        values=(),
        partitions="P",
        cleanup="none",
        writers=("group", "label", "tools"),
        readers=("tools",),
        or_one=True,
        doc="Records that cannot be decoded, bytes untouched, reason in headers (KIP-1034).",
    ),
    TopicSpec(
        name="unlabelled",
        key="environment, worker",
        values=("TrajectoryRecord",),
        partitions="P",
        cleanup="none",
        writers=("env",),
        readers=("label", "tools"),
        append_time=True,
        doc="Trajectories that wait for their rewards.",
    ),
    TopicSpec(
        name="trajectories",
        key="environment, worker",
        values=("TrajectoryRecord",),
        partitions="P",
        cleanup="none",
        writers=("env", "label"),
        readers=("learn", "tools"),
        append_time=True,
        doc="Arrays of control tasks; those of a worker lie in order, as episodes go on from one to the next.",
    ),
    TopicSpec(
        name="control",
        key="what, which",
        values=("ExcludedBatch", "SkippedOffset", "RetiredLearner"),
        partitions="1",
        cleanup="compact",
        writers=("tools",),
        readers=("env", "group", "learn", "tools"),
        doc="What was decided about a run while it goes on: batches learners leave out, records skipped, who retired.",
    ),
)
_BY_NAME = {spec.name: spec for spec in CATALOGUE}


def spec_of(name: str) -> TopicSpec:
    """The entry of a topic, by its name without the run. Raises ConfigurationError for an unknown name."""
    if name not in _BY_NAME:
        raise ConfigurationError(f"no topic is called {name!r}; topics are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def name_in_run(topic: str) -> str:
    """Name in the catalogue of a topic given by its full name, of whatever run (a restored run names its first)."""
    return topic.rpartition(".")[2]


def topic_name(run: str, name: str) -> str:
    """Full name of a run's topic: `{run}.{name}`."""
    return f"{run}.{spec_of(name).name}"


def run_and_name(topic: str) -> tuple[str, str] | None:
    """The run that a topic belongs to, and its name there; None for a topic of somebody else."""
    run, _, name = topic.rpartition(".")
    return (run, name) if run and any(spec.name == name for spec in CATALOGUE) else None

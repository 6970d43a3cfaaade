"""The catalogue of a run's topics: key, value, partitions, cleanup, writers and readers.

Provisioning, documentation and access rules are generated from it. No other place defines the settings of a topic.
"""

from dataclasses import dataclass
from typing import Literal

from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import ConfigurationError

_MIB = 1024 * 1024
_KEEP = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
_COMPACT = {
    "cleanup.policy": "compact",
    "segment.ms": "5000",
    # The cleaner copies everything that it keeps. At 0.01 it copied versions while they were published and fetched, and
    # took a third to two thirds of the broker's time. At 0.5 a log takes at most twice the size of what is kept.
    "min.cleanable.dirty.ratio": "0.5",
    "max.compaction.lag.ms": "600000",
    "delete.retention.ms": "60000",
}


@dataclass(frozen=True, kw_only=True)
class TopicSpec:
    """One topic of every run."""

    name: str
    key: str
    """Names of the key's parts."""
    values: tuple[str, ...]
    """Record types of its values; empty for raw bytes."""
    partitions: Literal["P", "W", "1"]
    cleanup: Literal["none", "compact"]
    writers: tuple[str, ...]
    """Roles of a run that write to it; `tools` stands for the commands that are not roles."""
    readers: tuple[str, ...]
    """Roles of a run that read it; `tools` has the same meaning as for writers."""
    doc: str
    append_time: bool = False
    """Whether the broker stamps records (LogAppendTime) instead of the producer."""
    segment_bytes: int = 16 * _MIB
    """Size of a segment of a compacted topic. The broker compacts a segment only after the next one has begun."""
    compaction_lag_ms: int = 0
    """Age of a record of a compacted topic in milliseconds before the broker compacts its segment."""

    def partition_count(self, config: TopicsConfig) -> int:
        """Return the number of partitions of the topic in a run with these settings."""
        return {"P": config.partitions, "W": config.weights_partitions, "1": 1}[self.partitions]

    def settings(self, config: TopicsConfig, kafka: KafkaConfig) -> dict[str, str]:
        """Return the topic's Kafka configuration."""
        compacted = _COMPACT | {
            "segment.bytes": str(self.segment_bytes),
            "min.compaction.lag.ms": str(self.compaction_lag_ms),
        }
        settings = dict(_KEEP) if self.cleanup == "none" else compacted
        if self.cleanup == "none" and config.local_retention_s:
            age_ms = str(round(config.local_retention_s * 1000))
            # A segment is copied once the next one has begun.
            settings |= {"remote.storage.enable": "true", "local.retention.ms": age_ms, "segment.ms": age_ms}
        settings["max.message.bytes"] = str(kafka.max_record_bytes)
        settings["min.insync.replicas"] = str(config.min_insync_replicas)
        if self.append_time:
            settings["message.timestamp.type"] = "LogAppendTime"
        if _PLAYERS & set(self.writers):
            # The broker recompresses records that arrive in another codec. Clients limit the decompressed size only for
            # zstd; a megabyte of gzip may expand to a gigabyte in a client that reads it.
            settings["compression.type"] = "zstd"
        return settings


TOOLS = "tools"
"""Stands for the commands that are not roles, such as `ledger`, among the writers and readers of a topic."""
_PLAYERS = frozenset({"env", "eval", "collect"})
"""Roles that run the code of environments."""
_FOLLOW_PROGRESS = ("env", "gateway")
"""Roles that produce only while the learner keeps up."""

CATALOGUE: tuple[TopicSpec, ...] = (
    TopicSpec(
        name="rollouts",
        key="environment, example",
        values=("Rollout", "GroupCancelled", "Mark"),
        partitions="P",
        cleanup="none",
        writers=("env", "gateway", "group", "label", TOOLS),
        readers=("group", *_FOLLOW_PROGRESS, "label", "sink", TOOLS),
        append_time=True,
        doc="Every rollout produced for training, once it has a reward; cancellations of group members; marks.",
    ),
    TopicSpec(
        name="batches",
        key="batch id",
        values=("TrainingBatch",),
        partitions="P",
        cleanup="none",
        writers=("group",),
        readers=("learn", "group", "sink", TOOLS),
        doc="Training batches, on the partition their rollouts came from.",
    ),
    TopicSpec(
        name="batch-index",
        key="batch id",
        values=("BatchIndexEntry",),
        partitions="1",
        cleanup="none",
        writers=("group", TOOLS),
        readers=("learn", *_FOLLOW_PROGRESS, "sink", TOOLS),
        doc="Place of each batch in `batches`, in the order that learners follow.",
    ),
    TopicSpec(
        name="journal",
        key="partition",
        values=("JournalRecord",),
        partitions="P",
        cleanup="none",
        writers=("group", TOOLS),
        readers=("group", *_FOLLOW_PROGRESS, TOOLS),
        doc="Changes made by each transaction of each grouping task, and occasional snapshots.",
    ),
    TopicSpec(
        name="evals",
        key="environment, example",
        values=("Rollout",),
        partitions="P",
        cleanup="none",
        writers=("eval", TOOLS),
        readers=("eval", TOOLS),
        append_time=True,
        doc="Rollouts made for evaluation; never trained on.",
    ),
    TopicSpec(
        name="weights",
        key="policy version, publisher epoch, chunk",
        values=(),
        partitions="W",
        cleanup="compact",
        writers=("learn", TOOLS),
        readers=("learn", "infer", "engine", "serve-weights", "collect", TOOLS),
        # The broker opens three files and syncs for each segment: with 16 MiB, a version of 128 MiB took 1.6 times as
        # long to send. Larger ones were hardly faster, and nothing is removed from the newest segment.
        segment_bytes=64 * _MIB,
        # Compacted at once, most of a version of 2 GiB was copied before the next one replaced it: of versions sent one
        # after another, each took 13.5 s instead of 9.0 s until it was fetched.
        compaction_lag_ms=60_000,
        doc="Bytes of parameters in chunks; chunks of old versions are tombstoned.",
    ),
    TopicSpec(
        name="policies",
        key="policy version",
        values=("PolicyManifest",),
        partitions="1",
        cleanup="compact",
        writers=("learn", TOOLS),
        readers=(
            "learn",
            "infer",
            "engine",
            "serve-weights",
            "gateway",
            "env",
            "group",
            "label",
            "eval",
            "collect",
            TOOLS,
        ),
        doc="The manifest of each policy version: its commit point.",
    ),
    TopicSpec(
        name="steps",
        key="learner, step",
        values=("LearnerStep",),
        partitions="1",
        cleanup="compact",
        writers=("learn",),
        readers=("learn", *_FOLLOW_PROGRESS, "sink", TOOLS),
        doc="The batches that each learner step used or skipped.",
    ),
    TopicSpec(
        name="metrics",
        key="component",
        values=("Metrics",),
        partitions="1",
        cleanup="none",
        writers=("infer", "serve-weights", "gateway", "env", "group", "label", "eval"),
        readers=("group", "sink", TOOLS),
        doc="Metrics of every component except learners, whose metrics are on `steps`.",
    ),
    TopicSpec(
        name="dead-letters",
        key="as the source",
        values=(),
        partitions="P",
        cleanup="none",
        writers=("group", "label", "learn", TOOLS),
        readers=(TOOLS,),
        doc="Records that cannot be decoded, with unchanged bytes and the reason in headers (KIP-1034), and places of "
        "batches with a stored array that is missing.",
    ),
    TopicSpec(
        name="unlabelled",
        key="environment, worker; environment, example",
        values=("TrajectoryRecord", "Rollout"),
        partitions="P",
        cleanup="none",
        writers=("env", "gateway", "collect", TOOLS),
        readers=("label", "env", "gateway", "group", TOOLS),
        append_time=True,
        doc="Trajectories and rollouts that wait for rewards.",
    ),
    TopicSpec(
        name="trajectories",
        key="environment, worker",
        values=("TrajectoryRecord",),
        partitions="P",
        cleanup="none",
        writers=("collect", "label"),
        readers=("fill", "label", TOOLS),
        append_time=True,
        doc="Arrays of control tasks; a worker's trajectories are in order because its episodes span several of them.",
    ),
    TopicSpec(
        name="calls",
        key="session",
        values=("ModelCall", "SessionEvent"),
        partitions="P",
        cleanup="none",
        writers=("gateway", "env"),
        readers=(*_FOLLOW_PROGRESS, TOOLS),
        append_time=True,
        doc="Every model call of a captured session, with the session's start, rewards and end; the sessions of a "
        "group share a partition.",
    ),
    TopicSpec(
        name="rescores",
        key="rescoring, partition, offset",
        values=("RescoredRollout",),
        partitions="P",
        cleanup="none",
        writers=(TOOLS,),
        readers=(TOOLS,),
        doc="Rewards of old rollouts by another verifier, on the partition of the rollout; nothing trains on them.",
    ),
    TopicSpec(
        name="samples",
        key="partition of the queue, sample, field",
        values=("SampleField", "SamplesCleared"),
        partitions="P",
        cleanup="none",
        writers=("learn",),
        readers=("learn", TOOLS),
        doc="What a trainer's TransferQueue holds: fields of samples, and marks of cleared samples.",
    ),
    TopicSpec(
        name="tokenizers",
        key="digest, part",
        values=("TokenizerPart",),
        partitions="1",
        cleanup="compact",
        writers=("learn", TOOLS),
        readers=("learn", TOOLS),
        doc="Files of the run's tokenizer, and the text of each token.",
    ),
    TopicSpec(
        name="control",
        key="what, which",
        values=(
            "ExcludedBatch",
            "SkippedOffset",
            "PausedPartition",
            "RetiredLearner",
            "ForkedLearner",
            "MixtureState",
            "DesiredProcesses",
            "EvaluationRequest",
            "StopRequest",
            "DrainRequest",
            "MixtureWeight",
            "PausedEnvironment",
            "RunSupervisor",
            "RequestAnswer",
        ),
        partitions="1",
        cleanup="compact",
        writers=("env", "group", TOOLS),
        readers=("learn", "infer", "serve-weights", "group", *_FOLLOW_PROGRESS, "label", "eval", "collect", TOOLS),
        doc="Decisions about a run: excluded batches, skipped records, paused partitions, retired and forked learners, "
        "mixture states, requests of operators and their answers, and who supervises the run.",
    ),
)
_BY_NAME = {spec.name: spec for spec in CATALOGUE}
PRUNED = ("rollouts", "journal", "batch-index", "batches", "unlabelled", "trajectories", "calls", "samples")
"""Topics from which `rollstream prune` deletes records, in that order: a run is consistent after each."""


def spec_of(name: str) -> TopicSpec:
    """Return the entry of a topic by its name without the run. Raises ConfigurationError for an unknown name."""
    if name not in _BY_NAME:
        raise ConfigurationError(f"there is no topic {name!r}; topics are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def name_in_run(topic: str) -> str:
    """Return the name of a topic in the catalogue, given its full name in any run."""
    return topic.rpartition(".")[2]


def topic_name(run: str, name: str) -> str:
    """Return the full name of a run's topic: `{run}.{name}`."""
    return f"{run}.{spec_of(name).name}"


def run_and_name(topic: str) -> tuple[str, str] | None:
    """Return the run that a topic belongs to and its name in the catalogue; None for a foreign topic."""
    run, _, name = topic.rpartition(".")
    return (run, name) if run and any(spec.name == name for spec in CATALOGUE) else None

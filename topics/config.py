"""Settings of the connection to Kafka and of a run's topics, common to every role."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from rollstream.topics.errors import ConfigurationError

_NAMED = "which is derived from the run's name: remove the key, or set run"
_COMMITTED = "but positions are committed in transactions only: remove the key"
_WRITTEN_ONCE = "without which records could be lost or doubled: remove the key"
_DECIDED = {
    "group.id": _NAMED,
    "group.instance.id": _NAMED,
    "transactional.id": _NAMED,
    "group.protocol": "which must be the same for all parts of a process: remove the key, and set kafka.group_protocol",
    "transaction.timeout.ms": "on which other times depend: remove the key, and set kafka.transaction_timeout_s",
    "isolation.level": "which depends on the reader, because grouping must not read aborted records: remove the key",
    "auto.offset.reset": "but a position that is no longer in the log must be an error: remove the key",
    "enable.partition.eof": "without which readers do not see the end of a partition: remove the key",
    "enable.auto.commit": _COMMITTED,
    "auto.commit.enable": _COMMITTED,
    "enable.auto.offset.store": _COMMITTED,
    "partitioner": "but the key of a record gives its partition, as for Java's clients: remove the key",
    "enable.idempotence": _WRITTEN_ONCE,
    "acks": _WRITTEN_ONCE,
    "request.required.acks": _WRITTEN_ONCE,
}
"""Keys of librdkafka that cannot be set in kafka.client, with the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """A schema registry, for other programs that read the topics."""

    url: str = ""
    """URL of a registry with Confluent's interface, such as http://127.0.0.1:8081. `rollstream topics apply` registers
    the schemas, and records are written with the registry's ids of their schemas. Empty: no registry."""
    subjects: Literal["topic", "topic-record", "record"] = "topic"
    """Names of the subjects. topic: {topic}-value for the first record type of a topic, and {topic}-{record} for its
    other types. topic-record: {topic}-{record} for every type. record: {record}, which all runs share."""
    username: str = ""
    """User, or API key, of basic authentication."""
    password: str = ""
    """Password of the user, or secret of the API key, as a reference: env:NAME or file:PATH."""
    ca: str = ""
    """PEM file of the authorities that sign the registry's certificate; empty: the authorities this machine trusts."""
    certificate: str = ""
    """PEM file of this client's certificate and key, if the registry requires a client certificate."""
    timeout_s: float = 3.0
    """Timeout of a request. While the registry is unavailable, further records do not wait for requests."""

    def __post_init__(self) -> None:
        # Configurations are stored and displayed, so a URL must not contain a password.
        if "@" in self.url:
            raise ConfigurationError(
                "kafka.registry.url holds credentials, which everybody who sees the configuration can read; set "
                "kafka.registry.username, and kafka.registry.password to a reference (env:NAME or file:PATH)"
            )


@dataclass(frozen=True, kw_only=True)
class TracesConfig:
    """OpenTelemetry traces of rollouts and policy versions on their way through a run."""

    endpoint: str = ""
    """URL at which a collector accepts spans by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: no
    spans are made. Needs the extra `traces`."""
    sample: float = 0.01
    """Share of groups of rollouts, and of steps, that are traced; all roles trace the same groups and steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.sample <= 1:
            raise ConfigurationError(f"traces.sample is {self.sample:g}; it must be a share from 0 to 1")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"traces.endpoint is {self.endpoint!r}; give the whole URL, such as http://127.0.0.1:4318/v1/traces"
            )


def holds_secret(url: str) -> bool:
    """Whether a URL has a password or a query, which may be a secret."""
    parts = urlsplit(url)
    return len(parts.scheme) > 1 and bool(parts.password or parts.query)


@dataclass(frozen=True, kw_only=True)
class ArraysConfig:
    """Large arrays of rollouts, which lie in a store; the records name them."""

    url: str = ""
    """Directory, or fsspec URL, of the arrays; it may be learner.weights.url. Producers and readers must reach it under
    this name. Credentials are read from the environment. Empty: all arrays are in the records."""
    above_bytes: int = 64 * 1024
    """Size above which a named array of a rollout goes to the store, if url is set. `reference_log_probs`,
    `weight_version` and `sampling_mask_counts` stay in the record."""
    orphan_hours: float = 24.0
    """Time in hours after the day on which an array was stored, from which on `rollstream prune` removes the array if
    no record names it; longer than any rollout waits to be sent."""

    def __post_init__(self) -> None:
        if self.above_bytes < 0 or not self.orphan_hours > 0:
            raise ConfigurationError(
                f"kafka.arrays.above_bytes is {self.above_bytes} and orphan_hours {self.orphan_hours:g}; they must be "
                "at least 0 and above 0"
            )
        if holds_secret(self.url):
            raise ConfigurationError(
                "kafka.arrays.url holds a password or a query, which everybody who sees the configuration can read: "
                "give credentials in the environment, as the fsspec file system expects them"
            )


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """The connection to the brokers."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """host:port list, as in librdkafka's bootstrap.servers."""
    client: dict[str, str] = field(default_factory=dict)
    """librdkafka settings that are passed to every client (security.protocol, sasl.username, ...), except that some
    clients have their own delays and time limits (docs/security.md#connecting); passwords and other secrets are
    references, env:NAME or file:PATH. Keys on which exactly-once and the partitions of records depend, such as
    isolation.level and partitioner, are refused."""
    max_record_bytes: int = 8 * 1024 * 1024
    """Largest record of any topic: sets the topics' max.message.bytes, and the clients' limits to match."""
    compression: str = "zstd"
    """compression.type of our producers."""
    compression_level: int = 2
    """compression.level of our producers; -1 is librdkafka's default. With zstd, level 2 compresses and decompresses in
    two thirds of the processor time of level 3, librdkafka's default; records are 1 to 4 % larger."""
    transaction_timeout_s: float = 15.0
    """Age at which brokers abort the open transaction of a dead process, which holds back readers until then; brokers
    look for such transactions every 10 s by default."""
    group_protocol: str = "classic"
    """Consumer group protocol: classic (default) or consumer (KIP-848)."""
    session_timeout_s: float = 6.0
    """Group session timeout under the classic protocol: a restart within it moves no partition (static membership).
    Under the consumer protocol, the brokers' own timeout applies."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    arrays: ArraysConfig = field(default_factory=ArraysConfig)
    signing_key: str = ""
    """Private key in PEM that signs rollouts, as a reference: env:NAME or file:PATH. Empty: rollouts are not signed,
    and grouping.environment_keys must not name their environments. Needs the extra `signatures`."""

    def __post_init__(self) -> None:
        if not -1 <= self.compression_level <= 12:
            raise ConfigurationError(f"kafka.compression_level is {self.compression_level}; it must be -1 to 12")
        if not math.isfinite(self.transaction_timeout_s):
            raise ConfigurationError(
                f"kafka.transaction_timeout_s is {self.transaction_timeout_s}; it must be a finite number of seconds"
            )
        for key in sorted(_DECIDED.keys() & self.client.keys()):
            raise ConfigurationError(f"kafka.client sets {key}, {_DECIDED[key]}")

    @property
    def patience_s(self) -> float:
        """Time to wait for records that another process may hold back.

        A transaction left open by a dead process hides its records until it times out and the broker aborts it; the
        broker looks for such transactions every 10 s by default. The remaining time allows for a broker that starts or
        is busy."""
        return self.transaction_timeout_s + 45.0


@dataclass(frozen=True, kw_only=True)
class TopicsConfig:
    """The shape of a run's topics."""

    partitions: int = 4
    """Partitions P of rollouts, batches, journal and other topics (docs/concepts.md); fixed for the life of a run."""
    weights_partitions: int = 1
    """Partitions of weights."""
    replication_factor: int = 1
    """Replicas of each partition of a new topic, such as 3 with three brokers; -1: as many as the brokers choose."""
    min_insync_replicas: int = 1
    """min.insync.replicas of every topic, at most replication_factor, such as 2 with three replicas."""
    local_retention_s: float = 0.0
    """Seconds for which brokers with tiered storage (remote.log.storage.system.enable) keep records of topics that are
    not compacted on their own disks, such as 86400 for a day; older segments are in the remote storage alone. 0: all
    records stay on the brokers' disks."""
    principal: str = "User:{run}-{role}"
    """Principals of the run's users in `topics acls`, as brokers name them. {run} stands for the run, and {role} for a
    role, topics, audit or operate. Without {role}, all of them share one principal with the permissions of all."""
    prefix_rules: bool = False
    """Whether `topics acls` grants that one principal every name that begins with the run's, by one rule a kind of
    resource, in place of a rule for each name: for shared brokers that limit rules. The rules then also cover runs
    whose names begin with this run's and a dot. Needs a principal without {role}."""

    def __post_init__(self) -> None:
        kind, _, name = self.principal.partition(":")
        if not kind or not name or set(re.findall(r"\{(.*?)\}", self.principal)) - {"run", "role"}:
            raise ConfigurationError(
                f"topics.principal is {self.principal!r}; it must be a kind and a name, such as User:{{run}}-{{role}}"
            )
        if self.prefix_rules and "{role}" in self.principal:
            raise ConfigurationError(
                f"topics.prefix_rules grants every user of the run everything, but topics.principal is "
                f"{self.principal!r}, a user for each role; name one for all, such as User:{{run}}"
            )
        if self.local_retention_s < 0:
            raise ConfigurationError(
                f"topics.local_retention_s is {self.local_retention_s:g}; give the seconds, or 0 for no tiered storage"
            )
        # With -1, brokers choose the number of replicas.
        if self.min_insync_replicas > self.replication_factor != -1:
            raise ConfigurationError(
                f"topics.min_insync_replicas is {self.min_insync_replicas}, above topics.replication_factor, "
                f"{self.replication_factor}: no record could be in so many; lower the first or raise the second"
            )

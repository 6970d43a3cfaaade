"""Settings of the connection to Kafka and of a run's topics, common to every role."""

import re
from dataclasses import dataclass, field
from typing import Literal

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """A schema registry, for programs that are not rollstream's and read its topics."""

    url: str = ""
    """URL of a registry with the interface of Confluent's, such as http://127.0.0.1:8081; records are then written with
    the ids of their schemas there, which `rollstream topics apply` registers. Empty: no registry."""
    subjects: Literal["topic", "topic-record", "record"] = "topic"
    """Names of the subjects: {topic}-value for the first record type of a topic and {topic}-{record} for its others, or
    {topic}-{record} for all, or {record}, one for all runs."""
    username: str = ""
    """User, or API key, of basic authentication."""
    password: str = ""
    """Its password or secret, as a reference: env:NAME or file:PATH."""
    ca: str = ""
    """PEM file of the authorities that sign the registry's certificate; empty: those of this machine."""
    certificate: str = ""
    """PEM file of this client's certificate and key, where the registry asks for one."""
    timeout_s: float = 3.0
    """Longest wait of a request; records wait for no second one while the registry is away."""

    def __post_init__(self) -> None:
        # Configurations are written and shown.
        if "@" in self.url:
            raise ConfigurationError(
                "kafka.registry.url holds credentials, and everybody could read it; set kafka.registry.username, and "
                "password to a reference (env:NAME or file:PATH)"
            )


@dataclass(frozen=True, kw_only=True)
class TracesConfig:
    """OpenTelemetry traces of the way of rollouts and policy versions."""

    endpoint: str = ""
    """URL to which a collector takes spans by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: none are
    made. Needs the extra `traces`."""
    sample: float = 0.01
    """Share of groups of rollouts, and of steps, that are traced; every role takes the same ones."""

    def __post_init__(self) -> None:
        if not 0 <= self.sample <= 1:
            raise ConfigurationError(f"traces.sample is {self.sample:g}; it is a share, from 0 to 1")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"traces.endpoint is {self.endpoint!r}; give the whole URL, such as http://127.0.0.1:4318/v1/traces"
            )


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """The connection to the brokers."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """host:port list, as in librdkafka's bootstrap.servers."""
    client: dict[str, str] = field(default_factory=dict)
    """Keys passed to every client unchanged, as librdkafka spells them (security.protocol, sasl.username, ...);
    passwords and other secrets as references, env:NAME or file:PATH."""
    max_record_bytes: int = 8 * 1024 * 1024
    """Largest record of any topic: sets the topics' max.message.bytes, and the clients' limits to match."""
    compression: str = "zstd"
    """compression.type of our producers."""
    compression_level: int = 2
    """compression.level of our producers. With zstd, 2 takes two thirds of the processor time of 3, which is
    librdkafka's own, to compress and to decompress, for records that are 1 to 4 % larger; -1 is librdkafka's."""
    transaction_timeout_s: float = 15.0
    """Longest time that a dead process may hold back readers of its open transaction."""
    group_protocol: str = "classic"
    """Consumer group protocol: classic (default) or consumer (KIP-848)."""
    session_timeout_s: float = 6.0
    """Group session timeout; with static membership a restart within it moves nothing (classic protocol)."""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    signing_key: str = ""
    """Private key with which rollouts are signed, in PEM, as a reference: env:NAME or file:PATH. Empty: none is signed,
    and grouping.environment_keys must not name their environments. Needs the extra `signatures`."""

    def __post_init__(self) -> None:
        if not -1 <= self.compression_level <= 12:
            raise ConfigurationError(f"kafka.compression_level is {self.compression_level}; it is -1 to 12")

    @property
    def patience_s(self) -> float:
        """Time to wait for records that another process may hold back.

        A transaction left open by a dead process hides its records until it times out and the broker aborts it (it
        looks every 10 s by default). The rest allows for a broker that starts or is busy."""
        return self.transaction_timeout_s + 45.0


@dataclass(frozen=True, kw_only=True)
class TopicsConfig:
    """The shape of a run's topics."""

    partitions: int = 4
    """Partitions P of rollouts, batches and journal; fixed for the life of a run."""
    weights_partitions: int = 1
    """Partitions of weights."""
    replication_factor: int = 1
    """Replicas of each partition; 3 if there are three brokers."""
    min_insync_replicas: int = 1
    """min.insync.replicas of every topic; 2 if replication_factor is 3."""
    principal: str = "User:{run}-{role}"
    """Principals of the run's users in `topics acls`, as brokers name them; {run} is the run, {role} a role, or topics,
    audit or operate. Without {role} all share one, which then may do all of it."""

    def __post_init__(self) -> None:
        kind, _, name = self.principal.partition(":")
        if not kind or not name or set(re.findall(r"\{(.*?)\}", self.principal)) - {"run", "role"}:
            raise ConfigurationError(
                f"topics.principal is {self.principal!r}; it is a kind and a name, such as User:{{run}}-{{role}}"
            )

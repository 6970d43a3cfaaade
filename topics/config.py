"""Settings of the connection to Kafka and of a run's topics, common to every role."""

from dataclasses import dataclass, field


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
    transaction_timeout_s: float = 15.0
    """Longest time that a dead process may hold back readers of its open transaction."""
    group_protocol: str = "classic"
    """Consumer group protocol: classic (default) or consumer (KIP-848)."""
    session_timeout_s: float = 6.0
    """Group session timeout; with static membership a restart within it moves nothing (classic protocol)."""

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

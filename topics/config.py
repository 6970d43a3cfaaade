"""Settings of the connection to Kafka and of a run's topics, shared by every role."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class KafkaConfig:
    """How to reach the brokers."""

    bootstrap_servers: str = "127.0.0.1:9092"
    """host:port list, as in librdkafka's bootstrap.servers."""
    client: dict[str, str] = field(default_factory=dict)
    """Keys passed to every client untouched, as librdkafka spells them (security.protocol, sasl.username, ...);
    passwords and the like as references, env:NAME or file:PATH."""
    max_record_bytes: int = 8 * 1024 * 1024
    """Largest record of any topic: sets the topics' max.message.bytes, and the clients' limits to match."""
    compression: str = "zstd"
    """compression.type of our producers."""
    transaction_timeout_s: float = 15.0
    """How long a dead process may hold back readers of what it was writing."""
    group_protocol: str = "classic"
    """Consumer group protocol: classic (default) or consumer (KIP-848)."""
    session_timeout_s: float = 6.0
    """Group session timeout; with static membership a restart within it moves nothing (classic protocol)."""

    @property
    def patience_s(self) -> float:
        """How long to wait for what another process may hold back: a transaction that its death left open shows nothing
        until its timeout is over and the broker looks for it (every 10 s by default). The rest is for a broker that
        starts, or is busy."""
        return self.transaction_timeout_s + 45.0


@dataclass(frozen=True, kw_only=True)
class TopicsConfig:
    """The shape of a run's topics."""

    partitions: int = 4
    """Partitions P of rollouts, batches and journal; fixed for the life of a run."""
    weights_partitions: int = 1
    """Partitions of weights."""
    replication_factor: int = 1
    """Copies of each partition; 3 where there are three brokers."""
    min_insync_replicas: int = 1
    """min.insync.replicas of every topic; 2 where replication is 3."""

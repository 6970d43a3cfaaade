"""Settings of a local broker, and the Kafka properties derived from them.

Pure: the same settings always render the same properties. `rollstream.infra.broker.broker` runs brokers with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rollstream.topics.errors import ConfigurationError

T = TypeVar("T")
NODE_ID = 1
PROVIDERS = ("auto", "java", "docker")

# Set by rollstream: the address identifies a broker, and the other keys define its role.
RESERVED_KEYS = frozenset(
    {"node.id", "process.roles", "listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs"}
)


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node of a cluster."""

    node_id: int
    """Number, counted from 1; node i votes at controller_ports[i - 1]."""
    cluster_id: str
    """16 bytes in URL-safe base64, the same for every node."""
    controller_ports: tuple[int, ...]
    """Ports of the quorum's voters: every node of the cluster votes."""


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """A broker for one machine: KRaft combined mode, one node or a node of a cluster, small heap."""

    data_dir: Path = Path(".rollstream/broker")
    """Directory of all files of the broker: log segments, settings, the broker's own log, the state file."""
    host: str = "127.0.0.1"
    """Address that the broker listens on and advertises."""
    port: int = 0
    """Port for clients. 0 chooses the previous port of this data if it is free, else any free port."""
    provider: str = "auto"
    """auto (Java, else Docker), java or docker."""
    image: str = "apache/kafka:4.2.1"
    """Image of the Docker provider: the official image, or an image with the same contract."""
    heap_initial_mib: int = 96
    """Initial heap of the broker, MiB (Java provider)."""
    heap_max_mib: int = 320
    """Maximum heap, MiB."""
    start_timeout_s: float = 180.0
    """Time within which a broker must answer."""
    stop_timeout_s: float = 15.0
    """Time to stop after SIGTERM; after that, the broker is killed."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Kafka's own keys, passed unchanged; they override the properties rendered here. Passwords and other secrets are
    references, env:NAME or file:PATH, resolved when a local broker starts."""
    node: ClusterNode | None = None
    """The broker's place in a cluster; None for a single broker. Set by rollstream.infra.broker.cluster."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"broker port {self.port} is not a port: give 1 to 65535, or 0 for any free one")
        if self.provider not in PROVIDERS:
            raise ConfigurationError(
                f"broker provider {self.provider!r} is unknown: give one of {', '.join(PROVIDERS)}"
            )
        if not 0 < self.heap_initial_mib <= self.heap_max_mib:
            raise ConfigurationError(
                f"broker heap {self.heap_initial_mib} to {self.heap_max_mib} MiB is invalid: "
                "give 0 < heap_initial_mib <= heap_max_mib"
            )
        reserved = RESERVED_KEYS & self.properties.keys()
        if reserved:
            raise ConfigurationError(
                f"broker properties {', '.join(sorted(reserved))} are set by rollstream: use port and data_dir instead"
            )


@dataclass(frozen=True, kw_only=True)
class BrokerLayout:
    """Paths in a broker's data directory."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def properties(self) -> Path:
        return self.root / "server.properties"

    @property
    def image_settings(self) -> Path:
        """Folder for the settings that the Docker image renders from its variables."""
        return self.root / "image-settings"

    @property
    def image_secrets(self) -> Path:
        """Variables with secrets for the Docker image."""
        return self.root / "image-secrets.env"

    @property
    def log4j(self) -> Path:
        return self.root / "log4j2.xml"

    @property
    def log(self) -> Path:
        return self.root / "broker.log"

    @property
    def state(self) -> Path:
        return self.root / "broker.json"

    @property
    def cluster(self) -> Path:
        """State of a cluster, next to the directories of its nodes, each of which has its own layout."""
        return self.root / "cluster.json"

    @property
    def formatted(self) -> bool:
        return (self.data / "meta.properties").exists()


def server_properties(
    config: BrokerConfig, *, port: int, controller_port: int, log_dir: str, bind: str | None = None
) -> dict[str, str]:
    """Return the complete properties of a node. `bind` is the address to listen on, by default the advertised one."""
    bind = bind or config.host
    node = config.node or ClusterNode(node_id=NODE_ID, cluster_id="", controller_ports=(controller_port,))
    voters = (f"{number}@127.0.0.1:{voter}" for number, voter in enumerate(node.controller_ports, start=1))
    return {
        "node.id": str(node.node_id),
        "process.roles": "broker,controller",
        "listeners": f"PLAINTEXT://{bind}:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{config.host}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": ",".join(voters),
        "log.dirs": log_dir,
        **_replication_of(len(node.controller_ports)),
        **COMMON,
        **config.properties,
    }


def _replication_of(nodes: int) -> dict[str, str]:
    """Return the settings for three replicas of every topic, two of them in sync, or fewer if there are fewer nodes."""
    return replication(str(min(3, nodes)), str(max(1, min(3, nodes) - 1)))


def replication(replicas: T, in_sync: T) -> dict[str, T]:
    """Return the settings for this many replicas of every topic, internal topics included, and in-sync replicas."""
    return {
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


COMMON: Mapping[str, str] = {
    # Few internal partitions: quick to create at first use, quick to load after a restart.
    "num.partitions": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.num.partitions": "8",
    "share.coordinator.state.topic.num.partitions": "4",
    # Only the catalogue creates topics: a mistyped name is an error, not a new topic.
    "auto.create.topics.enable": "false",
    # By default, the broker forgets the positions of a run that was idle for a week.
    "offsets.retention.minutes": "2147483647",
    # Groups form at once, and tests may use short sessions.
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    # Under the consumer protocol (KIP-848) the broker sets both times: by default it notices a killed member in 45 s.
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.heartbeat.interval.ms": "1000",
    # Readers stall behind the open transaction of a killed producer until the broker aborts it. Ten kills at 1 s, and
    # ten at the default of 10 s, left no transaction hanging; at 1 s readers waited a third as long (decision 0012).
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # After kill -9 a node is refused until its old session ends, by default for nine seconds.
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    # Compacted topics shrink within seconds; the buffer fits the small heap.
    "log.cleaner.backoff.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "16777216",
    "log.cleaner.threads": "1",
    "log.initial.task.delay.ms": "1000",
    # Batches and chunks of weights are larger than the default record of 1 MiB.
    "message.max.bytes": "67108864",
    "replica.fetch.max.bytes": "67108864",
    "socket.request.max.bytes": "134217728",
    # Few threads, to suit a laptop.
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "2",
}


def render_properties(properties: Mapping[str, str]) -> str:
    """Return a Java properties file with sorted keys, in ASCII: Kafka reads the file as ISO-8859-1."""
    return "".join(f"{key}={_escaped(value)}\n" for key, value in sorted(properties.items()))


def _escaped(value: str) -> str:
    """Escape backslashes, and each UTF-16 unit of other than ASCII characters, as java.util.Properties expects."""
    units = memoryview(value.replace("\\", "\\\\").encode("utf-16-le", "surrogatepass")).cast("H")
    return "".join(chr(unit) if unit < 0x80 else f"\\u{unit:04X}" for unit in units)


def image_environment(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which the official image renders `properties`.

    A variable is KAFKA_ and the key in capitals, with `.` as `_`, `_` as `__`, `-` as `___`.
    """
    return {
        "KAFKA_" + key.replace("_", "__").replace("-", "___").replace(".", "_").upper(): value
        for key, value in properties.items()
    }

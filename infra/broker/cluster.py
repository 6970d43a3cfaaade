"""Several Kafka nodes on this machine as one cluster, for fault tests and for runs that must survive a node's loss.

The nodes are combined (broker and controller) and share one data directory. In a cluster of three or more, every topic
has three replicas, two of which must be in sync. Each node is a LocalBroker, which can be killed, restarted and found.
Indices count from 0; node ids, which appear in logs, count from 1.
"""

import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self, TypeVar

from rollstream.infra.broker import kafka_protocol
from rollstream.infra.broker.broker import LocalBroker, Stopping
from rollstream.infra.broker.broker_start import PlannedBroker, retry_taken_ports, start_together
from rollstream.infra.broker.broker_state import ClusterState, read_cluster, write_cluster
from rollstream.infra.broker.launch_commands import new_cluster_id
from rollstream.infra.broker.ports import free_ports, is_free, port_before, port_in_use
from rollstream.infra.broker.process_identity import send
from rollstream.infra.broker.providers import choose_local
from rollstream.infra.config import BrokerConfig, BrokerLayout, ClusterNode
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
T = TypeVar("T")


class LocalCluster(Stopping):
    """A cluster started by this process (`start`) or found in a data directory (`find`)."""

    def __init__(self, data_dir: Path, nodes: Iterable[LocalBroker | None], configs: list[BrokerConfig]) -> None:
        self.data_dir = data_dir
        self._nodes = list(nodes)
        self._configs = configs

    @classmethod
    def start(
        cls,
        data_dir: Path | str,
        nodes: int = 3,
        *,
        config: BrokerConfig | None = None,
        bound_to_parent: bool = False,
    ) -> Self:
        """Start all nodes and return when each of them sees all as live.

        `config` applies to each node, except for data_dir and port. `config.port` is the port of the first node; the
        next nodes use the ports that follow. 0 chooses the previous ports if they are free, else new ones.

        Raises ConfigurationError for fewer than 2 or more than 9 nodes or the docker provider; BrokerUnavailable if
        nodes already run, the data belongs to a single broker or a cluster of another size, there is no Java, or a node
        does not start; and DeadlineExceeded if a node does not see all others. After an error, no node that it started
        is left running.
        """
        root = Path(data_dir)
        config = config or BrokerConfig()
        _check(root, nodes, config)
        provider = choose_local("java")
        state = read_cluster(BrokerLayout(root=root)) or ClusterState(new_cluster_id(), (0,) * nodes)

        def attempt() -> tuple[list[BrokerConfig], list[LocalBroker]]:
            planned = _plan_brokers(root, state, config)
            configs = [dataclasses.replace(broker.config, port=broker.port) for broker in planned]
            started = start_together(
                provider,
                planned,
                bound_to_parent=bound_to_parent,
                record=lambda: write_cluster(BrokerLayout(root=root), _state_of(configs)),
            )
            return configs, [LocalBroker(c, s.state, s.child) for c, s in zip(configs, started, strict=True)]

        configs, brokers = retry_taken_ports(root, attempt)
        cluster = cls(root, brokers, configs)
        try:
            cluster.await_live(range(nodes))
        except BaseException:
            cluster.stop()
            raise
        event(logger, "cluster_started", bootstrap_servers=cluster.bootstrap_servers, data=str(root))
        return cluster

    @classmethod
    def find(cls, data_dir: Path | str) -> Self | None:
        """Return the cluster on `data_dir`, started by any process; None if none of its nodes runs."""
        root = Path(data_dir)
        state = read_cluster(BrokerLayout(root=root))
        if state is None:
            return None
        configs = [
            dataclasses.replace(config, port=port_before(BrokerLayout(root=config.data_dir)) or 0)
            for config in _configs(root, state, BrokerConfig())
        ]
        nodes = [LocalBroker.find(config.data_dir, config=config) for config in configs]
        return cls(root, nodes, configs) if any(nodes) else None

    @property
    def bootstrap_servers(self) -> str:
        """Addresses of all nodes, running or not."""
        return ",".join(f"{config.host}:{config.port}" for config in self._configs)

    @property
    def nodes(self) -> list[LocalBroker | None]:
        """The nodes; None for a node that was not found running."""
        return list(self._nodes)

    @property
    def running(self) -> list[int]:
        """Indices of the nodes whose process runs."""
        return [index for index, node in enumerate(self._nodes) if node is not None and node.running]

    def answers(self) -> list[int]:
        """Return the indices of the nodes that serve requests now."""
        return [index for index in self.running if (node := self._nodes[index]) is not None and node.answers()]

    def kill(self, index: int) -> None:
        """End a node at once (SIGKILL), as a crash would."""
        self._node(index).kill()

    def restart(self, index: int, *, timeout_s: float = 60.0) -> None:
        """Start a node again on its port and data, and return when all running nodes see it."""
        self._node(index).restart()
        self.await_live([index], timeout_s)

    def stop(self) -> None:
        """Stop all nodes gracefully, all at the same time, because a node that stops last waits for a lost quorum."""
        present = [node for node in self._nodes if node is not None]
        for node in present:
            send(node.process, signal.SIGTERM)
        for node in present:
            node.stop()

    def leader(self, topic: str, partition: int = 0, *, timeout_s: float = 30.0) -> int:
        """Return the index of the node that leads a partition."""

        def ask(host: str, port: int) -> int:
            for replicas in kafka_protocol.topology(host, port).partitions:
                if (replicas.topic, replicas.partition) == (topic, partition) and replicas.leader > 0:
                    return replicas.leader - 1
            raise kafka_protocol.NotKnownYet(f"{topic}[{partition}] has no leader")

        return self._ask(ask, f"the leader of {topic}[{partition}]", timeout_s)

    def group_coordinator(self, group: str, *, timeout_s: float = 30.0) -> int:
        """Return the index of the node that coordinates a consumer group."""
        return self._ask(
            lambda host, port: kafka_protocol.group_coordinator(host, port, group) - 1,
            f"the coordinator of group {group}",
            timeout_s,
        )

    def transaction_coordinator(self, transactional_id: str, *, timeout_s: float = 30.0) -> int:
        """Return the index of the node that coordinates a transactional id."""
        return self._ask(
            lambda host, port: kafka_protocol.transaction_coordinator(host, port, transactional_id) - 1,
            f"the coordinator of transactional id {transactional_id}",
            timeout_s,
        )

    def active_controller(self, *, timeout_s: float = 30.0) -> int:
        """Return the index of the active controller's node."""
        return self._ask(
            lambda host, port: kafka_protocol.active_controller(host, port) - 1, "the active controller", timeout_s
        )

    def await_live(self, indices: Iterable[int], timeout_s: float = 60.0) -> None:
        """Wait until every running node sees these nodes as live. Raises DeadlineExceeded."""
        wanted = {index + 1 for index in indices}
        for node in self.running:

            def ask(host: str, port: int) -> bool:
                missing = wanted - kafka_protocol.topology(host, port).live
                if missing:
                    raise kafka_protocol.NotKnownYet(f"nodes {sorted(missing)} are not live")
                return True

            self._ask(ask, f"whether node {node + 1} sees nodes {sorted(wanted)} as live", timeout_s, [node])

    def await_in_sync(self, timeout_s: float = 60.0) -> None:
        """Wait until every replica of every partition is in sync, so that the loss of a node loses no data.

        Raises DeadlineExceeded.
        """

        def ask(host: str, port: int) -> bool:
            for partition in kafka_protocol.topology(host, port).partitions:
                if set(partition.in_sync) != set(partition.replicas):
                    raise kafka_protocol.NotKnownYet(
                        f"{partition.topic}[{partition.partition}] is in sync on {partition.in_sync} of "
                        f"{partition.replicas}"
                    )
            return True

        self._ask(ask, "whether all replicas are in sync", timeout_s)

    def _ask(
        self, question: Callable[[str, int], T], subject: str, timeout_s: float, indices: list[int] | None = None
    ) -> T:
        """Ask nodes in turn until one knows the answer. Raises DeadlineExceeded with the last error."""
        deadline = time.monotonic() + timeout_s
        last: Exception | None = None
        while time.monotonic() < deadline:
            for index in self.running if indices is None else indices:
                config = self._configs[index]
                try:
                    return question(config.host, config.port)
                except (OSError, kafka_protocol.NotKnownYet) as error:
                    last = error
            time.sleep(0.05)
        raise DeadlineExceeded(
            f"waited {timeout_s:g} s without learning {subject} ({last}); see the logs in {self.data_dir}"
        )

    def _node(self, index: int) -> LocalBroker:
        node = self._nodes[index]
        if node is None:
            raise BrokerUnavailable(f"node {index + 1} of {self.data_dir} does not run; start the cluster again")
        return node


def _state_of(configs: list[BrokerConfig]) -> ClusterState:
    node = configs[0].node
    assert node is not None
    return ClusterState(node.cluster_id, node.controller_ports)


def _check(root: Path, nodes: int, config: BrokerConfig) -> None:
    if nodes < 2 or nodes > 9:
        raise ConfigurationError(f"a cluster of {nodes} nodes is not supported: give 2 to 9, preferably 3")
    if config.provider == "docker":
        raise ConfigurationError("several nodes need the java provider: leave out --provider, or start one node")
    state = read_cluster(BrokerLayout(root=root))
    if state and state.nodes != nodes:
        raise BrokerUnavailable(f"{root} holds a cluster of {state.nodes} nodes, not {nodes}; give another --data")
    if BrokerLayout(root=root).formatted:
        raise BrokerUnavailable(f"{root} holds the data of a single broker; give another --data")
    running = LocalCluster.find(root)
    if running:
        raise BrokerUnavailable(
            f"a cluster already runs on {root}: {running.bootstrap_servers}; use it, stop it with "
            f"`rollstream broker stop --data {root}`, or give another --data"
        )


def _configs(root: Path, state: ClusterState, config: BrokerConfig) -> list[BrokerConfig]:
    return [
        dataclasses.replace(
            config,
            data_dir=root / f"node-{number}",
            node=ClusterNode(node_id=number, cluster_id=state.cluster_id, controller_ports=state.controller_ports),
        )
        for number in range(1, state.nodes + 1)
    ]


def _plan_brokers(root: Path, state: ClusterState, config: BrokerConfig) -> list[PlannedBroker]:
    """Plan the nodes with their ports: the configured ports, else the previous ones if all are free, else new ones."""
    count = state.nodes
    before = [port_before(BrokerLayout(root=root / f"node-{number}")) or 0 for number in range(1, count + 1)]
    fresh = free_ports(config.host, 2 * count)
    if config.port:
        ports = [config.port + index for index in range(count)]
        for port in ports:
            if not is_free(config.host, port):
                raise port_in_use(config.host, port)
    else:
        ports = before if all(port and is_free(config.host, port) for port in before) else fresh[:count]
    voters = tuple(fresh[count:])
    return [
        # A node's configuration keeps a configured port, so that a new attempt does not replace it.
        PlannedBroker(dataclasses.replace(node, port=config.port and port), port, voters[index])
        for index, (node, port) in enumerate(
            zip(_configs(root, ClusterState(state.cluster_id, voters), config), ports, strict=True)
        )
    ]

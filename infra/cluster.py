"""Several Kafka nodes on this machine as one cluster: what a fault test breaks, and what a careful run stands on.

Combined nodes (broker and controller) under one data directory, three copies of every topic, two in step. Each node is
a LocalBroker: killed, restarted, found again. Indices count from 0; node ids, in logs, from 1.
"""

import dataclasses
import logging
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from infra import topology
from infra.broker import LocalBroker
from infra.config import BrokerConfig, ClusterNode, Layout
from infra.launch import new_cluster_id
from infra.ports import free_ports, is_free, port_before, port_in_use
from infra.processes import send
from infra.providers import choose_local
from infra.starting import Place, start_together, with_ports
from infra.state import ClusterState, read_cluster, write_cluster
from topics.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded
from topics.logs import event

logger = logging.getLogger(__name__)
T = TypeVar("T")


class LocalCluster:
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
        """Start every node and return when all see all. `config` holds for each, but for its data and its port:
        a port is that of the first node, the others take those that follow; 0 means any that are free.

        Raises BrokerUnavailable: nodes run already, the data holds another number of nodes, no Java is here, or one
        did not start (then none is left).
        """
        root = Path(data_dir)
        config = config or BrokerConfig()
        _check(root, nodes, config)
        provider = choose_local("java")
        state = read_cluster(Layout(root=root)) or ClusterState(new_cluster_id(), (0,) * nodes)

        def attempt() -> tuple[list[BrokerConfig], list[LocalBroker]]:
            places = _places(root, state, config)
            started = start_together(provider, places, bound_to_parent=bound_to_parent)
            configs = [dataclasses.replace(place.config, port=place.port) for place in places]
            return configs, [LocalBroker(c, s.state, s.child) for c, s in zip(configs, started, strict=True)]

        configs, brokers = with_ports(attempt)
        cluster = cls(root, brokers, configs)
        try:
            write_cluster(Layout(root=root), _state_of(configs))
            cluster.await_live(range(nodes))
        except BaseException:
            cluster.stop()
            raise
        event(logger, "cluster_started", bootstrap_servers=cluster.bootstrap_servers, data=str(root))
        return cluster

    @classmethod
    def find(cls, data_dir: Path | str) -> Self | None:
        """The cluster of which at least one node runs on `data_dir`, whoever started it; None where none does."""
        root = Path(data_dir)
        state = read_cluster(Layout(root=root))
        if state is None:
            return None
        configs = [
            dataclasses.replace(config, port=port_before(Layout(root=config.data_dir)) or 0)
            for config in _configs(root, state, BrokerConfig())
        ]
        found = [LocalBroker.find(config.data_dir, config=config) for config in configs]
        return cls(root, found, configs) if any(found) else None

    @property
    def bootstrap_servers(self) -> str:
        """Addresses of all nodes, running or not."""
        return ",".join(f"{config.host}:{config.port}" for config in self._configs)

    @property
    def nodes(self) -> list[LocalBroker | None]:
        """The nodes; None in a place where none was found running."""
        return list(self._nodes)

    @property
    def running(self) -> list[int]:
        """Indices of the nodes whose process runs."""
        return [index for index, node in enumerate(self._nodes) if node is not None and node.running]

    def answers(self) -> list[int]:
        """Indices of the nodes that serve requests now."""
        return [index for index in self.running if (node := self._nodes[index]) is not None and node.answers()]

    def kill(self, index: int) -> None:
        """End a node at once (SIGKILL), as a crash would."""
        self._node(index).kill()

    def restart(self, index: int, *, timeout_s: float = 60.0) -> None:
        """Start a node again on its port and data, and return when the others see it."""
        self._node(index).restart()
        self.await_live([index], timeout_s)

    def stop(self) -> None:
        """End all nodes in order. All are told at once: the last ones would wait for a quorum that is gone."""
        present = [node for node in self._nodes if node is not None]
        for node in present:
            send(node.process, signal.SIGTERM)
        for node in present:
            node.stop()

    # ------------------------------------------------------------------ who does what

    def leader(self, topic: str, partition: int = 0, *, timeout_s: float = 30.0) -> int:
        """Index of the node that leads a partition."""

        def ask(host: str, port: int) -> int:
            for place in topology.topology(host, port).partitions:
                if (place.topic, place.partition) == (topic, partition) and place.leader > 0:
                    return place.leader - 1
            raise topology.NotKnownYet(f"{topic}[{partition}] has no leader")

        return self._ask(ask, f"the leader of {topic}[{partition}]", timeout_s)

    def group_coordinator(self, group: str, *, timeout_s: float = 30.0) -> int:
        """Index of the node that coordinates a consumer group."""
        return self._ask(
            lambda host, port: topology.group_coordinator(host, port, group) - 1,
            f"the coordinator of group {group}",
            timeout_s,
        )

    def transaction_coordinator(self, transactional_id: str, *, timeout_s: float = 30.0) -> int:
        """Index of the node that coordinates a transactional id."""
        return self._ask(
            lambda host, port: topology.transaction_coordinator(host, port, transactional_id) - 1,
            f"the coordinator of transactional id {transactional_id}",
            timeout_s,
        )

    def active_controller(self, *, timeout_s: float = 30.0) -> int:
        """Index of the node that is the active controller."""
        return self._ask(
            lambda host, port: topology.active_controller(host, port) - 1, "the active controller", timeout_s
        )

    def await_live(self, indices: Iterable[int], timeout_s: float = 60.0) -> None:
        """Wait until every running node counts these nodes among the live ones. Raises DeadlineExceeded."""
        wanted = {index + 1 for index in indices}
        for asked in self.running:

            def ask(host: str, port: int) -> bool:
                missing = wanted - topology.topology(host, port).live
                if missing:
                    raise topology.NotKnownYet(f"nodes {sorted(missing)} are not live")
                return True

            self._ask(ask, f"nodes {sorted(wanted)} live as node {asked + 1} sees it", timeout_s, [asked])

    def await_in_sync(self, timeout_s: float = 60.0) -> None:
        """Wait until every replica of every partition is in step, so that the next loss costs nothing.

        Raises DeadlineExceeded.
        """

        def ask(host: str, port: int) -> bool:
            for place in topology.topology(host, port).partitions:
                if set(place.in_step) != set(place.replicas):
                    raise topology.NotKnownYet(
                        f"{place.topic}[{place.partition}] is in step on {place.in_step} of {place.replicas}"
                    )
            return True

        self._ask(ask, "all replicas in step", timeout_s)

    def _ask(
        self, question: Callable[[str, int], T], what: str, timeout_s: float, indices: list[int] | None = None
    ) -> T:
        """Ask nodes in turn until one knows. Raises DeadlineExceeded with what was said last."""
        deadline = time.monotonic() + timeout_s
        last: Exception | None = None
        while time.monotonic() < deadline:
            for index in self.running if indices is None else indices:
                config = self._configs[index]
                try:
                    return question(config.host, config.port)
                except (OSError, topology.NotKnownYet) as error:
                    last = error
            time.sleep(0.05)
        raise DeadlineExceeded(f"{what} is not known within {timeout_s:g} s ({last}); see the logs in {self.data_dir}")

    def _node(self, index: int) -> LocalBroker:
        node = self._nodes[index]
        if node is None:
            raise BrokerUnavailable(f"node {index + 1} of {self.data_dir} does not run; start the cluster again")
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _state_of(configs: list[BrokerConfig]) -> ClusterState:
    node = configs[0].node
    assert node is not None
    return ClusterState(node.cluster_id, node.controller_ports)


def _check(root: Path, nodes: int, config: BrokerConfig) -> None:
    if nodes < 2 or nodes > 9:
        raise ConfigurationError(f"a cluster of {nodes} nodes makes no sense here: give 2 to 9, better 3")
    if config.provider == "docker":
        raise ConfigurationError("several nodes run in Java only: leave --provider, or start one node")
    state = read_cluster(Layout(root=root))
    if state and state.nodes != nodes:
        raise BrokerUnavailable(f"{root} holds a cluster of {state.nodes} nodes, not {nodes}; give another --data")
    if Layout(root=root).formatted:
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


def _places(root: Path, state: ClusterState, config: BrokerConfig) -> list[Place]:
    """The nodes with their ports: those asked for, those they had before where all are free, else free ones."""
    count = state.nodes
    before = [port_before(Layout(root=root / f"node-{number}")) or 0 for number in range(1, count + 1)]
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
        # What was asked for is kept in the node's configuration, so that it is not exchanged for another.
        Place(dataclasses.replace(node, port=config.port and port), port, voters[index])
        for index, (node, port) in enumerate(
            zip(_configs(root, ClusterState(state.cluster_id, voters), config), ports, strict=True)
        )
    ]

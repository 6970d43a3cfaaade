"""A simulation of brokers, partitions and processes as queues, which shares no formula with the plan that it judges.

Rollouts arrive one by one, each for the partition of its key. Links, disks and processes serve what comes in turn, each
at its own rate, and a rollout is done when its batch has been read. A cluster bears a load if rollouts do not wait
longer and longer.
"""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Server:
    """Serves one request after another, each for as long as it takes."""

    free_at: float = 0.0

    def serve(self, at: float, seconds: float) -> float:
        """Serve a request that arrives at a time; return when it is done."""
        self.free_at = max(at, self.free_at) + seconds
        return self.free_at


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Brokers and processes: how many there are, and how fast each is."""

    brokers: int
    processes: int
    partitions: int
    replication: int
    network_bytes_per_s: float
    disk_bytes_per_s: float
    intake_bytes_per_s: float
    group_s: float
    """Seconds in which a process groups one rollout."""
    rollout_bytes: float
    batched_bytes: float
    batch_readers: int = 1


@dataclass
class _Broker:
    inward: Server = field(default_factory=Server)
    outward: Server = field(default_factory=Server)
    disk: Server = field(default_factory=Server)
    intake: Server = field(default_factory=Server)


Request = tuple[Server, float]
"""A record's next request: a server, and for how many seconds."""


class Simulation:
    """Serves records in the order in which they come to each server."""

    def __init__(self) -> None:
        self._next: list[tuple[float, int, Iterator[Request]]] = []
        self._order = itertools.count()
        self.now = 0.0

    def begin(self, at: float, record: Iterator[Request]) -> None:
        """Let a record begin at a time."""
        heapq.heappush(self._next, (at, next(self._order), record))

    def run(self) -> None:
        """Serve until every record is done."""
        while self._next:
            self.now, order, record = heapq.heappop(self._next)
            request = next(record, None)
            if request is not None:
                heapq.heappush(self._next, (request[0].serve(self.now, request[1]), order, record))


def waits(cluster: Cluster, rollouts_per_s: float, rollouts: int, seed: int = 0) -> list[float]:
    """Seconds from the arrival of each rollout until its batch was read."""
    drawn, simulation = random.Random(seed), Simulation()
    brokers = [_Broker() for _ in range(cluster.brokers)]
    processes = [Server() for _ in range(cluster.processes)]
    waited = [0.0] * rollouts

    def rollout(number: int, began: float, partition: int) -> Iterator[Request]:
        replicas = [brokers[(partition + i) % cluster.brokers] for i in range(cluster.replication)]
        yield from _stored(cluster, simulation, replicas, cluster.rollout_bytes)
        yield replicas[0].outward, cluster.rollout_bytes / cluster.network_bytes_per_s
        yield processes[partition % cluster.processes], cluster.group_s
        yield from _stored(cluster, simulation, replicas, cluster.batched_bytes)
        for _reader in range(cluster.batch_readers):
            yield replicas[0].outward, cluster.batched_bytes / cluster.network_bytes_per_s
        waited[number] = simulation.now - began

    at = 0.0
    for number in range(rollouts):
        at += drawn.expovariate(rollouts_per_s)
        simulation.begin(at, rollout(number, at, drawn.randrange(cluster.partitions)))
    simulation.run()
    return waited


def _stored(cluster: Cluster, simulation: Simulation, replicas: list[_Broker], size: float) -> Iterator[Request]:
    """A record comes to the leader of its partition; its copies go to the followers meanwhile."""
    leader, followers = replicas[0], replicas[1:]
    yield from _taken(cluster, leader, size)
    for follower in followers:
        simulation.begin(simulation.now, _copied(cluster, leader, follower, size))


def _copied(cluster: Cluster, leader: _Broker, follower: _Broker, size: float) -> Iterator[Request]:
    yield leader.outward, size / cluster.network_bytes_per_s
    yield from _taken(cluster, follower, size)


def _taken(cluster: Cluster, broker: _Broker, size: float) -> Iterator[Request]:
    yield broker.inward, size / cluster.network_bytes_per_s
    yield broker.intake, size / cluster.intake_bytes_per_s
    yield broker.disk, size / cluster.disk_bytes_per_s


def bears(cluster: Cluster, rollouts_per_s: float, seconds: float = 20.0) -> bool:
    """Whether the wait of the last quarter's rollouts exceeds that of the second quarter's by less than a twentieth of
    the time between them."""
    count = int(rollouts_per_s * seconds)
    waited = waits(cluster, rollouts_per_s, count)
    quarter = count // 4
    second, last = (sum(itertools.islice(waited, at, at + quarter)) / quarter for at in (quarter, 3 * quarter))
    return last - second < seconds / 2 / 20


def disk_use(bytes_per_s: float, retention_s: float, seconds: float, step_s: float) -> float:
    """The most bytes on a disk that takes in so many bytes a second, and deletes what is older than the retention."""
    on_disk: list[tuple[float, float]] = []
    most, at = 0.0, 0.0
    while at < seconds:
        on_disk.append((at, bytes_per_s * step_s))
        on_disk = [(written, size) for written, size in on_disk if at - written < retention_s]
        most = max(most, sum(size for _written, size in on_disk))
        at += step_s
    return most

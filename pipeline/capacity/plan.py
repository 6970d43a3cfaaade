"""Computes the partitions, processes and brokers that a run needs for a load, and the limit that is met first. Pure.

Each resource has capacities; a limit is the load's use of one of them. The largest limit determines the number of units
of the resource, none of which is used beyond `utilisation`. docs/scaling.md has the formulae.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields

from rollstream.pipeline.capacity.measured_rates import MeasuredRates
from rollstream.topics.catalogue import CATALOGUE
from rollstream.topics.errors import ConfigurationError

ROLLOUT_TOKEN_BYTES = 9
"""Bytes of a token in a rollout: id (4), loss mask (1) and log-probability (4)."""
BATCH_TOKEN_BYTES = 13
"""Bytes of a token in a batch: it also has an advantage (4)."""
RECORD_BYTES = 1024
"""Bytes of a record apart from its tokens: names, texts, headers, its share of the journal."""
PARTITIONS_EACH = 4
"""Partitions for each grouping process, and for each broker to lead. There are several, because their number is fixed
for a run while its load may grow, and because they are assigned by number, not by load."""
_TOPICS = sum(spec.partitions == "P" for spec in CATALOGUE)
"""Number of topics with as many partitions as `rollouts`; each of the other topics has few."""


def _check(values: "Workload | Machines", may_be_zero: Collection[str] = ()) -> None:
    """Raise ConfigurationError unless every number is finite and above 0, and whole where its type says so."""
    for each in fields(values):
        value = getattr(values, each.name)
        if each.type is bool:
            continue
        kind, kinds = ("a whole number", int) if each.type is int else ("a number", int | float)
        least = "at least 0" if each.name in may_be_zero else "above 0"
        if (
            not isinstance(value, kinds)
            or isinstance(value, bool)
            or not (0 < value < math.inf or (value == 0 and each.name in may_be_zero))
        ):
            raise ConfigurationError(f"{each.name} is {value}; it must be {kind} and {least}")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The load of a run."""

    parameters: float
    """Parameters of the model."""
    environments: int
    """Rollouts in progress at a time."""
    tokens: float
    """Mean tokens of a rollout, its prompt included."""
    rollouts_per_s: float
    publish_every_s: float = 60.0
    """Time between two policy versions."""
    parameter_bytes: float = 2.0
    """Bytes of a published parameter."""
    weights_in_files: bool = False
    """Whether the bytes of versions go to files, and only their manifests to the log."""
    versions_kept: int = 2
    """Versions that the log holds at a time."""
    weight_readers: int = 1
    """Inference servers, or caches in front of them, that read each version."""
    batch_readers: int = 1
    """Number of readers of the batches: a learner, and other programs that follow them."""
    retention_s: float = 3 * 86400.0
    """Time for which rollouts and batches stay on the brokers."""
    replication: int = 3

    def __post_init__(self) -> None:
        _check(self, may_be_zero=("versions_kept", "weight_readers", "batch_readers", "retention_s"))

    @property
    def rollout_bytes(self) -> float:
        """Bytes of a rollout on the log."""
        return RECORD_BYTES + ROLLOUT_TOKEN_BYTES * self.tokens

    @property
    def batched_bytes(self) -> float:
        """Bytes of a rollout within a batch."""
        return RECORD_BYTES + BATCH_TOKEN_BYTES * self.tokens

    @property
    def version_bytes(self) -> float:
        """Bytes of a policy version."""
        return self.parameters * self.parameter_bytes

    @property
    def weights_bytes_per_s(self) -> float:
        """Bytes of versions written to the log per second."""
        return 0.0 if self.weights_in_files else self.version_bytes / self.publish_every_s

    @property
    def log_bytes_per_s(self) -> float:
        """Bytes written to the log per second, before replication, if every rollout is batched."""
        return self.rollouts_per_s * (self.rollout_bytes + self.batched_bytes) + self.weights_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Capacities of a broker and of a grouping process."""

    disk_bytes: float = 4e12
    """Disk of a broker."""
    disk_bytes_per_s: float = 1e9
    """Rate at which a broker writes to its disk."""
    network_bytes_per_s: float = 1.25e9
    """Rate of a broker's network in each direction: 10 Gbit/s."""
    replicas_per_broker: int = 4000
    """Replicas of partitions on a broker, a common advice for Kafka."""
    memory_bytes: float = 8e9
    """Memory of a grouping process for rollouts in flight."""
    restore_s: float = 60.0
    """Time within which another process has read the partitions of a dead process again."""
    utilisation: float = 0.7
    """Largest share of a capacity that a plan uses; the remainder is for uneven load."""

    def __post_init__(self) -> None:
        _check(self)
        if self.utilisation > 1:
            raise ConfigurationError(f"utilisation is {self.utilisation}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class ResourceLimit:
    """Use of one capacity of a resource by a load."""

    resource: str
    """brokers, grouping processes, ..."""
    name: str
    needed: float
    """Number of units that the load would use completely."""
    units: int = 0
    """Number of units in the plan."""

    @property
    def share(self) -> float:
        """Share of the capacity of all units that is used; at 1 the limit is met."""
        return self.needed / self.units


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """Units of each resource for a load."""

    partitions: int
    grouping_processes: int
    brokers: int
    producers: int
    learner_processes: int
    publishers: int
    broker_disk_bytes: float
    """Bytes on the disk of each broker."""
    broker_in_bytes_per_s: float
    broker_out_bytes_per_s: float
    limits: tuple[ResourceLimit, ...] = field(repr=False)
    """Every limit, beginning with the one that is met first."""

    @property
    def first(self) -> ResourceLimit:
        """The limit that is met first if all parts of the load grow at the same rate."""
        return self.limits[0]

    @property
    def growth(self) -> float:
        """Factor by which the load may grow until the first limit is met."""
        return 1 / self.first.share


def plan(load: Workload, machines: Machines, rates: MeasuredRates) -> CapacityPlan:
    """Return what a load needs on these machines, at these rates."""
    processes, grouping = _units("grouping processes", _grouping(load, machines, rates), machines.utilisation)
    busy, _ = _units("brokers", _broker(load, machines, rates), machines.utilisation, least=load.replication)
    # Replicas alone need fewer brokers than there are processes, so they do not change the number of partitions.
    partitions = PARTITIONS_EACH * max(processes, busy)
    replicas = _TOPICS * partitions * load.replication / machines.replicas_per_broker
    brokers, broker = _units(
        "brokers",
        {**_broker(load, machines, rates), "replicas of partitions": replicas},
        machines.utilisation,
        least=load.replication,
    )
    producers, producing = _units(
        "producers", {"sending": load.rollouts_per_s * rates.produce.seconds(load.rollout_bytes)}, machines.utilisation
    )
    feeders, feeding = _units(
        "learner processes",
        {"fetching and packing": load.rollouts_per_s * rates.feed.seconds(load.batched_bytes)},
        machines.utilisation,
    )
    published_per_s = rates.publish_to_files_bytes_per_s if load.weights_in_files else rates.publish_bytes_per_s
    publishers, publishing = _units(
        "publishers",
        {"publishing a version in time": load.version_bytes / published_per_s / load.publish_every_s},
        machines.utilisation,
    )
    limits = (*grouping, *broker, *producing, *feeding, *publishing)
    return CapacityPlan(
        partitions=partitions,
        grouping_processes=processes,
        brokers=brokers,
        producers=producers,
        learner_processes=feeders,
        publishers=publishers,
        broker_disk_bytes=_stored_bytes(load) / brokers,
        broker_in_bytes_per_s=_in_bytes_per_s(load) / brokers,
        broker_out_bytes_per_s=_out_bytes_per_s(load) / brokers,
        limits=tuple(sorted(limits, key=lambda limit: -limit.share)),
    )


def _units(
    resource: str, needed: dict[str, float], utilisation: float, least: int = 1
) -> tuple[int, Iterable[ResourceLimit]]:
    """Return the number of units that the largest limit needs, and each limit's use of them."""
    for name, amount in needed.items():
        if not math.isfinite(amount / utilisation):
            raise ConfigurationError(
                f"{name} needs more {resource} than can be counted; check the load and the machines"
            )
    # A quotient that exceeds a whole number by a rounding error does not need another unit.
    units = max(least, *(math.ceil(amount / utilisation * (1 - 1e-12)) for amount in needed.values()))
    return units, [ResourceLimit(resource, name, amount, units) for name, amount in needed.items()]


def _grouping(load: Workload, machines: Machines, rates: MeasuredRates) -> dict[str, float]:
    """Return the grouping processes that each capacity needs. At most one rollout of an environment is in flight."""
    size = load.rollout_bytes
    return {
        "grouping": load.rollouts_per_s * rates.group.seconds(size),
        "memory for rollouts in flight": load.environments * size / machines.memory_bytes,
        "restoring in time": load.environments * rates.restore.seconds(size) / machines.restore_s,
    }


def _broker(load: Workload, machines: Machines, rates: MeasuredRates) -> dict[str, float]:
    """Return the brokers that each capacity needs, apart from replicas."""
    return {
        "disk space": _stored_bytes(load) / machines.disk_bytes,
        "writing to disk": _in_bytes_per_s(load) / machines.disk_bytes_per_s,
        "network, in": _in_bytes_per_s(load) / machines.network_bytes_per_s,
        "network, out": _out_bytes_per_s(load) / machines.network_bytes_per_s,
        "taking records in": _in_bytes_per_s(load) / rates.broker_bytes_per_s,
    }


def _in_bytes_per_s(load: Workload) -> float:
    """Bytes that all brokers receive: each record once on each of its replicas."""
    return load.replication * load.log_bytes_per_s


def _out_bytes_per_s(load: Workload) -> float:
    """Bytes that all brokers send: to followers, grouping, readers of batches and readers of weights."""
    read = load.rollouts_per_s * (load.rollout_bytes + load.batch_readers * load.batched_bytes)
    return (load.replication - 1) * load.log_bytes_per_s + read + load.weight_readers * load.weights_bytes_per_s


def _stored_bytes(load: Workload) -> float:
    """Bytes on the disks of all brokers."""
    kept = load.rollouts_per_s * (load.rollout_bytes + load.batched_bytes) * load.retention_s
    versions = 0.0 if load.weights_in_files else load.versions_kept * load.version_bytes
    return load.replication * (kept + versions)

"""Asks a node for the live nodes, leaders, coordinators and active controller of its cluster, for fault tests.

Speaks the protocol itself (kafka_protocol.py): the client library reports neither the coordinator of a
transactional id nor the active controller. Functions return node ids; listeners must be plaintext.
"""

import itertools
import struct
from dataclasses import dataclass

from rollstream.infra.broker.kafka_protocol import exchange

_METADATA, _FIND_COORDINATOR, _DESCRIBE_QUORUM = 3, 10, 55
_GROUP, _TRANSACTION = 0, 1
_QUORUM_TOPIC = "__cluster_metadata"


class NotKnownYet(Exception):
    """The node answers but does not know yet: an election or a load is in progress."""


@dataclass(frozen=True)
class PartitionReplicas:
    """The nodes of a partition. `leader` is -1 while there is none."""

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The cluster as one node sees it."""

    live: frozenset[int]
    partitions: tuple[PartitionReplicas, ...]


def topology(host: str, port: int) -> Topology:
    """Return live nodes and every partition, internal topics included. Raises OSError if the node does not answer."""
    response = exchange(host, port, _METADATA, 1, struct.pack(">i", -1))

    def broker() -> int:
        number = response.int32()
        response.string()
        response.int32()
        response.string()
        return number

    def partition(topic: str) -> PartitionReplicas:
        response.int16()
        number, leader = response.int32(), response.int32()
        replicas, in_sync = response.array(response.int32), response.array(response.int32)
        return PartitionReplicas(topic, number, leader, tuple(replicas), tuple(in_sync))

    def partitions() -> list[PartitionReplicas]:
        response.int16()
        name = response.string() or ""
        response.int8()
        return response.array(lambda: partition(name))

    live = frozenset(response.array(broker))
    response.int32()  # Skip the controller's id: under KRaft, it is the id of any live broker.
    return Topology(live, tuple(itertools.chain.from_iterable(response.array(partitions))))


def group_coordinator(host: str, port: int, group: str) -> int:
    """Return the node that coordinates a consumer group. Raises OSError or NotKnownYet."""
    return _coordinator(host, port, group, _GROUP)


def transaction_coordinator(host: str, port: int, transactional_id: str) -> int:
    """Return the node that coordinates a transactional id. Raises OSError or NotKnownYet."""
    return _coordinator(host, port, transactional_id, _TRANSACTION)


def _coordinator(host: str, port: int, key: str, kind: int) -> int:
    encoded = key.encode()
    body = struct.pack(f">h{len(encoded)}sb", len(encoded), encoded, kind)
    response = exchange(host, port, _FIND_COORDINATOR, 1, body)
    response.int32()
    code = response.int16()
    message = response.string()
    if code:
        raise NotKnownYet(f"the coordinator of {key}: {message} (error {code})")
    return response.int32()


def active_controller(host: str, port: int) -> int:
    """Return the node that leads the metadata quorum (KIP-595). Raises OSError or NotKnownYet."""
    # One topic with one partition, in the compact encoding of KIP-482: lengths plus one, empty tag buffers.
    name = _QUORUM_TOPIC.encode()
    body = struct.pack(f">bb{len(name)}sbibbb", 2, len(name) + 1, name, 2, 0, 0, 0, 0)
    response = exchange(host, port, _DESCRIBE_QUORUM, 0, body, flexible=True)
    if code := response.int16():
        raise NotKnownYet(f"the node does not know the active controller (error {code})")
    response.int8()  # topics: one
    response.skip(response.int8() - 1)
    response.int8()  # partitions: one
    response.int32()
    code, leader = response.int16(), response.int32()
    if code or leader < 0:
        raise NotKnownYet(f"the node does not know the active controller (error {code})")
    return leader

"""Asks a node what the client library cannot: whether it is ready, and which nodes lead, coordinate and control.

A port is open long before a broker serves. The broker lists itself once it is registered and unfenced. Speaking the
protocol directly (Metadata, version 1) costs no client, no thread and no noise on stderr while waiting.

The client library reports neither the coordinator of a transactional id nor the active controller. Functions return
node ids; listeners must be plaintext.
"""

import itertools
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_CLIENT = b"rollstream-probe"
_CORRELATION = 1


class Response:
    """A response, read field by field."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def skip(self, size_bytes: int) -> bytes:
        start, self._position = self._position, self._position + size_bytes
        return self._data[start : self._position]

    def int8(self) -> int:
        return int.from_bytes(self.skip(1), "big", signed=True)

    def int16(self) -> int:
        return int.from_bytes(self.skip(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self.skip(4), "big", signed=True)

    def string(self) -> str | None:
        size = self.int16()
        return None if size < 0 else self.skip(size).decode()

    def array(self, item: Callable[[], T]) -> list[T]:
        return [item() for _ in range(self.int32())]


def exchange(
    host: str, port: int, api: int, version: int, body: bytes, *, flexible: bool = False, timeout_s: float = 5.0
) -> Response:
    """Send a request and return the response after its header; `flexible` requests have tag buffers (KIP-482).

    Raises OSError if no broker answers.
    """
    header = struct.pack(">hhih", api, version, _CORRELATION, len(_CLIENT)) + _CLIENT + (b"\0" if flexible else b"")
    request = header + body
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        size_bytes, correlation = struct.unpack(">ii", _read(connection, 8))
        if correlation != _CORRELATION:
            raise ConnectionError(f"{host}:{port} does not speak Kafka's protocol")
        response = Response(_read(connection, size_bytes - 4))
    if flexible:
        response.int8()
    return response


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        part = connection.recv(size_bytes - len(received))
        if not part:
            raise ConnectionError("the node closed the connection")
        received += part
    return bytes(received)


_METADATA, _FIND_COORDINATOR, _DESCRIBE_QUORUM = 3, 10, 55
_METADATA_VERSION = 1
_NO_TOPICS, _ALL_TOPICS = struct.pack(">i", 0), struct.pack(">i", -1)
_GROUP, _TRANSACTION = 0, 1
_QUORUM_TOPIC = "__cluster_metadata"


def broker_answers(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Return whether a plaintext listener answers a metadata request with at least one live broker."""
    try:
        response = exchange(host, port, _METADATA, _METADATA_VERSION, _NO_TOPICS, timeout_s=timeout_s)
    except OSError:
        return False
    return response.int32() > 0


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
    response = exchange(host, port, _METADATA, _METADATA_VERSION, _ALL_TOPICS)

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

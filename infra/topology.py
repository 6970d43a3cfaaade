"""Asks a node who does what in its cluster: who is live, leads, coordinates, and is the active controller.

For fault tests, which must hit the node that matters. Speaks the protocol itself, as `infra.probe` does: the client
library tells neither the coordinator of a transactional id nor the active controller. Node ids, plaintext only.
"""

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_METADATA, _FIND_COORDINATOR, _DESCRIBE_QUORUM = 3, 10, 55
_GROUP, _TRANSACTION = 0, 1
_CORRELATION = 1
_QUORUM_TOPIC = "__cluster_metadata"


class NotKnownYet(Exception):
    """The node answers, and does not know now: an election or a load is in progress."""


@dataclass(frozen=True)
class PartitionPlace:
    """Where a partition lies. `leader` is -1 while there is none."""

    topic: str
    partition: int
    leader: int
    replicas: tuple[int, ...]
    in_step: tuple[int, ...]
    """The in-sync replicas."""


@dataclass(frozen=True)
class Topology:
    """The cluster as one node sees it."""

    live: frozenset[int]
    partitions: tuple[PartitionPlace, ...]


def topology(host: str, port: int) -> Topology:
    """Live nodes and every partition, internal topics included. Raises OSError when the node does not answer."""
    answer = _ask(host, port, _METADATA, 1, struct.pack(">i", -1))

    def broker() -> int:
        number = answer.int32()
        answer.string()
        answer.int32()
        answer.string()
        return number

    def partition(topic: str) -> PartitionPlace:
        answer.int16()
        number, leader = answer.int32(), answer.int32()
        replicas, in_step = answer.array(answer.int32), answer.array(answer.int32)
        return PartitionPlace(topic, number, leader, tuple(replicas), tuple(in_step))

    def partitions() -> list[PartitionPlace]:
        answer.int16()
        name = answer.string() or ""
        answer.int8()
        return answer.array(lambda: partition(name))

    live = frozenset(answer.array(broker))
    answer.int32()  # Under KRaft any live broker, not the controller.
    return Topology(live, tuple(place for places in answer.array(partitions) for place in places))


def group_coordinator(host: str, port: int, group: str) -> int:
    """Node that coordinates a consumer group. Raises OSError or NotKnownYet."""
    return _coordinator(host, port, group, _GROUP)


def transaction_coordinator(host: str, port: int, transactional_id: str) -> int:
    """Node that coordinates a transactional id. Raises OSError or NotKnownYet."""
    return _coordinator(host, port, transactional_id, _TRANSACTION)


def _coordinator(host: str, port: int, key: str, kind: int) -> int:
    encoded = key.encode()
    body = struct.pack(f">h{len(encoded)}sb", len(encoded), encoded, kind)
    answer = _ask(host, port, _FIND_COORDINATOR, 1, body)
    answer.int32()
    code = answer.int16()
    message = answer.string()
    if code:
        raise NotKnownYet(f"the coordinator of {key}: {message} (error {code})")
    return answer.int32()


def active_controller(host: str, port: int) -> int:
    """Node that leads the metadata quorum (KIP-595). Raises OSError or NotKnownYet."""
    # One topic with one partition, in the compact encoding of KIP-482: lengths plus one, empty tag buffers.
    name = _QUORUM_TOPIC.encode()
    body = struct.pack(f">bb{len(name)}sbibbb", 2, len(name) + 1, name, 2, 0, 0, 0, 0)
    answer = _ask(host, port, _DESCRIBE_QUORUM, 0, body, flexible=True)
    if code := answer.int16():
        raise NotKnownYet(f"the active controller (error {code})")
    answer.int8()  # topics: one
    answer.skip(answer.int8() - 1)
    answer.int8()  # partitions: one
    answer.int32()
    code, leader = answer.int16(), answer.int32()
    if code or leader < 0:
        raise NotKnownYet(f"the active controller (error {code})")
    return leader


class _Answer:
    """A response, read field by field."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def skip(self, size_bytes: int) -> bytes:
        start, self._at = self._at, self._at + size_bytes
        return self._data[start : self._at]

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


def _ask(host: str, port: int, api: int, version: int, body: bytes, *, flexible: bool = False) -> _Answer:
    client = b"rollstream-probe"
    header = struct.pack(">hhih", api, version, _CORRELATION, len(client)) + client + (b"\0" if flexible else b"")
    request = header + body
    with socket.create_connection((host, port), timeout=5.0) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size_bytes,) = struct.unpack(">i", _read(connection, 4))
        answer = _Answer(_read(connection, size_bytes))
    answer.int32()
    if flexible:
        answer.int8()
    return answer


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        part = connection.recv(size_bytes - len(received))
        if not part:
            raise ConnectionError("the node closed the connection")
        received += part
    return bytes(received)

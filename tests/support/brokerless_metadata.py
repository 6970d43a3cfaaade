"""A link to a broker that can leave all brokers out of its answers about metadata, as a broker does that is fenced."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.support.faulty_network import HOST

_METADATA = 3
_FLEXIBLE_VERSION = 9


class BrokerlessLink:
    """One address through which clients reach a broker that advertises this address."""

    def __init__(self, target_port: int) -> None:
        """Listen at a free port, from now until `close`."""
        self._target_port = target_port
        self._brokerless, self._whole = False, 0
        self._ends: set[socket.socket] = set()
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="brokerless-link", daemon=True).start()

    @property
    def address(self) -> str:
        """Address for clients."""
        return f"{HOST}:{self.port}"

    @contextmanager
    def brokerless(self, after: int = 0) -> Iterator[None]:
        """Leave out all brokers while the block runs, but not in the first answers, as many as `after`."""
        self._brokerless, self._whole = True, after
        try:
            yield
        finally:
            self._brokerless = False

    def close(self) -> None:
        """Stop listening, and end every connection."""
        for end in (self._server, *set(self._ends)):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _address = self._server.accept()
                broker = socket.create_connection((HOST, self._target_port))
                self._ends |= {client, broker}
                metadata_requests: dict[int, bool] = {}
                for work in (self._pass_requests, self._pass_answers):
                    threading.Thread(target=work, args=(client, broker, metadata_requests), daemon=True).start()

    def _pass_requests(self, client: socket.socket, broker: socket.socket, metadata_requests: dict[int, bool]) -> None:
        with suppress(OSError):
            while frame := _frame(client):
                key, version = int.from_bytes(frame[:2]), int.from_bytes(frame[2:4])
                metadata_requests[int.from_bytes(frame[4:8])] = key == _METADATA and version >= _FLEXIBLE_VERSION
                broker.sendall(len(frame).to_bytes(4) + frame)
        _end(client, broker)

    def _pass_answers(self, client: socket.socket, broker: socket.socket, metadata_requests: dict[int, bool]) -> None:
        with suppress(OSError):
            while frame := _frame(broker):
                if metadata_requests.pop(int.from_bytes(frame[:4]), False) and self._brokerless:
                    if self._whole > 0:
                        self._whole -= 1
                    else:
                        frame = without_brokers(frame)
                client.sendall(len(frame).to_bytes(4) + frame)
        _end(client, broker)
        for end in (client, broker):
            end.close()
            self._ends.discard(end)


def without_brokers(frame: bytes) -> bytes:
    """Return an answer of API Metadata, from version 9 on, with an empty array of brokers.

    The array follows the correlation id, a byte for tags and the throttle time; a broker has a node id, a host, a port,
    a rack and tags.
    """
    begin = 4 + 1 + 4
    count, at = _varint(frame, begin)
    for _broker in range(count - 1):
        size, at = _varint(frame, at + 4)
        size, at = _varint(frame, at + size - 1 + 4)
        at += max(0, size - 1)
        tags, at = _varint(frame, at)
        assert not tags
    return frame[:begin] + b"\x01" + frame[at:]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _frame(end: socket.socket) -> bytes:
    size = _exactly(end, 4)
    return _exactly(end, int.from_bytes(size)) if size else b""


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

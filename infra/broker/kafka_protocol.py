"""One request of Kafka's protocol over a plaintext socket, for questions that the client library cannot ask."""

import socket
import struct
from collections.abc import Callable
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

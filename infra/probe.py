"""Asks a broker who is in its cluster: the question whose answer means "ready".

A port is open long before a broker serves. This speaks the protocol itself (Metadata, version 1), so that waiting
costs no client, no thread and no noise on stderr; the broker lists itself once it is registered and unfenced.
"""

import socket
import struct

_METADATA, _VERSION, _CORRELATION = 3, 1, 1


def broker_answers(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Whether a plaintext listener at host:port answers a metadata request with at least one live broker."""
    client = b"rollstream-probe"
    header = struct.pack(">hhih", _METADATA, _VERSION, _CORRELATION, len(client)) + client
    request = header + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            # Response: size, correlation id, number of brokers; the rest is not needed.
            _, correlation, brokers = struct.unpack(">iii", _read(connection, 12))
    except (OSError, EOFError):
        return False
    return bool(correlation == _CORRELATION and brokers > 0)


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        part = connection.recv(size_bytes - len(received))
        if not part:
            raise EOFError
        received += part
    return received

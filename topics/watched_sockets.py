"""Sockets of HTTP clients that notice when the other machine vanishes, as when a pod and its address are deleted.

Nobody closes or resets such a connection. Without probes, a request on it waits until its own deadline.
"""

import socket
from asyncio.trsock import TransportSocket
from typing import Any

GONE_S = 12
"""Seconds without a sign of life after which a connection, or an attempt to connect, fails."""
_PROBE_AFTER_S = 4
_PROBE_EVERY_S = 2
_OPTIONS = {
    "TCP_KEEPIDLE": _PROBE_AFTER_S,
    "TCP_KEEPINTVL": _PROBE_EVERY_S,
    "TCP_KEEPCNT": (GONE_S - _PROBE_AFTER_S) // _PROBE_EVERY_S,
    # Probes are sent only while all data is acknowledged; this bounds the wait for acknowledgements as well.
    "TCP_USER_TIMEOUT": GONE_S * 1000,
}
"""Options by the names that Linux gives them; other systems lack some of them."""


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an entry of `socket.getaddrinfo`, as the `socket_factory` of aiohttp's connectors."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    watch(connection)
    return connection


def watch(connection: socket.socket | TransportSocket) -> None:
    """Let a TCP connection notice that the other machine is gone.

    The kernel of the other machine answers the probes, so a server may take its time, even if its process is stopped.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

"""Tells whether a broker is ready, which it is once its answer lists a live broker of its cluster.

A port is open long before a broker serves. The broker lists itself once it is registered and unfenced. Speaking the
protocol directly (Metadata, version 1) costs no client, no thread and no noise on stderr while waiting.
"""

import struct

from rollstream.infra.broker.kafka_protocol import exchange

_METADATA, _VERSION = 3, 1
_NO_TOPICS = struct.pack(">i", 0)


def broker_answers(host: str, port: int, *, timeout_s: float = 1.0) -> bool:
    """Return whether a plaintext listener answers a metadata request with at least one live broker."""
    try:
        response = exchange(host, port, _METADATA, _VERSION, _NO_TOPICS, timeout_s=timeout_s)
    except OSError:
        return False
    return response.int32() > 0

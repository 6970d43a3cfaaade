"""Chooses ports: a broker gets its configured or previous port or a free port; other servers get a free port.

Free ports are chosen outside the kernel's range for outgoing connections, because a server may start to listen a minute
after its port was chosen, and until then any client on the machine could get a port of that range. Another server may
still take the port; rollstream.infra.broker.broker_start then tries again.
"""

import contextlib
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError

SERVER_PORTS = range(20_000, 30_000)
"""Below the outgoing ports of Linux (from 32768) and macOS (from 49152), and Kubernetes' node ports (from 30000)."""
OUTGOING_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIALS = 1_000
_random = random.SystemRandom()


def choose_port(config: BrokerConfig, layout: BrokerLayout) -> int:
    """Return the configured port, or the previous port of this data, or a free one."""
    if config.port:
        if not is_free(config.host, config.port):
            raise port_in_use(config.host, config.port)
        return config.port
    before = port_before(layout)
    return before if before and is_free(config.host, before) else free_port(config.host)


def port_before(layout: BrokerLayout) -> int | None:
    """Return the port on which this data was last served; None for new data."""
    if not layout.properties.exists():
        return None
    for line in layout.properties.read_text().splitlines():
        if line.startswith("advertised.listeners="):
            return int(line.rpartition(":")[2])
    return None


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        # Binds as the broker does: a port in TIME_WAIT is free, a port with a listener is not.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except (OSError, OverflowError):  # no port has a number above 65535
            return False
    return True


def free_port(host: str) -> int:
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Return different free ports. Raises ConfigurationError if none are found."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = free_port_row(host, 1)
        if port not in chosen:
            chosen.append(port)
    return chosen


def free_port_row(host: str, count: int, candidates: Sequence[int] = ()) -> int:
    """Return the first of `count` consecutive free ports among `candidates` (default: `server_ports()`).

    Raises ConfigurationError if none are found.
    """
    candidates = candidates or server_ports()
    for _ in range(_TRIALS):
        first = _random.choice(candidates)
        row = range(first, first + count)
        if row[-1] in candidates and all(is_free(host, port) for port in row):
            return first
    raise ConfigurationError(
        f"{host} has no {count} free ports in a row from {candidates[0]} to {candidates[-1]}; configure the ports"
    )


def server_ports(outgoing_range: Path = OUTGOING_RANGE) -> Sequence[int]:
    """Return a range of `SERVER_PORTS` that this machine does not use for outgoing connections.

    `outgoing_range` is the kernel's file with the first and last port of outgoing connections. If these ports
    include all `SERVER_PORTS`, no port is safe, and all `SERVER_PORTS` are returned.
    """
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, outgoing_range.read_text().split())
        below = range(SERVER_PORTS.start, min(SERVER_PORTS.stop, first))
        above = range(max(SERVER_PORTS.start, last + 1), SERVER_PORTS.stop)
        return max(below, above, key=len) or SERVER_PORTS
    return SERVER_PORTS


def port_in_use(host: str, port: int) -> BrokerUnavailable:
    return BrokerUnavailable(f"port {port} on {host} is in use: choose another with --port (0 takes any free one)")


def accepts_connections(servers: str, timeout_s: float = 3.0) -> bool:
    """Whether one of several addresses HOST:PORT, separated by commas, accepts connections."""
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        # The host and the port may be invalid, too: then nothing can be reached there.
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection((host.strip("[]"), int(port)), timeout_s),
        ):
            return True
    return False

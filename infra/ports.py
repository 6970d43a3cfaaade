"""Chooses the port of a broker: the configured one, the previous one of its data, or a free one.

Another process may take the port before the broker binds it; rollstream.infra.broker_start then tries again.
"""

import contextlib
import socket

from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.topics.errors import BrokerUnavailable


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
    with socket.socket() as trial:
        # As the broker binds: a port in TIME_WAIT is free, a port with a listener is not.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Return different free ports: all are held before any is released."""
    with contextlib.ExitStack() as held:
        trials = [held.enter_context(socket.socket()) for _ in range(count)]
        for trial in trials:
            trial.bind((host, 0))
        return [trial.getsockname()[1] for trial in trials]


def port_in_use(host: str, port: int) -> BrokerUnavailable:
    return BrokerUnavailable(f"port {port} on {host} is in use: choose another with --port (0 takes any free one)")

"""Picks the port of a broker: the one asked for, the one its data had before, or any that is free.

Between the look and the broker's bind another may take it; who starts brokers tries again.
"""

import contextlib
import socket

from infra.config import BrokerConfig, Layout
from topics.errors import BrokerUnavailable


def choose_port(config: BrokerConfig, layout: Layout) -> int:
    """The port to use: the configured one, or the one this data had before, or any free one."""
    if config.port:
        if not is_free(config.host, config.port):
            raise port_in_use(config.host, config.port)
        return config.port
    before = port_before(layout)
    return before if before and is_free(config.host, before) else free_port(config.host)


def port_before(layout: Layout) -> int | None:
    """The port this data was served on last; None for new data."""
    if not layout.properties.exists():
        return None
    for line in layout.properties.read_text().splitlines():
        if line.startswith("advertised.listeners="):
            return int(line.rpartition(":")[2])
    return None


def is_free(host: str, port: int) -> bool:
    with socket.socket() as trial:
        # As the broker binds: what lingers in TIME_WAIT is free, what listens is not.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Different free ports: all are held before any is let go."""
    with contextlib.ExitStack() as held:
        trials = [held.enter_context(socket.socket()) for _ in range(count)]
        for trial in trials:
            trial.bind((host, 0))
        return [trial.getsockname()[1] for trial in trials]


def port_in_use(host: str, port: int) -> BrokerUnavailable:
    return BrokerUnavailable(f"port {port} on {host} is in use: choose another with --port (0 takes any free one)")

"""Ports for servers: no outgoing connection takes a port between its choice and the start of the server."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollstream.infra.broker import ports
from rollstream.topics.errors import ConfigurationError


def test_free_ports_are_different_and_outside_the_range_of_outgoing_connections() -> None:
    first, last = map(int, ports.OUTGOING_RANGE.read_text().split())
    chosen = ports.free_ports("127.0.0.1", 50)
    assert len(set(chosen)) == 50
    assert not [port for port in chosen if first <= port <= last]


@pytest.mark.parametrize(
    ("outgoing", "expected"),
    [
        ("32768\t60999\n", (20_000, 29_999)),
        ("25000 60999", (20_000, 24_999)),
        ("1024 28000", (28_001, 29_999)),
        ("1024 65535", (20_000, 29_999)),
        ("no range", (20_000, 29_999)),
    ],
)
def test_ports_avoid_the_outgoing_range_of_the_machine(
    outgoing: str, expected: tuple[int, int], tmp_path: Path
) -> None:
    table = tmp_path / "ip_local_port_range"
    table.write_text(outgoing)
    candidates = ports.server_ports(table)
    assert (candidates[0], candidates[-1]) == expected


def test_a_row_of_ports_is_free_from_end_to_end_or_refused() -> None:
    with ExitStack() as held:
        row = ports.free_port_row("127.0.0.1", 4)
        candidates = range(row, row + 4)
        assert ports.free_port_row("127.0.0.1", 4, candidates) == row
        held.enter_context(socket.socket()).bind(("127.0.0.1", row + 2))
        assert ports.free_port_row("127.0.0.1", 2, candidates) == row
        with pytest.raises(ConfigurationError, match="no 3 free ports in a row"):
            ports.free_port_row("127.0.0.1", 3, candidates)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_port_is_free_until_a_server_listens_there(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # No client of another process gets this port once it is closed, as it may get one of the kernel's choice.
    port = ports.free_port(host)
    with socket.create_server((host, port), family=family):
        assert not ports.is_free(host, port)
    assert ports.is_free(host, port)


def test_a_port_above_the_last_is_not_free() -> None:
    assert not ports.is_free("127.0.0.1", 65_536)

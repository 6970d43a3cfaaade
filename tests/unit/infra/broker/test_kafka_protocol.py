"""The probe does not mistake an open port for a broker. The broker tests show that it recognises a real broker."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollstream.infra.broker.kafka_protocol import broker_answers


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """A port that accepts one connection, reads a little, sends `answer` and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (struct.pack(">iii", 8, 1, 0), False),
        (struct.pack(">iii", 8, 1, 1), True),
        (struct.pack(">iii", 8, 2, 1), False),
        (b"\0\0", False),
    ],
)
def test_only_an_answer_that_lists_a_live_broker_means_ready(answer: bytes, ready: bool) -> None:
    with listener(answer) as port:
        assert broker_answers("127.0.0.1", port) is ready


def test_a_closed_port_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert not broker_answers("127.0.0.1", port)

"""Sockets of HTTP clients: the kernel is told to notice a machine that vanished."""

import socket

from rollstream.topics.watched_sockets import GONE_S, watched_socket


def test_a_watched_socket_fails_after_seconds_of_silence_from_the_other_machine() -> None:
    with watched_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 80))) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count, bound_ms = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
    assert 10 <= idle + every * count == bound_ms / 1000 == GONE_S <= 15

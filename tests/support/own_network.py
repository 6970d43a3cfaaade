"""A network of a test's own: a namespace of Linux with a loopback device, in which packets are dropped below TCP.

A proxy cannot do this: its side of a connection goes on to acknowledge what it holds back. Here nobody hears anything,
no connection is reset, and TCP sends again by its own clock.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_HERE = "/proc/thread-self/ns/net"


@contextmanager
def own_network() -> Iterator[None]:
    """Put this thread, and the threads and processes it starts, into a network that has nothing but loopback.

    Raises PermissionError for users other than root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(_HERE, os.O_RDONLY)
    try:
        _succeeded(libc.unshare(_CLONE_NEWNET))
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            _succeeded(libc.setns(before, _CLONE_NEWNET))
    finally:
        os.close(before)


def _succeeded(result: int) -> None:
    if result:
        raise PermissionError(ctypes.get_errno(), "a network namespace needs root; run this test as root")


@contextmanager
def dropping(port: int, share: float = 1.0) -> Iterator[None]:
    """Drop this share of the packets from and to a port of this network, at random, while the block runs."""
    at_random = [] if share >= 1 else ["-m", "statistic", "--mode", "random", "--probability", str(share)]
    rules = [["INPUT", "-p", "tcp", side, str(port), *at_random, "-j", "DROP"] for side in ("--dport", "--sport")]
    for rule in rules:
        subprocess.run(["iptables", "-A", *rule], check=True)
    try:
        yield
    finally:
        for rule in rules:
            subprocess.run(["iptables", "-D", *rule], check=True)

"""Waits for everything a role needs to start: its topics, the first state of grouping, and roles that start before it.

Under `rollstream run` the supervisor keeps this order. Elsewhere each process waits by itself, so upgrades keep the
order, too: a role starts once each role before it has a ready process, and no ready process of another release.
"""

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import GROUP, role_of
from rollstream.topics.errors import BrokerUnavailable, DeadlineExceeded
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.wire.catalogue import topic_name

_LOOK_S = 1.0
"""Pause between two checks; the timeouts of single requests are multiples of it."""
_VERSION = re.compile(rb'^rollstream_info\{[^}]*version="([^"]*)"', re.MULTILINE)


def await_start(config: RunConfig, role: str, hosts: Sequence[str], timeout_s: float) -> None:
    """Wait until a role may start. Raises DeadlineExceeded, which names what is missing.

    `hosts` are the service addresses (host:port) of the roles before it; one host name may stand for several processes.
    """
    deadline = time.monotonic() + timeout_s
    while missing := next(_missing(config, role, hosts), ""):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{role} does not start: after {timeout_s:g} s {missing}")
        time.sleep(_LOOK_S)


def _missing(config: RunConfig, role: str, hosts: Sequence[str]) -> Iterator[str]:
    """Yield what is missing, in the order in which it must appear."""
    yield from _missing_topics(config, role)
    for host in hosts:
        yield from _missing_process(host)


def _missing_topics(config: RunConfig, name: str) -> Iterator[str]:
    role = role_of(name)
    needed = {topic_name(config.run, topic) for topic in (*role.reads, *role.writes)}
    rollouts = topic_name(config.run, "rollouts")
    try:
        present = topic_admin.topic_names(config.kafka)
        partitions = range(topic_admin.partitions_of(config.kafka, rollouts)) if rollouts in present else ()
    except BrokerUnavailable as error:
        yield str(error)
        return
    if absent := sorted(needed - set(present)):
        yield f"topics {', '.join(absent)} are missing; `rollstream topics apply` creates them"
    elif name == GROUP:
        # Joining the group would keep the first state from being written, so only read its offsets.
        try:
            with Reader(config.kafka, group=config.grouper.group_id(config.run)) as reader:
                positions = reader.committed(rollouts, partitions, "reading positions of grouping", 10 * _LOOK_S)
        except BrokerUnavailable as error:
            yield str(error)
            return
        if any(position.offset < 0 for position in positions):
            yield "the first state of grouping is missing; `rollstream topics apply` writes it"


def _missing_process(host: str) -> Iterator[str]:
    """Yield what is missing at a host: one process must be ready, and all ready processes must be of this release."""
    name, _, port = host.rpartition(":")
    ready, own = 0, version("rollstream").encode()
    for address in _addresses(name, int(port)):
        url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        if _answer(f"{url}/readyz") is None:
            continue
        others = set(_VERSION.findall(_answer(f"{url}/metrics") or b"")) - {own}
        if others:
            yield f"a process at {host} is of release {others.pop().decode()}, but this one is of {own.decode()}"
            return
        ready += 1
    if not ready:
        yield f"no process at {host} is ready"


def _addresses(name: str, port: int) -> list[str]:
    try:
        resolved = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(address[0]) for *_rest, address in resolved})


def _answer(url: str) -> bytes | None:
    """Return the body of the answer; None without an answer of 200."""
    try:
        with urllib.request.urlopen(url, timeout=5 * _LOOK_S) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, urllib.error.URLError):
        return None

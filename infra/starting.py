"""Brokers between their launch and their first answer: started together, and none left behind where one fails.

One broker is a list of one. Who calls this owns what it returns; `infra.broker` and `infra.cluster` do.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import infra.keeper
from infra.config import BrokerConfig, Layout
from infra.jars import KAFKA_VERSION
from infra.launch import Launch, prepare
from infra.ports import port_in_use
from infra.probe import broker_answers
from infra.processes import ProcessIdentity, identify, is_running
from infra.providers import DockerKafka, JavaKafka
from infra.state import BrokerState, read, write
from topics.errors import BrokerUnavailable
from topics.logs import event

logger = logging.getLogger(__name__)
T = TypeVar("T")

_TAIL_LINES = 20
_PORT_TRIES = 3
_PORT_TAKEN = ("Address already in use", "BindException", "port is already allocated")
_WRITTEN_BY_NEWER = "UnsupportedVersionException: Can't read version"


@dataclass(frozen=True)
class Place:
    """A broker to start, with the ports chosen for it."""

    config: BrokerConfig
    port: int
    controller_port: int

    @property
    def layout(self) -> Layout:
        return Layout(root=self.config.data_dir)


@dataclass(frozen=True)
class Started:
    """A broker that answers: what its data directory says of it, and our child that is it or keeps it."""

    state: BrokerState
    child: subprocess.Popen[bytes]


class PortTaken(Exception):
    """A broker could not bind its port."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.port)
        self.place = place


def with_ports(attempt: Callable[[], T]) -> T:
    """Try again, with ports chosen anew, where someone was faster between our look and a broker's bind.

    Raises BrokerUnavailable when the port was asked for, which is not exchanged, or after three tries.
    """
    for last in (False,) * (_PORT_TRIES - 1) + (True,):
        try:
            return attempt()
        except PortTaken as taken:
            if taken.place.config.port or last:
                raise port_in_use(taken.place.config.host, taken.place.port) from None
    raise AssertionError("unreachable")


def start_together(
    provider: JavaKafka | DockerKafka, places: Sequence[Place], *, bound_to_parent: bool
) -> list[Started]:
    """Start brokers and return when each answers. Raises PortTaken or BrokerUnavailable, with all of them ended."""
    began = time.monotonic()
    for place in places:
        _make_directory(place.layout)
    written_before = [place.layout.log.stat().st_size for place in places]
    with ThreadPoolExecutor(len(places)) as pool:
        launches = list(
            pool.map(
                lambda p: prepare(provider, p.config, p.layout, port=p.port, controller_port=p.controller_port), places
            )
        )
    starting: list[_Starting] = []
    try:
        for place, launch, offset_bytes in zip(places, launches, written_before, strict=True):
            child, pid = _spawn(launch, place.layout, place.config, bound_to_parent=bound_to_parent)
            starting.append(_Starting(place, launch, child, pid, identify(pid), began, offset_bytes))
        name = "docker" if isinstance(provider, DockerKafka) else "java"
        return [broker.await_answer(name) for broker in starting]
    except BaseException:
        # Ctrl-C included: what was started here does not outlive the attempt.
        for broker in starting:
            broker.abandon()
        raise


def log_tail(log: Path, *, offset_bytes: int = 0, lines: int = _TAIL_LINES) -> str:
    """The last lines of a broker's log, of what was written after `offset_bytes`."""
    with log.open("rb") as stream:
        stream.seek(offset_bytes)
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-lines:])


def reap(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Collect the exit status, then let go of the keeper's pipe."""
    child.wait(timeout_s)
    if child.stdin:
        child.stdin.close()


@dataclass(frozen=True)
class _Starting:
    """A broker's process that does not answer yet."""

    place: Place
    launch: Launch
    child: subprocess.Popen[bytes]
    pid: int
    process: ProcessIdentity | None
    began: float
    offset_bytes: int
    """Where in its log this start begins."""

    def await_answer(self, provider: str) -> Started:
        config, layout, process = self.place.config, self.place.layout, self.process
        while process and not broker_answers(config.host, self.place.port):
            if self.child.poll() is not None or not is_running(process):
                process = None
            elif time.monotonic() - self.began > config.start_timeout_s:
                raise self._failed(f"did not answer within {config.start_timeout_s:g} s")
            time.sleep(0.05)
        if process is None:
            # The last lines of its log are written by now.
            self.child.wait(config.stop_timeout_s)
            tail = log_tail(layout.log, offset_bytes=self.offset_bytes, lines=200)
            if any(sign in tail for sign in _PORT_TAKEN):
                raise PortTaken(self.place)
            if _WRITTEN_BY_NEWER in tail:
                raise BrokerUnavailable(
                    f"the data in {layout.root} comes from a newer Kafka than this one ({KAFKA_VERSION}, or that of "
                    f"KAFKA_HOME): set KAFKA_HOME to that version, or give another --data (log: {layout.log})"
                )
            raise self._failed(f"ended while starting (exit {self.child.returncode})")
        state = BrokerState(process, config.host, self.place.port, provider, str(layout.log), self.launch.kill_command)
        write(layout.state, state)
        event(
            logger,
            "broker_started",
            bootstrap_servers=state.bootstrap_servers,
            pid=self.pid,
            provider=provider,
            data=str(layout.root),
            seconds=round(time.monotonic() - self.began, 2),
        )
        return Started(state, self.child)

    def abandon(self) -> None:
        """End it by force, and forget it."""
        if self.launch.kill_command:
            subprocess.run(self.launch.kill_command, capture_output=True, timeout=30, check=False)
        with contextlib.suppress(ProcessLookupError):
            if self.child.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        reap(self.child, self.place.config.stop_timeout_s)
        written = read(self.place.layout.state)
        if written and written.process == self.process:
            self.place.layout.state.unlink(missing_ok=True)

    def _failed(self, what: str) -> BrokerUnavailable:
        log = self.place.layout.log
        return BrokerUnavailable(f"Kafka {what}; the end of {log}:\n{log_tail(log, offset_bytes=self.offset_bytes)}")


def _make_directory(layout: Layout) -> None:
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        layout.log.touch()
    except OSError as error:
        raise BrokerUnavailable(
            f"broker data directory {layout.root} cannot be used ({error}); give another --data"
        ) from None


def _spawn(
    launch: Launch, layout: Layout, config: BrokerConfig, *, bound_to_parent: bool
) -> tuple[subprocess.Popen[bytes], int]:
    """Run the broker in a session of its own, out of reach of Ctrl-C at our terminal; bound: under a keeper."""
    if not bound_to_parent:
        with layout.log.open("ab") as log:
            child = subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=layout.root,
                start_new_session=True,
            )
        return child, child.pid
    task = {
        "command": launch.command,
        "kill_command": launch.kill_command,
        "log": str(layout.log.resolve()),
        "cwd": str(layout.root.resolve()),
        "stop_timeout_s": config.stop_timeout_s,
    }
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", infra.keeper.__file__, json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    keeper.stdout.close()
    if not line.strip():
        reap(keeper, config.stop_timeout_s)
        raise BrokerUnavailable(
            f"the broker's keeper ended at once; its message is above (command: {launch.command[0]})"
        )
    return keeper, int(line)

"""Starts brokers together and waits until each answers; if one fails, none is left running.

A broker's state file is written as soon as its process runs, so that `rollstream broker stop` can end the broker of a
start that was killed while it waited. The callers, broker.py and cluster.py, own the
brokers returned.
"""

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import rollstream.infra.broker.child_keeper
from rollstream.infra.broker.broker_state import BrokerState, find, read, write
from rollstream.infra.broker.java_runtime import KAFKA_VERSION
from rollstream.infra.broker.kafka_protocol import broker_answers
from rollstream.infra.broker.launch_commands import LaunchCommand, prepare
from rollstream.infra.broker.ports import port_in_use
from rollstream.infra.broker.process_identity import ProcessIdentity, identify, is_running
from rollstream.infra.broker.providers import DockerKafka, JavaKafka
from rollstream.infra.config import BrokerConfig, BrokerLayout
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
T = TypeVar("T")

KILL_TIMEOUT_S = 30.0
_TAIL_LINES = 20
_PORT_TRIES = 3
_PORT_TAKEN = ("Address already in use", "BindException", "port is already allocated")
_WRITTEN_BY_NEWER = "UnsupportedVersionException: Can't read version"


@dataclass(frozen=True)
class PlannedBroker:
    """A broker to start, with the ports chosen for it."""

    config: BrokerConfig
    port: int
    controller_port: int

    @property
    def layout(self) -> BrokerLayout:
        return BrokerLayout(root=self.config.data_dir)


@dataclass(frozen=True)
class StartedBroker:
    """A broker that answers: the state in its data directory, and our child process (the broker or its keeper)."""

    state: BrokerState
    child: subprocess.Popen[bytes]


class PortTaken(Exception):
    """A broker could not bind its port."""

    def __init__(self, broker: PlannedBroker) -> None:
        super().__init__(broker.port)
        self.broker = broker


def retry_taken_ports(data_dir: Path, attempt: Callable[[], T]) -> T:
    """Attempt a start up to three times, with new ports, in case another process takes a port before a broker binds it.

    Raises BrokerUnavailable if a port is still taken at the third attempt, if the taken port is a configured one, or if
    files below `data_dir` cannot be read or written.
    """
    for last in (False,) * (_PORT_TRIES - 1) + (True,):
        try:
            return attempt()
        except PortTaken as taken:
            if taken.broker.config.port or last:
                raise port_in_use(taken.broker.config.host, taken.broker.port) from None
        except OSError as error:
            raise BrokerUnavailable(
                f"broker data directory {data_dir} cannot be used ({error}): give another --data, or free space"
            ) from error
    raise AssertionError("unreachable")


def refuse_running(data_dir: Path) -> None:
    """Raise BrokerUnavailable if a broker runs on this data, whether it answers or not."""
    running = find(data_dir)
    if running:
        raise BrokerUnavailable(
            f"a broker already runs on {data_dir}: {running.bootstrap_servers} (pid {running.process.pid}); "
            f"use it, stop it with `rollstream broker stop --data {data_dir}`, or give another --data"
        )


def start_together(
    provider: JavaKafka | DockerKafka,
    brokers: Sequence[PlannedBroker],
    *,
    bound_to_parent: bool,
    record: Callable[[], None] = lambda: None,
) -> list[StartedBroker]:
    """Start brokers and return when each answers. `record` is called just before their processes start, when no other
    start on their data is possible.

    Raises PortTaken or BrokerUnavailable after ending all of them.
    """
    began = time.monotonic()
    for broker in brokers:
        broker.layout.root.mkdir(parents=True, exist_ok=True)
        broker.layout.log.touch()
    name = "docker" if isinstance(provider, DockerKafka) else "java"
    starting: list[_StartingBroker] = []
    try:
        with contextlib.ExitStack() as locks:
            for broker in brokers:
                locks.enter_context(_sole_start(broker.layout))
            log_sizes = [broker.layout.log.stat().st_size for broker in brokers]
            with ThreadPoolExecutor(len(brokers)) as pool:
                launches = list(
                    pool.map(
                        lambda p: prepare(provider, p.config, p.layout, port=p.port, controller_port=p.controller_port),
                        brokers,
                    )
                )
            record()
            for broker, launch, offset_bytes in zip(brokers, launches, log_sizes, strict=True):
                child, pid = _spawn(launch, broker.layout, broker.config, bound_to_parent=bound_to_parent)
                starting.append(_StartingBroker(broker, launch, child, pid, identify(pid), name, began, offset_bytes))
                starting[-1].write_state()
        return [process.await_answer() for process in starting]
    except BaseException:
        # Also on Ctrl-C, so that no broker outlives a failed attempt.
        for process in starting:
            process.abandon()
        raise


def log_tail(log: Path, *, offset_bytes: int = 0, lines: int = _TAIL_LINES) -> str:
    """Return the last lines of a broker's log that were written after `offset_bytes`."""
    with log.open("rb") as stream:
        stream.seek(offset_bytes)
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-lines:])


def run_kill_command(command: Sequence[str]) -> None:
    """Run the command that kills a broker. A failure is only logged, because the caller sees what still runs."""
    try:
        subprocess.run(command, capture_output=True, timeout=KILL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        event(logger, "kill_command_failed", level=logging.WARNING, command=" ".join(command), error=str(error))


def reap(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Collect the exit status, then close the keeper's pipe."""
    child.wait(timeout_s)
    if child.stdin:
        child.stdin.close()


@dataclass(frozen=True)
class _StartingBroker:
    """A broker's process that does not answer yet."""

    broker: PlannedBroker
    launch: LaunchCommand
    child: subprocess.Popen[bytes]
    pid: int
    process: ProcessIdentity | None
    provider: str
    began: float
    offset_bytes: int
    """Size of the broker's log before this start."""

    def write_state(self) -> None:
        """Write the broker's state file, unless its process has ended already."""
        if self.process:
            write(self.broker.layout.state, self._state(self.process))

    def await_answer(self) -> StartedBroker:
        config, layout, process = self.broker.config, self.broker.layout, self.process
        while process and not broker_answers(config.host, self.broker.port):
            if self.child.poll() is not None or not is_running(process):
                process = None
            elif time.monotonic() - self.began > config.start_timeout_s:
                raise self._failed(f"did not answer within {config.start_timeout_s:g} s")
            time.sleep(0.05)
        if process is None:
            # The last lines of the log are complete only once the child has ended.
            self.child.wait(config.stop_timeout_s)
            tail = log_tail(layout.log, offset_bytes=self.offset_bytes, lines=200)
            if any(sign in tail for sign in _PORT_TAKEN):
                raise PortTaken(self.broker)
            if _WRITTEN_BY_NEWER in tail:
                raise BrokerUnavailable(
                    f"the data in {layout.root} comes from a newer Kafka than this one ({KAFKA_VERSION}, or the one in "
                    f"KAFKA_HOME): set KAFKA_HOME to the newer Kafka, or give another --data (log: {layout.log})"
                )
            raise self._failed(f"ended while starting (exit {self.child.returncode})")
        state = self._state(process)
        event(
            logger,
            "broker_started",
            bootstrap_servers=state.bootstrap_servers,
            pid=self.pid,
            provider=self.provider,
            data=str(layout.root),
            seconds=round(time.monotonic() - self.began, 2),
        )
        return StartedBroker(state, self.child)

    def abandon(self) -> None:
        """End the process by force, and remove the broker's state file."""
        if self.launch.kill_command:
            run_kill_command(self.launch.kill_command)
        with contextlib.suppress(ProcessLookupError):
            if self.child.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        reap(self.child, self.broker.config.stop_timeout_s)
        state = read(self.broker.layout.state)
        if state and state.process == self.process:
            self.broker.layout.state.unlink(missing_ok=True)

    def _state(self, process: ProcessIdentity) -> BrokerState:
        host, log = self.broker.config.host, str(self.broker.layout.log)
        return BrokerState(process, host, self.broker.port, self.provider, log, self.launch.kill_command)

    def _failed(self, failure: str) -> BrokerUnavailable:
        log = self.broker.layout.log
        return BrokerUnavailable(f"Kafka {failure}; the end of {log}:\n{log_tail(log, offset_bytes=self.offset_bytes)}")


@contextlib.contextmanager
def _sole_start(layout: BrokerLayout) -> Iterator[None]:
    """Hold off other starts on this data, which would replace the state file of this one.

    Raises BrokerUnavailable if another process starts a broker on this data, or if one runs.
    """
    with layout.log.open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BrokerUnavailable(
                f"another process starts a broker on {layout.root} at this moment: wait for it, or give another --data"
            ) from None
        refuse_running(layout.root)
        yield


def _spawn(
    launch: LaunchCommand, layout: BrokerLayout, config: BrokerConfig, *, bound_to_parent: bool
) -> tuple[subprocess.Popen[bytes], int]:
    """Run the broker in a separate session, which Ctrl-C at our terminal does not reach; if bound, under a keeper."""
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
        [sys.executable, "-I", "-S", rollstream.infra.broker.child_keeper.__file__, json.dumps(task)],
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

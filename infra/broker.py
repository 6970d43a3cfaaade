"""A real Kafka broker on this machine: started when `start` returns, gone when `stop` returns, its data kept.

For tests, the demo and `rollstream broker`; several run side by side. broker.json in its data directory says what it is
and where, so that another process finds it; `bound_to_parent` ends it with the process that asked, however that ends.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import infra.keeper
from infra.config import BrokerConfig, Layout
from infra.launch import Launch, prepare
from infra.ports import choose_port, free_port, port_in_use
from infra.probe import broker_answers
from infra.processes import await_end, identify, is_running, send
from infra.providers import DockerKafka, JavaKafka, choose_local, external
from infra.state import BrokerState, find, read, write
from topics.errors import BrokerUnavailable
from topics.logs import event

logger = logging.getLogger(__name__)

_TAIL_LINES = 20
_PORT_TRIES = 3
_PORT_TAKEN = ("Address already in use", "BindException", "port is already allocated")


class LocalBroker:
    """A broker started by this process (`start`) or found in a data directory (`find`)."""

    def __init__(self, config: BrokerConfig, state: BrokerState, child: subprocess.Popen[bytes] | None) -> None:
        self._config = config
        self._state = state
        self._child = child

    @classmethod
    def start(
        cls,
        data_dir: Path | str | None = None,
        port: int | None = None,
        *,
        config: BrokerConfig | None = None,
        bound_to_parent: bool = False,
    ) -> Self:
        """Start a broker and return when it answers. `data_dir` and `port` win over those of `config`.

        Raises BrokerUnavailable: one already runs on this data, the port is in use, no provider works, or it did not
        start (with the tail of its log).
        """
        config = config or BrokerConfig()
        if data_dir is not None:
            config = dataclasses.replace(config, data_dir=Path(data_dir))
        if port is not None:
            config = dataclasses.replace(config, port=port)
        running = find(config.data_dir)
        if running:
            raise BrokerUnavailable(
                f"a broker already runs on {config.data_dir}: {running.bootstrap_servers} (pid {running.process.pid}); "
                f"use it, stop it with `rollstream broker stop --data {config.data_dir}`, or give another --data"
            )
        state, child = _start(config, bound_to_parent=bound_to_parent)
        return cls(config, state, child)

    @classmethod
    def find(cls, data_dir: Path | str) -> Self | None:
        """The broker that runs on `data_dir`, whoever started it; None where none does."""
        state = find(Path(data_dir))
        return (
            cls(BrokerConfig(data_dir=Path(data_dir), host=state.host, port=state.port), state, None) if state else None
        )

    @property
    def bootstrap_servers(self) -> str:
        return self._state.bootstrap_servers

    @property
    def port(self) -> int:
        return self._state.port

    @property
    def pid(self) -> int:
        return self._state.process.pid

    @property
    def provider(self) -> str:
        return self._state.provider

    @property
    def data_dir(self) -> Path:
        return self._config.data_dir

    @property
    def log(self) -> Path:
        return Layout(root=self._config.data_dir).log

    @property
    def running(self) -> bool:
        return is_running(self._state.process)

    def answers(self) -> bool:
        """Whether it serves requests now."""
        return broker_answers(self._state.host, self._state.port)

    def stop(self) -> None:
        """End it in order (SIGTERM), after `stop_timeout_s` by force. Does nothing where it ended already."""
        if send(self._state.process, signal.SIGTERM) and not await_end(
            self._state.process, self._config.stop_timeout_s
        ):
            event(logger, "broker_killed", level=logging.WARNING, pid=self.pid, after_s=self._config.stop_timeout_s)
            self.kill()
        self._ended("broker_stopped")

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would."""
        if self._state.kill_command and self.running:
            subprocess.run(self._state.kill_command, capture_output=True, timeout=30, check=False)
        else:
            send(self._state.process, signal.SIGKILL)
        if not await_end(self._state.process, self._config.stop_timeout_s):
            raise BrokerUnavailable(f"broker pid {self.pid} does not end; see {self.log}")
        self._ended("broker_killed")

    def restart(self) -> None:
        """Start it again on the same port and data, stopping it first if it runs."""
        self.stop()
        bound = self._child is not None and self._child.stdin is not None
        self._state, self._child = _start(dataclasses.replace(self._config, port=self.port), bound_to_parent=bound)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _ended(self, how: str) -> None:
        if self._child is not None:
            _reap(self._child, self._config.stop_timeout_s)
        path = Layout(root=self._config.data_dir).state
        if read(path) == self._state:
            path.unlink(missing_ok=True)
            event(logger, how, pid=self.pid, bootstrap_servers=self.bootstrap_servers)


class ExternalBroker:
    """A broker that is not ours: it has an address, and nothing to stop."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def stop(self) -> None:
        """Leave it as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def open_broker(config: BrokerConfig, *, bound_to_parent: bool = True) -> LocalBroker | ExternalBroker:
    """The broker of KAFKA_BOOTSTRAP_SERVERS if that is set, else a new local one: the whole provider chain."""
    given = external()
    if given:
        return ExternalBroker(given.bootstrap_servers)
    return LocalBroker.start(config=config, bound_to_parent=bound_to_parent)


def log_tail(log: Path, *, offset_bytes: int = 0, lines: int = _TAIL_LINES) -> str:
    """The last lines of a broker's log, of what was written after `offset_bytes`."""
    with log.open("rb") as stream:
        stream.seek(offset_bytes)
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-lines:])


def _start(config: BrokerConfig, *, bound_to_parent: bool) -> tuple[BrokerState, subprocess.Popen[bytes]]:
    provider = choose_local(config.provider)
    layout = Layout(root=config.data_dir)
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        layout.log.touch()
    except OSError as error:
        raise BrokerUnavailable(
            f"broker data directory {layout.root} cannot be used ({error}); give another --data"
        ) from None
    for attempt in range(1, _PORT_TRIES + 1):
        port = choose_port(config, layout)
        try:
            return _start_on(port, provider, config, layout, bound_to_parent=bound_to_parent)
        except _PortTaken:
            # Someone was faster between our look and the broker's bind. A port that was asked for is not exchanged.
            if config.port or attempt == _PORT_TRIES:
                raise port_in_use(config.host, port) from None
    raise AssertionError("unreachable")


class _PortTaken(Exception):
    """The broker could not bind its port."""


def _start_on(
    port: int, provider: JavaKafka | DockerKafka, config: BrokerConfig, layout: Layout, *, bound_to_parent: bool
) -> tuple[BrokerState, subprocess.Popen[bytes]]:
    began = time.monotonic()
    written_before = layout.log.stat().st_size
    launch = prepare(provider, config, layout, port=port, controller_port=free_port("127.0.0.1"))
    child, pid = _spawn(launch, layout, config, bound_to_parent=bound_to_parent)
    try:
        process = identify(pid)
        while process and not broker_answers(config.host, port):
            if child.poll() is not None or not is_running(process):
                process = None
            elif time.monotonic() - began > config.start_timeout_s:
                raise _failed(f"did not answer within {config.start_timeout_s:g} s", layout.log, written_before)
            time.sleep(0.05)
        if process is None:
            # The last lines of its log are written by now.
            child.wait(config.stop_timeout_s)
            if any(sign in log_tail(layout.log, offset_bytes=written_before, lines=200) for sign in _PORT_TAKEN):
                raise _PortTaken
            raise _failed(f"ended while starting (exit {child.returncode})", layout.log, written_before)
        name = "docker" if isinstance(provider, DockerKafka) else "java"
        state = BrokerState(process, config.host, port, name, str(layout.log), launch.kill_command)
        write(layout.state, state)
    except BaseException:
        # Ctrl-C included: what was started here does not outlive the attempt.
        if launch.kill_command:
            subprocess.run(launch.kill_command, capture_output=True, timeout=30, check=False)
        with contextlib.suppress(ProcessLookupError):
            if child.poll() is None:
                os.kill(pid, signal.SIGKILL)
        _reap(child, config.stop_timeout_s)
        raise
    event(
        logger,
        "broker_started",
        bootstrap_servers=state.bootstrap_servers,
        pid=pid,
        provider=name,
        data=str(layout.root),
        seconds=round(time.monotonic() - began, 2),
    )
    return state, child


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
        _reap(keeper, config.stop_timeout_s)
        raise BrokerUnavailable(
            f"the broker's keeper ended at once; its message is above (command: {launch.command[0]})"
        )
    return keeper, int(line)


def _reap(child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Collect the exit status, then let go of the keeper's pipe."""
    child.wait(timeout_s)
    if child.stdin:
        child.stdin.close()


def _failed(what: str, log: Path, offset_bytes: int) -> BrokerUnavailable:
    return BrokerUnavailable(f"Kafka {what}; the end of {log}:\n{log_tail(log, offset_bytes=offset_bytes)}")

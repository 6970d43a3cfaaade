"""A role as its supervisor sees it: the specification of its process, its state, and the cause of its exit."""

import hashlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.infra.broker.process_identity import ProcessIdentity, await_end, identify, is_running, kill_group, send


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One process of a run: `python *arguments`, with this Python."""

    name: str
    """Unique within the run, kind first, e.g. group-0; also the name of its log file."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the supervisor; an empty value removes a variable."""
    finishes: bool = False
    """Whether it exits with 0 by itself when its work is done."""
    optional: bool = False
    """Whether the run goes on without it when it fails."""
    ready_timeout_s: float = 120.0
    """How long it may take from its start, or from its last progress report, until it is ready."""
    stop_timeout_s: float = 20.0
    restarts: int = 3
    """How often it is started again after exiting unexpectedly, within `window_s`."""
    window_s: float = 600.0
    """Time after which an exit is forgotten."""
    backoff_s: float = 0.5
    """Pause before the first restart; it doubles with each further restart."""
    address: tuple[str, int] | None = None
    """IP address and port where it serves clients, whose connections wait for it while it is started again."""
    expendable: bool = False
    """Whether the other processes go on if it never becomes ready, or exits more often than `restarts` allows."""
    shares_work: bool = False
    """Whether processes of its kind share their work; the run then goes on without it while another is ready."""

    @property
    def kind(self) -> str:
        """Its name up to the first dash; roles of one kind stop together."""
        return self.name.partition("-")[0]

    @property
    def command_digest(self) -> str:
        """A digest of its command line and variables."""
        command = [sys.executable, self.arguments, sorted(self.environment.items())]
        return hashlib.sha256(json.dumps(command).encode()).hexdigest()


NO_EXIT_CODE = 256
"""Exit code reported for an adopted process that left none, for example because it was killed."""
_LONG_S = 1e9


class AdoptedProcess:
    """A running process that writes its exit code to a file when it ends by itself."""

    def __init__(self, identity: ProcessIdentity, exit_file: Path) -> None:
        self.identity = identity
        self.pid = identity.pid
        self.returncode: int | None = None
        self._exit_file = exit_file

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None and not is_running(self.identity):
            self.returncode = _read(self._exit_file)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends and return its exit code. Raises subprocess.TimeoutExpired."""
        if not await_end(self.identity, _LONG_S if timeout is None else timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        code = self.poll()
        assert code is not None, "it has ended"
        return code

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        send(self.identity, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        send(self.identity, signal.SIGKILL)


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return NO_EXIT_CODE


_TAIL_LINES = 12
_WAITING_CLIENTS = 1024
"""Connections that wait at the address of a role while it is started again."""
_TAIL_BYTES = 64 * 1024
LOG_BYTES = 64 * 1024 * 1024
"""Size above which a log is put aside before its process is started again."""


class Unstarted:
    """Stands for the process of a role that could not be started, with the methods of one that has ended."""

    pid = 0
    returncode: int | None = NO_EXIT_CODE

    def poll(self) -> int | None:
        """Return an unknown exit code."""
        return self.returncode

    def wait(self, _timeout: float | None = None) -> int:
        """Return an unknown exit code at once."""
        return NO_EXIT_CODE

    def terminate(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""


@dataclass
class SupervisedRole:
    """A process of a run."""

    spec: RoleSpec
    log: Path
    process: subprocess.Popen[bytes] | AdoptedProcess | Unstarted
    ready_fd: int | None
    started: float
    heard: float
    """When the role started or last reported progress, by the supervisor's clock."""
    progress: str = ""
    ready: bool = False
    ever_ready: bool = False
    stopping: bool = False
    reaped: bool = False
    exits: int = 0
    recent: tuple[float, ...] = ()
    """Times of the exits within the window, by the supervisor's clock."""
    restart_at: float | None = None
    excused: bool = False
    """Whether the role exited with 0 while that was allowed; it is started again once that is no longer allowed."""
    retired_until: float | None = None
    """When a retired role that has not ended is killed, by the supervisor's clock; None if it is not retired."""
    failure: str = ""
    """Why an optional role is not started again."""
    listener: socket.socket | None = None
    """Socket at the address of the role, which it inherits."""

    def listen(self) -> None:
        """Listen at the role's address, so that connections wait for the role; the role itself reports an address that
        is not an IP address, or is in use."""
        if self.listener is None and self.spec.address is not None:
            host, port = self.spec.address
            with suppress(OSError, ValueError):
                family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
                self.listener = socket.create_server((host, port), family=family, backlog=_WAITING_CLIENTS)

    def stop_for_good(self) -> None:
        """Note that the role is to end, and not to be started again."""
        self.stopping, self.restart_at = True, None
        self.refuse_clients()

    def refuse_clients(self) -> None:
        """Stop listening, so that clients are refused once the role itself has stopped."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    @property
    def identity(self) -> ProcessIdentity | None:
        """Identity of its process, or None if it no longer runs."""
        if isinstance(self.process, AdoptedProcess):
            return self.process.identity if is_running(self.process.identity) else None
        if isinstance(self.process, Unstarted):
            return None
        return identify(self.process.pid)

    def kill_group(self) -> None:
        """SIGKILL the process and whatever it started, unless another process has its id now."""
        if isinstance(self.process, AdoptedProcess):
            kill_group(self.process.identity)
            return
        if isinstance(self.process, Unstarted):
            return  # Its id, 0, would name the group of this process.
        # Nobody else can have the id, because this process has not been reaped.
        with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)


def name_exit(code: int) -> str:
    """Return the usual name of an exit code."""
    if code == NO_EXIT_CODE:
        return "an unknown exit code, as if it was killed"
    if code == -signal.SIGKILL:
        return "signal SIGKILL, which the system sends if memory runs out"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def put_aside(log: Path) -> None:
    """Rename a log of more than LOG_BYTES, so that a new one begins; it replaces the log that was put aside before."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


def cause_in(log: Path) -> str:
    """Return the last error that a role printed, or the end of its log if it printed none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError as error:  # somebody may have deleted it to free space
        return f"its log cannot be read: {error}"
    errors = [line for line in lines[-_TAIL_LINES:] if line.startswith("rollstream: ")]
    if errors:
        return f"{errors[-1].removeprefix('rollstream: ')} ({log})"
    if not lines:
        return f"{log} is empty"
    return "\n    ".join([f"the end of {log}:", *(line[:500] for line in lines[-_TAIL_LINES:])])

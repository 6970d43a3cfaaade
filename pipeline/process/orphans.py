"""Processes whose supervisor is lost; they keep running for a while, so that the run's next supervisor can adopt them.

The supervisor lists its processes in a file. The next supervisor writes its own identity there, and keeps in the
list only the processes that it adopts. Every command imports this module, so it uses only the standard library.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollstream.infra.broker.process_identity import ProcessIdentity, identify, is_running

REGISTRY_VARIABLE = "ROLLSTREAM_REGISTRY"
"""Variable with the path of the list, set for processes that may be adopted."""
EXIT_FILES = "exit-*"
"""Files next to the list in which processes leave their exit codes."""
_LOOK_S = 0.2
_orphaned: list[Path] = []
"""Path of the list, once the first supervisor of this process is lost; empty before."""


@dataclass(frozen=True)
class RegisteredProcess:
    """A process in the list."""

    process: ProcessIdentity
    command: str
    """Digest of its command line and variables."""
    ready: bool
    """Whether it has reported that it is ready."""


@dataclass(frozen=True)
class RegisteredRun:
    """The processes of a run on this machine, and who supervises them."""

    supervisor: ProcessIdentity
    configuration: str
    """Digest of the configuration that they follow."""
    adoption_s: float
    """How long the processes run on without a supervisor."""
    processes: Mapping[str, RegisteredProcess]
    """Processes by name."""


def read(path: Path) -> RegisteredRun | None:
    """Return the list, or None if it is missing or cannot be read."""
    try:
        fields = json.loads(path.read_text())
        return RegisteredRun(
            supervisor=ProcessIdentity(**fields["supervisor"]),
            configuration=fields["configuration"],
            adoption_s=float(fields["adoption_s"]),
            processes={
                name: RegisteredProcess(ProcessIdentity(**entry["process"]), entry["command"], entry["ready"])
                for name, entry in fields["processes"].items()
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def await_supervisor(path: Path) -> ProcessIdentity | None:
    """Wait until another supervisor adopts this process, and return that supervisor. Return None if no supervisor does
    so in time, or if the next supervisor leaves this process out of the list."""
    _orphaned[:] = [path]
    lost = time.monotonic()
    while (run := read(path)) is not None:
        if is_running(run.supervisor):
            me = identify(os.getpid())
            return run.supervisor if any(entry.process == me for entry in run.processes.values()) else None
        if time.monotonic() - lost >= run.adoption_s:
            return None
        time.sleep(_LOOK_S)
    return None


def leave_exit_code(code: int) -> None:
    """Write the exit code of this process to a file if its parent supervisor was lost, because the system reports exit
    codes only to parents."""
    for path in _orphaned:
        with suppress(OSError):  # without the file, the exit counts as a kill
            exit_file(path, os.getpid()).write_text(str(code))


def exit_file(path: Path, pid: int) -> Path:
    """Return the file next to a list in which a process leaves its exit code."""
    return path.with_name(EXIT_FILES.replace("*", str(pid)))

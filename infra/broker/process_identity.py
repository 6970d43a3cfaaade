"""Identifies processes across reused pids, by the pid, the start time of the process and the boot of the machine."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """A pid and the start of its process, an opaque text; equal only for the same process."""

    pid: int
    started: str


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has this pid now; None if none runs (a zombie does not count)."""
    started = _started_by_proc(pid) if (PROC / "self" / "stat").exists() else _started_by_ps(pid)
    return ProcessIdentity(pid, started) if started else None


def is_running(process: ProcessIdentity) -> bool:
    return identify(process.pid) == process


def send(process: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal the process unless it has ended; return whether the signal was sent."""
    if not is_running(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def kill_group(leader: ProcessIdentity) -> None:
    """SIGKILL the process group of this process: itself and whatever it started, also if it has ended itself. Does
    nothing if another process has its id now."""
    # The system gives the id to no other process while a process that this one started is in the group of that id.
    if identify(leader.pid) in (None, leader):
        with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
            os.killpg(leader.pid, signal.SIGKILL)


def await_end(process: ProcessIdentity, timeout_s: float) -> bool:
    """Wait until the process ends, up to `timeout_s`; return False if it still runs."""
    deadline = time.monotonic() + timeout_s
    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _started_by_proc(pid: int) -> str | None:
    try:
        # proc(5): the name in parentheses may contain spaces; of the fields after it, state is the first, starttime the
        # 20th.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _started_by_ps(pid: int) -> str | None:
    # Each caller must get the same text: ps prints the time in the caller's zone and language.
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()

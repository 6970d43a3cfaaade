"""Tells a process from another that got its number later: who is still the process we started?

A pid alone names nobody: numbers are used again. A pid with its start time, and the machine's, names one process.
"""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """A pid and when that process started (opaque; equal only for the same process)."""

    pid: int
    started: str


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the process that has this pid now; None where none runs (a zombie does not)."""
    started = _started_by_proc(pid) if (_PROC / "self" / "stat").exists() else _started_by_ps(pid)
    return ProcessIdentity(pid, started) if started else None


def is_running(process: ProcessIdentity) -> bool:
    return identify(process.pid) == process


def send(process: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal the process unless it ended; True where it was sent."""
    if not is_running(process):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def await_end(process: ProcessIdentity, timeout_s: float) -> bool:
    """Wait until it ended, `timeout_s` seconds at most; False where it still runs."""
    deadline = time.monotonic() + timeout_s
    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _started_by_proc(pid: int) -> str | None:
    try:
        # proc(5): the name in parentheses may hold spaces; state is the field after it, starttime the 20th.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _started_by_ps(pid: int) -> str | None:
    answer = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()

"""Linux namespaces of a test's own, which hold all processes, mounts and addresses of what it starts.

When the first process of the namespaces ends, the kernel ends all others and forgets the mounts. Their network has a
loopback device alone, so no packet leaves the machine.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

ADDRESS = "10.99.0.1"
_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
# The shell is the first process of the namespace: unlike Python it collects the children that others leave behind.
_FIRST = ("sh", "-c", '"$@"; exit $?', "sh")


def missing() -> list[str]:
    """Why this process cannot enter namespaces of its own, if so."""
    allowed = os.geteuid() == 0 and Path("/proc/self/ns/net").exists()
    return [] if allowed else ["namespaces of their own for daemons need root on Linux"]


def enter(module: str) -> int:
    """Run a module of Python as root in new namespaces, which end with it and with this process; return its exit
    status. Its argument is an empty directory, removed afterwards."""
    folder = tempfile.mkdtemp(prefix="rollstream-cluster-")
    try:
        command = [sys.executable, "-m", module, folder]
        return subprocess.run(["setpriv", "--pdeathsig", "KILL", *_NAMESPACES, *_FIRST, *command], cwd=ROOT).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def give_address() -> None:
    """Give the network of the namespaces an address. With none but that of loopback, the C library finds no names."""
    for words in (["address", "add", f"{ADDRESS}/32", "dev", "lo"], ["link", "set", "lo", "up"]):
        subprocess.run(["ip", *words], check=True)

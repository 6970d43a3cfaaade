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
_CGROUPS = Path("/sys/fs/cgroup")
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
        for cgroup in _cgroups(Path(folder)):
            for parent, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(parent)
        shutil.rmtree(folder, ignore_errors=True)


def give_address() -> None:
    """Give the network of the namespaces an address. With none but that of loopback, the C library finds no names."""
    for words in (["address", "add", f"{ADDRESS}/32", "dev", "lo"], ["link", "set", "lo", "up"]):
        subprocess.run(["ip", *words], check=True)


def make_cgroup(folder: Path) -> str:
    """Make a cgroup for what the namespaces with this directory start, which is removed with them; return its path."""
    for controller in (_CGROUPS, *_CGROUPS.iterdir()):
        if (controller / "cgroup.procs").exists():
            (controller / folder.name).mkdir(exist_ok=True)
            # By default a cgroup gets as much of a busy machine as a single process outside.
            for file, share in (("cpu.shares", "8192"), ("cpu.weight", "800")):
                if (controller / folder.name / file).exists():
                    (controller / folder.name / file).write_text(share)
    return f"/{folder.name}"


def _cgroups(folder: Path) -> list[Path]:
    """That cgroup, once for each hierarchy."""
    return [*_CGROUPS.glob(folder.name), *_CGROUPS.glob(f"*/{folder.name}")]

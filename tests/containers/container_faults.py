"""Faults of containers, by the engine and by the host: each lasts for a block, and is over after it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.containers.compose_run import ContainedRun, docker
from tests.support.waiting import eventually

SLOW = ("tbf", "rate", "512kbit", "burst", "16kb", "latency", "200ms")
"""A container sends 64 KiB/s, and beyond a queue of 0.2 s it loses. Kernels without netem have this, too."""


def running(run: ContainedRun, service: str) -> dict[str, Any]:
    """State of a service's container once it runs; it may just be restarting because of another one's fault."""

    def state() -> dict[str, Any] | None:
        now = run.inspect(service)
        return now if now["State"]["Running"] and now["State"]["Pid"] else None

    return eventually(state, 60, f"{service} to run", every_s=0.5)


@contextmanager
def killed(run: ContainedRun, service: str) -> Iterator[None]:
    """The engine kills the container, does not restart it, and starts it after the block."""
    container = running(run, service)["Id"]
    docker("kill", container)
    yield
    docker("start", container)


@contextmanager
def crashed(run: ContainedRun, service: str) -> Iterator[None]:
    """The host kills the container's process; the engine starts the container again by its policy."""
    state = running(run, service)
    os.kill(state["State"]["Pid"], signal.SIGKILL)
    yield
    eventually(lambda: run.inspect(service)["RestartCount"] > state["RestartCount"], 60, f"{service} to be restarted")


@contextmanager
def paused(run: ContainedRun, service: str) -> Iterator[None]:
    """The container's processes are paused."""
    container = running(run, service)["Id"]
    docker("pause", container)
    yield
    docker("unpause", container)


@contextmanager
def restarted(run: ContainedRun, service: str) -> Iterator[None]:
    """The container is stopped within its grace period, and started again."""
    docker("restart", running(run, service)["Id"])
    yield


@contextmanager
def cut(run: ContainedRun, service: str) -> Iterator[None]:
    """The container has no network; after the block it has its name again, perhaps at another address."""
    state = running(run, service)
    [network] = state["NetworkSettings"]["Networks"]
    docker("network", "disconnect", network, state["Id"])
    yield
    docker("network", "connect", "--alias", service, network, state["Id"])


@contextmanager
def slowed(run: ContainedRun, service: str) -> Iterator[None]:
    """The container can send little, and loses some of it."""
    pid = running(run, service)["State"]["Pid"]
    _in_network(pid, "tc", "qdisc", "add", "dev", "eth0", "root", *SLOW)
    yield
    if run.inspect(service)["State"]["Pid"] == pid:
        _in_network(pid, "tc", "qdisc", "del", "dev", "eth0", "root")


FAULTS: dict[str, Callable[[ContainedRun, str], AbstractContextManager[None]]] = {
    "kill": killed,
    "crash": crashed,
    "pause": paused,
    "restart": restarted,
    "cut": cut,
    "slow": slowed,
}


def _in_network(pid: int, *command: str) -> None:
    """Run a program of the host in the network of a container."""
    answer = subprocess.run(["nsenter", "--target", str(pid), "--net", *command], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


@contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Path]:
    """A file system of its own, all of which user 1000 may fill."""
    if os.geteuid() != 0:
        pytest.fail("only root mounts a disk of its own: run this test as root, or deselect it by name", pytrace=False)
    file, place = folder / "disk.img", folder / "disk"
    place.mkdir()
    with file.open("wb") as image:
        image.truncate(size_mib * 2**20)
    options = ("-m", "0", "-E", "root_owner=1000:1000", "-O", "^has_journal")
    subprocess.run(["mkfs.ext4", "-q", *options, file], check=True)
    subprocess.run(["mount", "-o", "loop", file, place], check=True)
    try:
        # Kafka refuses a directory whose name is not that of a partition.
        shutil.rmtree(place / "lost+found")
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """A file fills a disk except for 256 KiB; it is gone after the block."""
    ballast = disk / "ballast"
    room = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, room.f_bavail * room.f_frsize - 256 * 1024))
    yield
    ballast.unlink()

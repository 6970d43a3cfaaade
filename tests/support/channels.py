"""Channels between the processes of a learner, without JAX: in one process for threads, in a directory for several."""

import threading
import time
from pathlib import Path

from rollstream.topics.errors import DeadlineExceeded


class MemoryChannel:
    """One side of a channel between threads; `memory_channels` makes them."""

    def __init__(self, process: int, processes: int, values: dict[str, bytes], changed: threading.Condition) -> None:
        self.process, self.processes = process, processes
        self.values, self._changed = values, changed

    def publish(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, timeout_s):
                raise DeadlineExceeded(key)
            return self.values[key]

    def forget(self, key: str) -> None:
        with self._changed:
            del self.values[key]


def memory_channels(processes: int) -> list[MemoryChannel]:
    """The sides of all processes, the lead's first."""
    values: dict[str, bytes] = {}
    changed = threading.Condition()
    return [MemoryChannel(process, processes, values, changed) for process in range(processes)]


class DirectoryChannel:
    """One side of a channel between processes: a file for each key, in a directory that they share."""

    def __init__(self, directory: Path, process: int, processes: int) -> None:
        self.process, self.processes = process, processes
        self._directory, self._never = directory, threading.Event()

    def publish(self, key: str, value: bytes) -> None:
        unfinished = self._directory / f"unfinished-{self.process}"
        unfinished.write_bytes(value)
        unfinished.rename(self._path(key))

    def receive(self, key: str, timeout_s: float | None = None) -> bytes:
        deadline = time.monotonic() + (600 if timeout_s is None else timeout_s)
        while not self._path(key).exists():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(key)
            self._never.wait(0.01)
        return self._path(key).read_bytes()

    def forget(self, key: str) -> None:
        self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "-")

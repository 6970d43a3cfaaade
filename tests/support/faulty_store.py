"""A file system that somebody else registered with fsspec: faulty://, in memory, whose calls fail when a test wants."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

SLOW_DOWN, SHORT, HANG, OTHER_BYTES = "slow down", "short", "hang", "other bytes"


class FaultyFiles(AbstractFileSystem):  # type: ignore[misc]
    """Objects by path. A fault of `faults` strikes one call, and a fault of `always` every call that matches."""

    protocol = "faulty"
    objects: ClassVar[dict[str, tuple[bytes, float]]] = {}
    faults: ClassVar[dict[str, deque[str]]] = defaultdict(deque)
    """Faults of the calls to come, by a part of `CALL:PATH`; a call is read, write or list."""
    always: ClassVar[dict[str, str]] = {}
    """Faults of all calls, by a part of `CALL:PATH`."""
    calls: ClassVar[list[tuple[str, str]]] = []
    released: ClassVar[threading.Event]
    """Ends calls that hang."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, as there are no folders."""

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        """All objects below a path."""
        below = self._strip_protocol(path).rstrip("/") + "/"
        self._struck("list", below)
        names = sorted(name for name in list(self.objects) if name.startswith(below))
        return {name: self.info(name) for name in names} if detail else names

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Size and time."""
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        data, written = self.objects[path]
        return {"name": path, "size": len(data), "type": "file", "created": written}

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is such an object."""
        return self._strip_protocol(path) in self.objects

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Read an object."""
        path = self._strip_protocol(path)
        fault = self._struck("read", path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        data = self.objects[path][0]
        if fault == OTHER_BYTES:
            return bytes([data[0] ^ 1]) + data[1:]
        return data[: len(data) // 2] if fault == SHORT else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object."""
        path = self._strip_protocol(path)
        fault = self._struck("write", path)
        self.objects[path] = (bytes(value)[: len(value) // 2] if fault == SHORT else bytes(value), time.time())

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        del self.objects[self._strip_protocol(path)]

    def _struck(self, call: str, path: str) -> str:
        self.calls.append((call, path))
        made = f"{call}:{path}"
        waiting = next((queue for part, queue in list(self.faults.items()) if queue and part in made), None)
        fault = waiting.popleft() if waiting else next((f for part, f in self.always.items() if part in made), "")
        if fault == SLOW_DOWN:
            raise OSError("503 Slow Down, of https://somebody:password@store.example/bucket?signature=secret")
        if fault == HANG:
            self.released.wait(300)
        return fault


@contextmanager
def faulty_store() -> Iterator[type[FaultyFiles]]:
    """Register faulty:// in this process, empty and without faults."""
    fsspec.register_implementation("faulty", FaultyFiles, clobber=True)
    for held in (FaultyFiles.objects, FaultyFiles.faults, FaultyFiles.always, FaultyFiles.calls):
        held.clear()
    FaultyFiles.released = threading.Event()  # of the threads that there are now
    try:
        yield FaultyFiles
    finally:
        FaultyFiles.released.set()


def mistaken(*_: object) -> None:
    """A method with a mistake, in place of one of a store."""
    raise NameError("name 'stored' is not defined")

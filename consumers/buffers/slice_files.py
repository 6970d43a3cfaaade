"""The arrays of a slice buffer: for each a file of raw rows, little-endian, a ring that is written and memory-mapped.

A file is as long as the ring from the first, but takes no more space than was written. Writing goes through the
operating system, not the map: a full disk is an error there, and the end of the process here.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.episode_cuts import Leaves
from consumers.buffers.files import StoreError
from topics.arrays import dtype_name, dtype_of
from topics.errors import RecordError

_COPY_BYTES = 16 * 2**20
_SHORT = 4
"""Moves of fewer rows than this on average cost less as one look-up of single rows."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array: [T, *shape] of a dtype, in a file."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        """What it is, wherever it lies."""
        return self.path, self.dtype, self.shape

    @property
    def row_bytes(self) -> int:
        """Size of a step of it."""
        return dtype_of(self.dtype).itemsize * math.prod(self.shape)

    @classmethod
    def of_dict(cls, value: Mapping[str, Any]) -> "ArraySpec":
        """What `asdict` made. Raises KeyError, TypeError and RecordError for what is none."""
        spec = cls(path=value["path"], dtype=value["dtype"], shape=tuple(value["shape"]), file=value["file"])
        dtype_of(spec.dtype)
        return spec

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "shape": list(self.shape)}


def specs_of(leaves: Leaves, prefix: str) -> tuple[ArraySpec, ...]:
    """What an episode's arrays are, and files for them."""
    return tuple(
        ArraySpec(path=path, dtype=dtype_name(leaf.dtype), shape=leaf.shape[1:], file=f"{prefix}-{number:03}.bin")
        for number, (path, leaf) in enumerate(leaves.items())
    )


def check(specs: Sequence[ArraySpec], leaves: Leaves) -> None:
    """Raises RecordError naming every array that is missing, new, or of another dtype or shape than those stored."""
    known, found = {spec.path: spec for spec in specs}, []
    found += [f"{path!r} is missing" for path in known if path not in leaves]
    found += [f"{path!r} is not among those stored" for path in leaves if path not in known]
    for path in known.keys() & leaves.keys():
        spec, leaf = known[path], leaves[path]
        if (dtype_name(leaf.dtype), leaf.shape[1:]) != (spec.dtype, spec.shape):
            found.append(
                f"{path!r} is {dtype_name(leaf.dtype)} {list(leaf.shape[1:])} a step, stored is "
                f"{spec.dtype} {list(spec.shape)}"
            )
    if found:
        raise RecordError(f"arrays differ from those of the first episode: {'; '.join(sorted(found))}")


class RingFiles:
    """The files of some arrays, each `capacity` rows long. Row of a step: its counter modulo the capacity."""

    def __init__(
        self, directory: Path, specs: Sequence[ArraySpec], capacity: int, *, writable: bool, new: bool = False
    ) -> None:
        """Open them, or make them where they are `new`. Raises StoreError, also where one is not whole."""
        self.specs = tuple(specs)
        self.capacity = capacity
        self._directory = directory
        self._files: dict[str, int] = {}
        self._rings: dict[str, NDArray[Any]] = {}
        try:
            with self._failing("opened"):
                for spec in specs:
                    self._open(spec, writable, new)
        except BaseException:
            self.close()
            raise

    def _open(self, spec: ArraySpec, writable: bool, new: bool) -> None:
        path, size_bytes = self._directory / spec.file, spec.row_bytes * self.capacity
        mode = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT | os.O_EXCL if new else 0)
        descriptor = self._files[spec.path] = os.open(path, mode, 0o666)
        if new:
            os.ftruncate(descriptor, size_bytes)
        found = os.fstat(descriptor).st_size
        if found != size_bytes:
            raise StoreError(f"{path} has {found} bytes, not {size_bytes}; it is not whole, fill the buffer again")
        ring = np.memmap(path, dtype_of(spec.dtype), mode="r", shape=(self.capacity, *spec.shape))
        self._rings[spec.path] = np.asarray(ring)

    def write(self, at: int, pieces: Sequence[Leaves]) -> None:
        """Write steps from counter `at` on; no more than the capacity. Raises StoreError, with some of them written."""
        with self._failing("written"):
            for spec in self.specs:
                dtype = dtype_of(spec.dtype)
                arrays = [piece[spec.path].astype(dtype, copy=False) for piece in pieces]
                joined = np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
                row = at % self.capacity
                before_end = min(len(joined), self.capacity - row)
                _write_all(self._files[spec.path], joined[:before_end], row * spec.row_bytes)
                _write_all(self._files[spec.path], joined[before_end:], 0)

    def gather(self, path: str, moves: "Moves", rows: int) -> NDArray[Any]:
        """Rows of an array by where they lie, [rows, ...]; what no move fills is zero."""
        ring = self._rings[path]
        if moves.single is not None:
            return ring[moves.single]
        made = np.zeros if moves.filled < rows else np.empty
        out: NDArray[Any] = made((rows, *ring.shape[1:]), ring.dtype)
        for to, row, count in moves.spans:
            out[to : to + count] = ring[row : row + count]
        return out

    def copy_to(self, target: "RingFiles", low: int, head: int) -> None:
        """Write the steps from `low` to `head` to files of the same arrays. Raises StoreError."""
        for mine, theirs in zip(self.specs, target.specs, strict=True):
            at_once = max(1, _COPY_BYTES // mine.row_bytes)
            for at in range(low, head, at_once):
                count = min(at_once, head - at)
                moves = Moves([(0, at, count)], self.capacity, count)
                with target._failing("written"):
                    row = at % self.capacity
                    rows = self.gather(mine.path, moves, count)
                    before_end = min(count, self.capacity - row)
                    _write_all(target._files[theirs.path], rows[:before_end], row * mine.row_bytes)
                    _write_all(target._files[theirs.path], rows[before_end:], 0)

    def sync(self) -> None:
        """Have everything written on disk. Raises StoreError."""
        with self._failing("synced"):
            for descriptor in self._files.values():
                os.fsync(descriptor)

    def close(self) -> None:
        """Close the files; arrays that were returned stay."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._rings.clear()

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"arrays in {self._directory} cannot be {doing} ({error.strerror or error}); nothing of this is "
                "stored. Look at the space and the rights there, then try again"
            ) from error


class Moves:
    """Where rows come from and go to: cut where the ring ends; by single rows where spans are short."""

    def __init__(self, steps: Sequence[tuple[int, int, int]], capacity: int, rows: int) -> None:
        """Of (row it goes to, counter of the first step, how many), in the order of the rows they go to."""
        self.spans: list[tuple[int, int, int]] = []
        self.filled = 0
        for to, at, count in steps:
            row = at % capacity
            before_end = min(count, capacity - row)
            self.spans.append((to, row, before_end))
            if before_end < count:
                self.spans.append((to + before_end, 0, count - before_end))
            self.filled += count
        self.single: NDArray[np.int64] | None = None
        if self.filled == rows < _SHORT * len(self.spans):
            self.single = np.concatenate([np.arange(row, row + count) for _to, row, count in self.spans])


def _write_all(descriptor: int, rows: NDArray[Any], offset: int) -> None:
    if not len(rows):
        return
    data = rows.reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written

"""The arrays of a slice buffer: for each array a memory-mapped file of raw little-endian rows, used as a ring.

A file has the length of the whole ring from the start, but takes disk space only for written rows. Writes are system
calls and do not go through the map, because on a full disk a system call fails with an error, but a write to a map
kills the process.
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

from rollstream.consumers.buffers.slices.episode_cuts import Leaves
from rollstream.consumers.files.atomic_files import StoreError
from rollstream.topics.errors import RecordError
from rollstream.topics.records.array_layout import dtype_name, dtype_of

_COPY_BYTES = 16 * 2**20
_SHORT = 4
"""If moves have fewer rows than this on average, looking up single rows is cheaper."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One array: [T, *shape] of a dtype, in a file."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def kind(self) -> tuple[str, str, tuple[int, ...]]:
        """Path, dtype and shape, without the file."""
        return self.path, self.dtype, self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one step."""
        return dtype_of(self.dtype).itemsize * math.prod(self.shape)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "ArraySpec":
        """Create a spec from a dict of `as_dict`. Raises KeyError, TypeError or RecordError if it is not valid."""
        spec = cls(path=value["path"], dtype=value["dtype"], shape=tuple(value["shape"]), file=value["file"])
        texts = all(isinstance(text, str) for text in (spec.path, spec.dtype, spec.file))
        if not texts or any(type(size) is not int or size < 0 for size in spec.shape):
            raise TypeError(f"not an array: {spec}")
        dtype_of(spec.dtype)
        return spec

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {**asdict(self), "shape": list(self.shape)}


def specs_of(leaves: Leaves, prefix: str) -> tuple[ArraySpec, ...]:
    """Specs of an episode's arrays, with a file for each."""
    return tuple(
        ArraySpec(path=path, dtype=dtype_name(leaf.dtype), shape=leaf.shape[1:], file=f"{prefix}-{number:03}.bin")
        for number, (path, leaf) in enumerate(leaves.items())
    )


def check(specs: Sequence[ArraySpec], leaves: Leaves) -> None:
    """Raise RecordError naming every array that is missing, new, or of another dtype or shape than the stored one."""
    known = {spec.path: spec for spec in specs}
    differences = [f"{path!r} is missing" for path in known if path not in leaves]
    differences += [f"{path!r} is not stored" for path in leaves if path not in known]
    for path in known.keys() & leaves.keys():
        spec, leaf = known[path], leaves[path]
        if (dtype_name(leaf.dtype), leaf.shape[1:]) != (spec.dtype, spec.shape):
            differences.append(
                f"{path!r} is {dtype_name(leaf.dtype)} {list(leaf.shape[1:])} for each step, but "
                f"{spec.dtype} {list(spec.shape)} is stored"
            )
    if differences:
        raise RecordError(f"arrays differ from those of the first episode: {'; '.join(sorted(differences))}")


class RingFiles:
    """Files of arrays, each `capacity` rows long. The row of a step is its counter modulo the capacity."""

    def __init__(
        self, directory: Path, specs: Sequence[ArraySpec], capacity: int, *, writable: bool, new: bool = False
    ) -> None:
        """Open the files, or create them if they are `new`. Raises StoreError if that fails or a size is wrong."""
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
        actual_bytes = os.fstat(descriptor).st_size
        if actual_bytes != size_bytes:
            raise StoreError(f"{path} has {actual_bytes} bytes, not {size_bytes}; it is damaged, fill the buffer again")
        ring = np.memmap(path, dtype_of(spec.dtype), mode="r", shape=(self.capacity, *spec.shape))
        self._rings[spec.path] = np.asarray(ring)

    def write(self, at: int, pieces: Sequence[Leaves]) -> None:
        """Write at most `capacity` steps, from counter `at` on. Raises StoreError; some steps may be written then."""
        with self._failing("written"):
            for spec in self.specs:
                dtype = dtype_of(spec.dtype)
                arrays = [piece[spec.path].astype(dtype, copy=False) for piece in pieces]
                joined = np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
                row = at % self.capacity
                before_end = min(len(joined), self.capacity - row)
                _write_all(self._files[spec.path], joined[:before_end], row * spec.row_bytes)
                _write_all(self._files[spec.path], joined[before_end:], 0)

    def gather(self, path: str, moves: "RowMoves", rows: int) -> NDArray[Any]:
        """Return rows of an array, [rows, ...]; rows that no move fills are zero."""
        ring = self._rings[path]
        if moves.single is not None:
            return ring[moves.single]
        new_array = np.zeros if moves.filled < rows else np.empty
        out: NDArray[Any] = new_array((rows, *ring.shape[1:]), ring.dtype)
        for to, row, count in moves.spans:
            out[to : to + count] = ring[row : row + count]
        return out

    def copy_to(self, target: "RingFiles", low: int, head: int) -> None:
        """Copy the steps from `low` to `head` to other files of the same arrays. Raises StoreError."""
        for mine, theirs in zip(self.specs, target.specs, strict=True):
            at_once = max(1, _COPY_BYTES // mine.row_bytes)
            for at in range(low, head, at_once):
                count = min(at_once, head - at)
                moves = RowMoves([(0, at, count)], self.capacity, count)
                with target._failing("written"):
                    row = at % self.capacity
                    rows = self.gather(mine.path, moves, count)
                    before_end = min(count, self.capacity - row)
                    _write_all(target._files[theirs.path], rows[:before_end], row * mine.row_bytes)
                    _write_all(target._files[theirs.path], rows[before_end:], 0)

    def sync(self) -> None:
        """Write everything to disk. Raises StoreError."""
        with self._failing("synced"):
            for descriptor in self._files.values():
                os.fsync(descriptor)

    def close(self) -> None:
        """Close the files; arrays that were returned stay valid."""
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
                f"arrays in {self._directory} cannot be {doing} ({error.strerror or error}); nothing was stored. "
                "Check the free space and the permissions there, then try again"
            ) from error


class RowMoves:
    """Sources and targets of rows: spans, which do not cross the end of the ring, or single rows if spans are short."""

    def __init__(self, steps: Sequence[tuple[int, int, int]], capacity: int, rows: int) -> None:
        """`steps` has (target row, counter of the first step, number of steps), in the order of the target rows."""
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

"""Segments: files with rows of several arrays, which are appended and mapped for reading, but never overwritten.

Steps are numbered. A segment has the same number of steps in each file of a directory, so the number of a step tells
its file and row. A file has its full length from the start, but takes disk space only for written rows. Writes are
system calls and do not go through the map, because on a full disk a system call fails with an error, but a write to a
map kills the process.
"""

import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError, sync_directory
from rollstream.topics.records.arrays import dtype_name, dtype_of


class ArraySpec(NamedTuple):
    """One array of every item."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of one row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


Layout = tuple[ArraySpec, ...]
"""The arrays in the order of their paths."""


def layout_of(arrays: Mapping[str, NDArray[Any]], axes: int = 1) -> Layout:
    """Return the layout of arrays, whose first `axes` axes are not part of a row. Raises RecordError for object
    arrays."""
    return tuple(ArraySpec(path, dtype_name(arrays[path].dtype), arrays[path].shape[axes:]) for path in sorted(arrays))


def refuse_other(layout: Layout, other: Layout, what: str) -> None:
    """Raise RecordError, naming every array that differs, unless `other` equals `layout`."""
    if other == layout:
        return
    ours, theirs = ({spec.path: spec for spec in specs} for specs in (layout, other))
    differences = [f"{path} is missing" for path in ours if path not in theirs]
    differences += [f"{path} is new" for path in theirs if path not in ours]
    differences += [
        f"{path} has rows {spec.dtype} {list(spec.shape)} instead of {ours[path].dtype} {list(ours[path].shape)}"
        for path, spec in theirs.items()
        if path in ours and ours[path] != spec
    ]
    raise RecordError(
        f"{what} differs from what the buffer holds: {'; '.join(differences)}. Give it the same arrays, or use a "
        "separate buffer for each kind"
    )


def empty_rows(layout: Layout, count: int) -> dict[str, NDArray[Any]]:
    """Return uninitialised arrays of `count` rows."""
    return {spec.path: np.empty((count, *spec.shape), dtype_of(spec.dtype)) for spec in layout}


Arrays = Mapping[str, NDArray[Any]]
"""Arrays by path, all of one length."""
_COPY_BYTES = 16 * 2**20
_ALIGNMENT = 64
_SHORT = 4
"""If ranges have fewer rows than this on average, looking up single rows is cheaper."""


class SegmentGone(StoreError):
    """A segment is missing, or has another size."""


class _Column(NamedTuple):
    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int
    begin: int
    """First byte in a segment."""


class _Segment(NamedTuple):
    file: int
    """Descriptor."""
    arrays: dict[str, NDArray[Any]]


_Move = tuple[dict[str, NDArray[Any]], Any, Any]
"""Arrays of a segment, and rows of a sample and of these arrays."""


class SegmentFiles:
    """The segments of one series of steps, each with `rows` steps: {name}-{number}.rows in a directory."""

    def __init__(self, directory: Path, name: str, layout: Layout, rows: int, *, writable: bool = True) -> None:
        self.layout, self.rows = layout, rows
        self._directory, self._name, self._writable = directory, name, writable
        self._columns: list[_Column] = []
        self._size_bytes = 0
        for spec in self.layout:
            self._columns.append(_Column(spec.path, dtype_of(spec.dtype), spec.shape, spec.row_bytes, self._size_bytes))
            self._size_bytes += -(-spec.row_bytes * rows // _ALIGNMENT) * _ALIGNMENT
        self._segments: dict[int, _Segment] = {}
        weakref.finalize(self, _close, self._segments)
        self._unsynced: set[int] = set()

    def numbers(self, begin: int, end: int) -> range:
        """Numbers of the segments of the steps from `begin` to before `end`."""
        return range(begin // self.rows, -(-end // self.rows) if end > begin else begin // self.rows)

    def ranges(self, at: int, count: int) -> list[tuple[int, int, int]]:
        """Return the rows of `count` steps from step `at` on: (segment, first row, number of rows)."""
        ranges = []
        while count > 0:
            number, row = divmod(at, self.rows)
            taken = min(count, self.rows - row)
            ranges.append((number, row, taken))
            at, count = at + taken, count - taken
        return ranges

    def open(self, numbers: Iterable[int]) -> set[str]:
        """Open segments that were written, and return their names. Raises SegmentGone."""
        for number in numbers:
            self._segment(number)
        self._unsynced.update(self._segments)  # A killed writer may not have written them to disk.
        return {self._file_name(number) for number in self._segments}

    def write(self, at: int, pieces: Sequence[Arrays]) -> None:
        """Write the steps of pieces, one after another, from step `at` on. Raises StoreError; some steps may be written
        then."""
        with self._failing("written"):
            ranges = self.ranges(at, sum(len(next(iter(piece.values()))) for piece in pieces))
            files = [self._segment(number, new=True).file for number, _row, _count in ranges]
            self._unsynced.update(number for number, _row, _count in ranges)
            for path, dtype, _shape, row_bytes, begin in self._columns:
                arrays = [piece[path].astype(dtype, copy=False) for piece in pieces]
                joined = np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
                data = joined.reshape(-1).view(np.uint8).data
                for file, (_number, row, count) in zip(files, ranges, strict=True):
                    _write_all(file, data[: count * row_bytes], begin + row * row_bytes)
                    data = data[count * row_bytes :]

    def gather(self, steps: Sequence[tuple[int, int, int]], rows: int) -> dict[str, NDArray[Any]]:
        """Return [rows, ...] arrays by path, with zeros in rows that are not filled.

        `steps` has (target row, first step, number of steps), in the order of the target rows.
        """
        filled = sum(count for _to, _at, count in steps)
        moves = self._row_moves(steps) if rows < _SHORT * len(steps) else self._range_moves(steps)
        leaves = {}
        for path, dtype, shape, _row_bytes, _begin in self._columns:
            new_array = np.zeros if filled < rows else np.empty
            leaf: NDArray[Any] = new_array((rows, *shape), dtype)
            for arrays, targets, sources in moves:
                leaf[targets] = arrays[path][sources]
            leaves[path] = leaf
        return leaves

    def _range_moves(self, steps: Sequence[tuple[int, int, int]]) -> list[_Move]:
        moves = []
        for to, at, count in steps:
            for number, row, taken in self.ranges(at, count):
                moves.append((self._segment(number).arrays, slice(to, to + taken), slice(row, row + taken)))
                to += taken
        return moves

    def _row_moves(self, steps: Sequence[tuple[int, int, int]]) -> list[_Move]:
        to, at, counts = np.array(steps, np.int64).T
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers, rows = np.divmod(np.repeat(at, counts) + within, self.rows)
        targets = np.repeat(to, counts) + within
        chosen = [(number, numbers == number) for number in np.unique(numbers).tolist()]
        return [(self._segment(number).arrays, targets[own], rows[own]) for number, own in chosen]

    def pieces(self, begin: int, end: int) -> list[tuple[int, dict[str, NDArray[Any]]]]:
        """Return the steps from `begin` to before `end` as (first step, arrays); mapped, and valid after `drop`."""
        at_once = max(1, _COPY_BYTES // max(spec.row_bytes for spec in self.layout)) if self.layout else 1
        pieces = []
        for number, row, count in self.ranges(begin, end - begin):
            arrays = self._segment(number).arrays
            for first in range(row, row + count, at_once):
                last = min(first + at_once, row + count)
                pieces.append((number * self.rows + first, {path: array[first:last] for path, array in arrays.items()}))
        return pieces

    def below(self, begin: int) -> list[int]:
        """Numbers of the open segments whose steps are all before `begin`."""
        return [number for number in self._segments if (number + 1) * self.rows <= begin]

    def drop(self, numbers: Iterable[int]) -> None:
        """Close segments, and delete their files if this is the writer. Raises StoreError."""
        for number in numbers:
            os.close(self._segments.pop(number).file)
            self._unsynced.discard(number)
            if self._writable:
                with self._failing("deleted"):
                    (self._directory / self._file_name(number)).unlink(missing_ok=True)

    def sync(self) -> None:
        """Write everything to disk. Raises StoreError."""
        with self._failing("synced"):
            for number in sorted(self._unsynced):
                os.fsync(self._segments[number].file)
            if self._unsynced:
                sync_directory(self._directory)
        self._unsynced.clear()

    def close(self) -> None:
        """Close the files; arrays that were returned stay valid."""
        _close(self._segments)

    def _file_name(self, number: int) -> str:
        return f"{self._name}-{number}.rows"

    def _segment(self, number: int, *, new: bool = False) -> _Segment:
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = self._opened(self._directory / self._file_name(number), new)
        return segment

    def _opened(self, path: Path, new: bool) -> _Segment:
        with self._failing("opened"):
            mode = (os.O_RDWR if self._writable else os.O_RDONLY) | (os.O_CREAT if new else 0)
            try:
                file = os.open(path, mode, 0o666)
            except FileNotFoundError as error:
                raise SegmentGone(f"{path} is gone; the buffer is damaged, fill it again") from error
            if new:
                os.ftruncate(file, self._size_bytes)
            actual_bytes = os.fstat(file).st_size
            if actual_bytes != self._size_bytes:
                os.close(file)
                raise SegmentGone(
                    f"{path} has {actual_bytes} bytes, not {self._size_bytes}; it is damaged, fill the buffer again"
                )
            mapped = np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8)
        arrays = {}
        for name, dtype, shape, row_bytes, begin in self._columns:
            arrays[name] = mapped[begin : begin + row_bytes * self.rows].view(dtype).reshape(self.rows, *shape)
        return _Segment(file, arrays)

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"arrays in {self._directory} cannot be {doing} ({error.strerror or error}); nothing was stored. "
                "Check the free space and the permissions there, then try again"
            ) from error


def _close(segments: dict[int, _Segment]) -> None:
    while segments:
        os.close(segments.popitem()[1].file)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written

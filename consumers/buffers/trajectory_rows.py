"""A trajectory as rows, [T, B, ...] -> [T * B, ...], and what the rows of a buffer's trajectories have in common. Pure.

All trajectories of a buffer have the same arrays but for T and B, so that a sample of several is never torn or padded.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.files import StoreError
from topics.arrays import dtype_name, dtype_of
from topics.errors import RecordError
from topics.trajectories import BOOTSTRAPPED, Trajectory, aligned, examine

Rows = Mapping[str, NDArray[Any]]
"""Arrays [T * B, ...] by path; row t * B + b is step t of environment b."""


class Leaf(NamedTuple):
    """One array of every trajectory."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    """Of one row."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


Layout = tuple[Leaf, ...]
"""The arrays of a trajectory in the order of their paths."""


class Checked(NamedTuple):
    """A sound trajectory, taken apart."""

    trajectory: Trajectory
    arrays: dict[str, NDArray[Any]]
    """[T, B, ...] by path; those with bootstrap rows have more."""
    steps: int
    width: int
    layout: Layout

    @property
    def samples(self) -> int:
        """T * B."""
        return self.steps * self.width

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Fetched(NamedTuple):
    """The arrays of a trajectory that is not cached."""

    arrays: Mapping[str, NDArray[Any]]
    """[T, B, ...] by path."""
    mapped: bool
    """Whether they cost no memory."""


def checked(trajectory: Trajectory) -> Checked | None:
    """The parts of a trajectory, None where it has neither prev_logprobs nor rewards.

    Raises RecordError, naming all that is wrong, for one that is unsound; that of no environment may be nameless here.
    """
    named = trajectory if trajectory.environment else replace(trajectory, environment="-")
    leaves, found = examine(named)
    if found:
        raise RecordError(f"trajectory {trajectory.uid!r} of {trajectory.environment!r}: {'; '.join(found)}")
    shape = trajectory.shape
    if shape is None:
        return None
    arrays = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    return Checked(trajectory, arrays, *shape, layout_of(arrays))


def layout_of(arrays: Rows) -> Layout:
    """What arrays [T, B, ...] have in common with those of other T and B. Raises RecordError for objects."""
    return tuple(Leaf(path, dtype_name(arrays[path].dtype), arrays[path].shape[2:]) for path in sorted(arrays))


def refuse_other(layout: Layout, found: Layout, what: str) -> None:
    """Raise RecordError, naming every array that differs, unless `found` is `layout`."""
    if found == layout:
        return
    ours, theirs = ({leaf.path: leaf for leaf in leaves} for leaves in (layout, found))
    said = [f"{path} is missing" for path in ours if path not in theirs]
    said += [f"{path} is new" for path in theirs if path not in ours]
    said += [
        f"{path} has rows {leaf.dtype} {list(leaf.shape)} instead of {ours[path].dtype} {list(ours[path].shape)}"
        for path, leaf in theirs.items()
        if path in ours and ours[path] != leaf
    ]
    raise RecordError(
        f"{what} differs from the trajectories in the buffer: {'; '.join(said)}. Give it the same arrays, or keep "
        "trajectories of different kinds in buffers of their own"
    )


def refuse_foreign(arrays: Rows, layout: Layout, steps: int, width: int, what: str) -> None:
    """Raise StoreError for arrays of a file that are not those its index says."""
    try:
        refuse_other(layout, layout_of(arrays), what)
        for path, array in arrays.items():
            found = len(aligned(array, steps)) if path in BOOTSTRAPPED else len(array)
            if (found, array.shape[1]) != (steps, width):
                raise RecordError(f"{what} has {path} of {list(array.shape)}, and its index says {steps} by {width}")
    except RecordError as error:
        raise StoreError(f"{error}; restore it, or fill the buffer again") from error


def rows_of(arrays: Rows, steps: int) -> dict[str, NDArray[Any]]:
    """Arrays [T, B, ...] as rows, without bootstrap rows; views where numpy can."""
    found = {}
    for path, array in arrays.items():
        array = aligned(array, steps) if path in BOOTSTRAPPED else array
        found[path] = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return found


def bootstrapped(arrays: Rows, steps: int) -> dict[str, NDArray[Any]]:
    """The arrays that have bootstrap rows, copied: rows lack those."""
    return {path: arrays[path].copy() for path in BOOTSTRAPPED if path in arrays and len(arrays[path]) != steps}


def empty_rows(layout: Layout, count: int) -> dict[str, NDArray[Any]]:
    """Room for so many rows."""
    return {leaf.path: np.empty((count, *leaf.shape), dtype_of(leaf.dtype)) for leaf in layout}


def owned(array: NDArray[Any]) -> NDArray[Any]:
    """The array where nobody can change it (a view of bytes, as records have), else a copy of it."""
    root: Any = array
    while isinstance(root, np.ndarray) and not root.flags.writeable and root.base is not None:
        root = root.base
    return array if isinstance(root, bytes) else array.copy()

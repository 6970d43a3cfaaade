"""Pure functions for trajectories as rows, [T, B, ...] -> [T * B, ...], and the layout that they share in a buffer.

All trajectories of a buffer have the same arrays except for T and B, so a sample of several needs no padding.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.segments import Layout, layout_of, refuse_other
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.wire.trajectory_arrays import BOOTSTRAPPED, Trajectory, aligned, examine

Rows = Mapping[str, NDArray[Any]]
"""Arrays [T * B, ...] by path; row t * B + b is step t of environment b."""


class CheckedTrajectory(NamedTuple):
    """A valid trajectory with its flattened arrays and their layout."""

    trajectory: Trajectory
    arrays: dict[str, NDArray[Any]]
    """[T, B, ...] by path; arrays with bootstrap rows have more rows than T."""
    steps: int
    width: int
    layout: Layout

    @property
    def samples(self) -> int:
        """Number of samples, T * B."""
        return self.steps * self.width

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class FetchedArrays(NamedTuple):
    """The arrays of a trajectory that is not cached."""

    arrays: Mapping[str, NDArray[Any]]
    """[T, B, ...] by path."""
    mapped: bool
    """Whether the arrays are mapped pages of a file, which need no memory."""


def check_trajectory(trajectory: Trajectory) -> CheckedTrajectory | None:
    """Check and flatten a trajectory; return None if it has neither prev_logprobs nor rewards.

    Raises RecordError naming every problem of an invalid trajectory; its environment may be empty.
    """
    named = trajectory if trajectory.environment else replace(trajectory, environment="-")
    leaves, problems = examine(named)
    if problems:
        raise RecordError(f"trajectory {trajectory.uid!r} of {trajectory.environment!r}: {'; '.join(problems)}")
    shape = trajectory.shape
    if shape is None:
        return None
    arrays = {path: np.asarray(leaf) for path, leaf in leaves.items()}
    return CheckedTrajectory(trajectory, arrays, *shape, layout_of(arrays, 2))


def refuse_foreign(arrays: Rows, layout: Layout, steps: int, width: int, what: str) -> None:
    """Raise StoreError if the arrays of a file differ from its index entry."""
    try:
        refuse_other(layout, layout_of(arrays, 2), what)
        for path, array in arrays.items():
            length = len(aligned(array, steps)) if path in BOOTSTRAPPED else len(array)
            if (length, array.shape[1]) != (steps, width):
                raise RecordError(f"{what} has {path} of {list(array.shape)}, but its index has {steps} by {width}")
    except RecordError as error:
        raise StoreError(f"{error}; restore it, or fill the buffer again") from error


def rows_of(arrays: Rows, steps: int) -> dict[str, NDArray[Any]]:
    """Return arrays [T, B, ...] as rows, without bootstrap rows; views where possible."""
    rows = {}
    for path, array in arrays.items():
        array = aligned(array, steps) if path in BOOTSTRAPPED else array
        rows[path] = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return rows


def bootstrapped(arrays: Rows, steps: int) -> dict[str, NDArray[Any]]:
    """Return copies of the arrays that have bootstrap rows, because `rows_of` leaves these rows out."""
    return {path: arrays[path].copy() for path in BOOTSTRAPPED if path in arrays and len(arrays[path]) != steps}


def owned(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself if it cannot change (a view of bytes, as in records), else a copy."""
    root: Any = array
    while isinstance(root, np.ndarray) and not root.flags.writeable and root.base is not None:
        root = root.base
    return array if isinstance(root, bytes) else array.copy()

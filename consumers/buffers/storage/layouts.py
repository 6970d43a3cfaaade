"""Layouts: the arrays that every item of a buffer has, apart from their numbers of steps."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
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

"""Dtype names and byte layout of arrays, on the wire and on disk: little-endian, in C order.

Uses only numpy, and ml_dtypes for extension types (bfloat16, float8), which are written by name. Object and structured
dtypes are refused, because a reader could not verify what they contain.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError

_KINDS = "biufcSUmM"

RANK_LIMIT = 32
"""Largest number of dimensions of an array; every release of numpy supports it."""

SIZE_LIMIT = 2**31 - 1
"""Largest size of an array in bytes, which any process can index; a dimension of 0 counts as 1."""


def shape_problem(shape: Sequence[int], itemsize: int, size_bytes: int) -> str:
    """Return why an array of this shape cannot have `size_bytes` bytes; "" if it can."""
    if len(shape) > RANK_LIMIT:
        return f"it has {len(shape)} dimensions, and may have {RANK_LIMIT}"
    if min(shape, default=0) < 0:
        return "it has a negative dimension"
    room = itemsize
    for dimension in shape:
        room *= max(dimension, 1)
    if room > SIZE_LIMIT:
        return f"its dimensions span more than {SIZE_LIMIT} bytes"
    if (0 if 0 in shape else room) != size_bytes:
        return "bytes and shape do not agree"
    return ""


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return numpy's little-endian dtype string, or the name of an extension type (bfloat16).

    Raises RecordError for objects and structures.
    """
    if dtype.kind in _KINDS:
        return dtype.newbyteorder("<").str
    if dtype.kind == "V" and dtype.names is None and not dtype.name.startswith("void"):
        return dtype.name
    raise RecordError(
        f"an array of dtype {dtype} cannot be written; split structures into arrays, and turn objects into numbers"
    )


@lru_cache(maxsize=256)
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype with this name. Raises RecordError for an unsupported name, or if ml_dtypes is needed but not
    installed."""
    if name.startswith(("<", "|")):
        try:
            dtype = np.dtype(name)
        except Exception:  # numpy accepts many forms of names and raises many types of errors
            dtype = np.dtype(object)
        if dtype.kind in _KINDS and dtype.itemsize:
            return dtype
        raise RecordError(f"{name!r} is not a supported dtype")
    try:
        import ml_dtypes  # Adds bfloat16 and float8 to numpy; only arrays of these types need it.
    except ImportError as error:
        raise RecordError(f"arrays of dtype {name!r} need ml_dtypes; install ml-dtypes") from error
    extension = getattr(ml_dtypes, name, None)
    dtype = np.dtype(extension) if isinstance(extension, type) else np.dtype(object)
    if dtype.name == name:
        return dtype
    raise RecordError(f"{name!r} is not a supported dtype")


def little_endian_bytes(array: NDArray[Any]) -> bytes:
    """Return the array's bytes, little-endian and in C order."""
    return _little_endian(array).tobytes()


def little_endian_view(array: NDArray[Any]) -> memoryview:
    """Return the array's bytes, little-endian and in C order, without a copy if memory already has that layout."""
    if not array.nbytes:
        return memoryview(b"")
    flat: Any = np.ascontiguousarray(_little_endian(array)).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "V":
        return array
    return array.astype(array.dtype.newbyteorder("<"), copy=False)

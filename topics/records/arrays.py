"""The arrays in records: types, equality, dtype names and byte layout (little-endian, in C order).

Uses only numpy, and ml_dtypes for extension types (bfloat16, float8), which are written by name. Object and structured
dtypes are refused, because a reader could not verify what they contain.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError


def same(a: object, b: object) -> bool:
    """Return whether two records, or values within them, are equal: dtype, shape and bits of arrays included."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b


_KINDS = "biufcSUmM"

RANK_LIMIT = 32
"""Largest number of dimensions of an array; every release of numpy supports it."""

SIZE_LIMIT = 2**31 - 1
"""Largest size of an array in bytes, which any process can index; a dimension of 0 counts as 1."""


def shape_problem(shape: Sequence[int], itemsize: int, size_bytes: int | None) -> str:
    """Return why an array of this shape cannot have `size_bytes` bytes, or any number if it is None; "" if it can."""
    if len(shape) > RANK_LIMIT:
        return f"it has {len(shape)} dimensions, and may have {RANK_LIMIT}"
    if min(shape, default=0) < 0:
        return "it has a negative dimension"
    room = itemsize
    for dimension in shape:
        room *= max(dimension, 1)
    if room > SIZE_LIMIT:
        return f"its dimensions span more than {SIZE_LIMIT} bytes"
    if size_bytes is not None and (0 if 0 in shape else room) != size_bytes:
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


STORED_NAME = re.compile(r"[0-9]{8}/[0-9a-f]{64}")
"""Names of objects that hold arrays: day and BLAKE3."""
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


def _empty(dtype: str) -> Any:
    array = np.empty(0, dtype)
    array.flags.writeable = False
    return array


NO_FLOATS: Float32 = _empty("<f4")
NO_OFFSETS: Int64 = _empty("<i8")
NO_TIMES: Float64 = _empty("<f8")


@dataclass(frozen=True, kw_only=True)
class NamedArray:
    """An array of any dtype and shape within a record, or in a store and named by a record."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""
    stored: str = ""
    """Name of the object that holds the bytes, such as 20261130/5f36...: the day it was written, UTC, and the BLAKE3 of
    the bytes. Then `data` is empty."""

    @property
    def record_bytes(self) -> int:
        """Number of bytes in the record: of the array, or of the name of its object."""
        return len(self.data) + len(self.stored)

    @classmethod
    def of(cls, array: NDArray[Any]) -> "NamedArray":
        """Wrap an array; its bytes become little-endian and C-contiguous. Raises RecordError as `dtype_name` does."""
        return cls(dtype=dtype_name(array.dtype), shape=array.shape, data=little_endian_bytes(array))

    def array(self) -> NDArray[Any]:
        """Return the array as a read-only view.

        Raises RecordError if bytes, dtype and shape do not agree, if the array exceeds the limits of
        rollstream.topics.records.arrays, or if its bytes lie in a store.
        """
        if self.stored:
            raise RecordError(f"the bytes of an array are object {self.stored}; read them with StoredArrays.load")
        dtype = dtype_of(self.dtype)
        if problem := shape_problem(self.shape, dtype.itemsize, len(self.data)):
            size = f"{str(self.shape)[:200]} and dtype {self.dtype[:64]} has {len(self.data)} bytes"
            raise RecordError(f"an array of shape {size}: {problem}")
        return np.frombuffer(self.data, dtype).reshape(self.shape)

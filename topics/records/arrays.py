"""Types of the arrays in records, empty arrays for their defaults, and arrays of any dtype and shape."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.records.array_layout import dtype_name, dtype_of, little_endian_bytes, shape_problem

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
    """An array of any dtype and shape within a record."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "NamedArray":
        """Wrap an array; its bytes become little-endian and C-contiguous. Raises RecordError as `dtype_name` does."""
        return cls(dtype=dtype_name(array.dtype), shape=array.shape, data=little_endian_bytes(array))

    def array(self) -> NDArray[Any]:
        """Return the array as a read-only view.

        Raises RecordError if bytes, dtype and shape do not agree, or if the array exceeds the limits of
        rollstream.topics.records.array_layout.
        """
        dtype = dtype_of(self.dtype)
        if problem := shape_problem(self.shape, dtype.itemsize, len(self.data)):
            size = f"{str(self.shape)[:200]} and dtype {self.dtype[:64]} has {len(self.data)} bytes"
            raise RecordError(f"an array of shape {size}: {problem}")
        return np.frombuffer(self.data, dtype).reshape(self.shape)

"""Safetensors files as numpy arrays, bfloat16 included: read as views of the file, written completely or not at all.

The format: https://github.com/huggingface/safetensors#format. A view reads only the parts that are accessed.
"""

import json
import math
import mmap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.files.atomic_files import replacing
from rollstream.topics.errors import RollstreamError

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000


class CheckpointRefused(RollstreamError):
    """The files of a Hugging Face checkpoint are incomplete, damaged, or do not belong to the model that their
    config.json names."""


@cache
def dtypes() -> dict[str, np.dtype[Any]]:
    """Dtypes of parameters, by their names in the format."""
    # Imported here because tools that read no tensors may lack ml_dtypes, which is installed with JAX.
    import ml_dtypes

    return {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
    }


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Read-only views of all tensors of a file, by name. Raises CheckpointRefused if it is unreadable or damaged."""
    try:
        data = np.memmap(path, np.uint8, "r")
        length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
        if length > min(_MOST_HEADER_BYTES, len(data) - _LENGTH_BYTES):
            raise ValueError(f"its header would be {length} bytes")
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        header.pop("__metadata__", None)
        body = data[_LENGTH_BYTES + length :]
        return {name: _view(body, name, **entry) for name, entry in header.items()}
    except OSError as error:
        raise CheckpointRefused(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointRefused(f"{path} is not an intact safetensors file ({error}); fetch it again") from error


def _view(
    body: NDArray[np.uint8], name: str, *, dtype: str, shape: list[int], data_offsets: tuple[int, int]
) -> NDArray[Any]:
    begin, end = data_offsets
    known = dtypes()
    if dtype not in known:
        raise ValueError(f"{name} is {dtype}, not one of {', '.join(known)}")
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(body):
        raise ValueError(f"{name} of shape {shape} lies at {begin} to {end} of {len(body)} bytes")
    if end - begin != math.prod(shape) * known[dtype].itemsize:
        raise ValueError(f"{name} of shape {shape} and dtype {dtype} has {end - begin} bytes")
    return body[begin:end].view(known[dtype]).reshape(shape)


def release(view: NDArray[Any]) -> None:
    """Return the memory of a view to the system; the next access reads the file again."""
    file: Any = view
    while isinstance(file.base, np.ndarray):
        file = file.base
    begin = view.ctypes.data - file.ctypes.data
    first = begin - begin % mmap.PAGESIZE
    file.base.madvise(mmap.MADV_DONTNEED, first, begin + view.nbytes - first)


class Storable(Protocol):
    """A tensor that can be written: a numpy array, or an object that converts to one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def nbytes(self) -> int: ...

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]: ...


def write(path: Path, tensors: Mapping[str, Storable]) -> None:
    """Write a file atomically, one tensor at a time. Raises CheckpointRefused for a dtype that is not in `dtypes`, and
    StoreError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _name(name, tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)

    with replacing(path) as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        for name, tensor in tensors.items():
            file.write(np.ascontiguousarray(tensor, dtypes()[_name(name, tensor.dtype)]).tobytes())


def _name(tensor: str, dtype: np.dtype[Any]) -> str:
    for name, known in dtypes().items():
        if dtype.newbyteorder("<") == known:
            return name
    raise CheckpointRefused(f"{tensor} is {dtype}; a checkpoint's tensors are {', '.join(map(str, dtypes().values()))}")

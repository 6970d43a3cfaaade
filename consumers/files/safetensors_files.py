"""Safetensors files as numpy arrays, bfloat16 included: read as views of the file, written completely or not at all.

A view reads only the parts that are accessed. The library would hold a whole file in memory to write it, and copies
what it reads, so only its check of headers is used: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rollstream.topics.errors import RollstreamError
from rollstream.topics.files.atomic_files import replacing

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of parameters, by their names in the format."""
_LENGTH_BYTES = 8


class CheckpointRefused(RollstreamError):
    """The files of a Hugging Face checkpoint are incomplete, damaged, or do not belong to the model that their
    config.json names."""


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Read-only views of all tensors of a file, by name. Raises CheckpointRefused if it is unreadable or damaged."""
    try:
        with safe_open(path, "np") as file:
            tensors = [(name, file.get_slice(name)) for name in file.offset_keys()]
            entries = [(name, tensor.get_dtype(), tensor.get_shape()) for name, tensor in tensors]
        for name, dtype, _shape in entries:
            if dtype not in DTYPES:
                raise ValueError(f"{name} is {dtype}, not one of {', '.join(DTYPES)}")
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise CheckpointRefused(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointRefused(f"{path} is not an intact safetensors file ({error}); fetch it again") from error
    # get_tensor copies; but tensors lie one behind the other up to the end of the file, which safe_open has checked.
    views: dict[str, NDArray[Any]] = {}
    end = len(data)
    for name, dtype, shape in reversed(entries):
        begin = end - math.prod(shape) * DTYPES[dtype].itemsize
        views[name] = data[begin:end].view(DTYPES[dtype]).reshape(shape)
        end = begin
    return views


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
    """Write a file atomically, one tensor at a time. Raises CheckpointRefused for a dtype that is not in `DTYPES`, and
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
            file.write(np.ascontiguousarray(tensor, DTYPES[_name(name, tensor.dtype)]).tobytes())


def _name(tensor: str, dtype: np.dtype[Any]) -> str:
    for name, known in DTYPES.items():
        if dtype.newbyteorder("<") == known:
            return name
    raise CheckpointRefused(f"{tensor} is {dtype}; a checkpoint's tensors are {', '.join(map(str, DTYPES.values()))}")

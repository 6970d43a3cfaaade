"""Trajectories as .npz files whose arrays have the same layout as in memory: rows of a mapped file are gathered without
reading other rows, loading runs no code, and `numpy.load` can read the files too.

The first member, trajectory.json, describes the trajectory and the start of each array. Members are stored without
compression (APPNOTE.TXT of the zip format), and data begins at multiples of 64 bytes.
"""

import io
import json
import math
import mmap
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records.arrays import dtype_name, dtype_of

ABOUT = "trajectory.json"
_ALIGNMENT = 64
_LIMIT = 2**32 - 1
_SPARE = 2**27
"""Space for headers and names, in bytes."""
_NAME_LIMIT = 2**16 - 1
_UTF8 = 0x800
_JAN_1980 = 0x21
_PADDING_ID = 0xD935
"""Id of the extra field used as padding, as in zipalign."""
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")


class UnsoundFile(StoreError, RecordError):
    """A file does not contain a complete trajectory."""


def check(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise RecordError if arrays exceed the limits of a file: 3.87 GiB, 65,534 arrays, and names of 65,535 bytes."""
    size = sum(array.nbytes for array in arrays.values())
    if size > _LIMIT - _SPARE or len(arrays) > 2**16 - 2:
        raise RecordError(f"a trajectory of {size:,} bytes in {len(arrays)} arrays is too large for one file; split it")
    for path in arrays:
        try:
            size = len(_member_name(path))
        except UnicodeEncodeError as error:
            raise RecordError(f"the array {path[:80]!r} has a name that is not Unicode ({error}); rename it") from error
        if size > _NAME_LIMIT:
            raise RecordError(
                f"the array {path[:80]!r} has a path of {size:,} bytes, and a file may have {_NAME_LIMIT:,}; shorten it"
            )


def write(file: BinaryIO, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a checked trajectory: `about` is JSON, the arrays are [T, B, ...] by path."""
    members = [(_member_name(path), *_npy(array)) for path, array in arrays.items()]
    places, position = [], 0
    for name, header, data in members:
        position = _aligned(position + _LOCAL.size + len(name) + 4) + len(header)
        places.append(position)
        position += data.nbytes
    listed = [
        [path, dtype_name(array.dtype), list(array.shape), place]
        for (path, array), place in zip(arrays.items(), places, strict=True)
    ]
    text = json.dumps({"version": 1, "about": about, "arrays": listed, "end": position}, ensure_ascii=False).encode()
    begin = _LOCAL.size + len(ABOUT)
    # Array offsets count from the end of the text, so it is padded to a multiple of 64 to keep arrays aligned.
    text = text.ljust(_aligned(begin + len(text)) - begin)
    directory = [_member(file, ABOUT.encode(), 0, 0, text)]
    at = begin + len(text)
    for (name, header, data), place in zip(members, places, strict=True):
        padding = begin + len(text) + place - len(header) - at - _LOCAL.size - len(name)
        directory.append(_member(file, name, at, padding, header, data))
        at = begin + len(text) + place + data.nbytes
    listing = b"".join(directory)
    file.write(listing)
    file.write(_END.pack(b"PK\5\6", 0, 0, len(directory), len(directory), len(listing), at, 0))


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a trajectory that `write` wrote; arrays are read-only views of the mapped file, loaded from disk on access.

    Raises FileNotFoundError, or UnsoundFile if the file has another format or is incomplete.
    """
    with open(path, "rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            head = _LOCAL.unpack_from(mapped)
            begin = _LOCAL.size + head[9] + head[10]
            end = begin + head[8]
            if head[0] != b"PK\3\4" or mapped[_LOCAL.size : _LOCAL.size + head[9]] != ABOUT.encode():
                raise ValueError(f"its first member is not {ABOUT}")
            header = json.loads(mapped[begin:end])
            if len(mapped) < end + header["end"] + _END.size:
                raise ValueError(f"it has {len(mapped)} bytes; it must have more than {end + header['end']}")
            arrays = {}
            for name, dtype, shape, place in header["arrays"]:
                if not isinstance(name, str):
                    raise ValueError(f"an array is named {name!r}; a name must be a text")
                kind = dtype_of(dtype)
                count = math.prod(shape)
                if min(shape, default=0) < 0 or not 0 <= place <= header["end"] - count * kind.itemsize:
                    raise ValueError(f"array {name!r} of shape {shape} at byte {place} is not within the file")
                arrays[name] = np.frombuffer(mapped, kind, count, end + place).reshape(shape)
            return dict(header["about"]), arrays
        except (
            *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error),
            RecordError,
        ) as error:
            raise UnsoundFile(
                f"{path} is not a complete trajectory ({error!r}); restore it, or fill the buffer again"
            ) from error


def _member_name(path: str) -> bytes:
    return f"{path}.npy".encode()


def _npy(array: NDArray[Any]) -> tuple[bytes, NDArray[np.uint8]]:
    """Return the header and bytes of an array in numpy's own format."""
    name = dtype_name(array.dtype)
    if name.startswith(("<", "|")):
        array = array.astype(np.dtype(name), copy=False)
    else:
        # numpy's files have no names for extension types; trajectory.json has them.
        name = f"|V{array.dtype.itemsize}"
    return _npy_header(name, array.shape), np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@lru_cache(maxsize=1024)
def _npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    return header.getvalue()


def _member(file: BinaryIO, name: bytes, at: int, padding: int, *pieces: Any) -> bytes:
    """Write a member at the end of the file, and return its entry of the central directory."""
    size = sum(len(piece) for piece in pieces)
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    extra = struct.pack("<2H", _PADDING_ID, padding - 4).ljust(padding, b"\0") if padding else b""
    file.write(_LOCAL.pack(b"PK\3\4", 20, _UTF8, 0, 0, _JAN_1980, crc, size, size, len(name), len(extra)))
    file.write(name + extra)
    for piece in pieces:
        file.write(piece)
    entry = _CENTRAL.pack(b"PK\1\2", 20, 20, _UTF8, 0, 0, _JAN_1980, crc, size, size, len(name), 0, 0, 0, 0, 0, at)
    return entry + name


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT

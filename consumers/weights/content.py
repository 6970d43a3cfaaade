"""The content of a policy version: dtype of its parameters, bytes, place of each tensor, and names of files of chunks.

Trained parameters are nearly random bits. Zstd saves a fifth of their bytes, but is no faster than a network. Therefore
the bytes of a version are compressed, at the lowest level, only if a sample of them shrinks by at least a quarter. No
I/O.

The name of a chunk's file contains the run, the version, the number of the chunk and the BLAKE3 of the bytes. Therefore
two publishers never write different bytes under one name, a file belongs to one version, and its bytes can be checked
against its name.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.files.atomic_files import UNFINISHED
from rollstream.topics.records import Tensor
from rollstream.topics.records.arrays import dtype_of

Arrays = Mapping[str, NDArray[Any]]
ZSTD = "zstd"
SAVING = 0.25
"""Share of the bytes that compression must save."""
_LEVEL = 1
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


class WeightsRefused(RollstreamError):
    """Bytes of a policy version do not match its manifest."""


class ChunksGone(RollstreamError):
    """Chunks that a manifest names no longer exist, and will not reappear."""


class ChunksLate(RollstreamError):
    """Chunks that a manifest names did not arrive in time, but may still arrive."""


class Content(NamedTuple):
    """The bytes of a version, and the place of each tensor in them."""

    tensors: tuple[Tensor, ...]
    views: tuple[memoryview, ...]
    """The bytes, in order. They share the memory of the arrays, which must not change before the bytes are sent."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the content."""
        return sum(map(len, self.views))


class NotCompressed(RollstreamError):
    """Bytes that do not decompress to content of the expected size."""


def compress(content: bytes) -> bytes:
    """Return the compressed content."""
    import zstandard  # Imported here, because followers of uncompressed versions do not need it.

    return zstandard.compress(content, _LEVEL)


def decompress(stored: bytes, content_bytes: int) -> bytes:
    """Return the content, in at most `content_bytes` bytes of memory. Raises NotCompressed if its size differs."""
    import zstandard

    try:
        # Without this check, the decompressor would allocate whatever size the frame declares.
        declared = zstandard.frame_content_size(stored)
        if declared not in (-1, content_bytes):
            raise NotCompressed(f"{len(stored)} bytes are zstd of {declared} bytes instead of {content_bytes}")
        content = zstandard.ZstdDecompressor().decompress(stored, max_output_size=content_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise NotCompressed(f"{len(stored)} bytes are not zstd of {content_bytes} bytes: {error}") from error
    if len(content) != content_bytes:
        raise NotCompressed(f"{len(stored)} bytes are zstd of {len(content)} bytes instead of {content_bytes}")
    return content


def pays(views: Sequence[memoryview]) -> bool:
    """Whether compression saves at least SAVING of a sample spread evenly over the bytes."""
    sample = _sample(views)
    return bool(sample) and len(compress(sample)) <= (1 - SAVING) * len(sample)


def _sample(views: Sequence[memoryview]) -> bytes:
    """Return at most _SAMPLES pieces of _SAMPLE_BYTES, at equal distances."""
    distance = max(_SAMPLE_BYTES, math.ceil(sum(map(len, views)) / _SAMPLES))
    pieces, begins, wanted = [], 0, 0
    for view in views:
        while wanted < begins + len(view):
            at = wanted - begins
            pieces.append(view[at : at + _SAMPLE_BYTES])
            wanted += distance
        begins += len(view)
    return b"".join(pieces)


_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME = re.compile(rf"(\d{{8,}})/(\d{{6,}})-([0-9a-f]{{64}})(\..*{re.escape(UNFINISHED)})?")


class ChunkFile(NamedTuple):
    """The parts of a name."""

    version: int
    chunk: int
    digest: str
    """BLAKE3 of the bytes as stored, hexadecimal."""
    whole: bool = True
    """False for a file that a killed publisher left half written, which nobody reads."""


def in_files(config: WeightsConfig, size_bytes: int) -> bool:
    """Whether the content of a version goes to files, given its size before compression."""
    if config.transport == "auto":
        return bool(config.url) and size_bytes > config.files_above_bytes
    return config.transport == "files"


def file_name(run: str, version: int, index: int, digest: str) -> str:
    """Return the name of a chunk's file, relative to learner.weights.url."""
    return f"{run}/{version:08d}/{index:06d}-{digest}"


def parsed(run: str, name: str) -> ChunkFile | None:
    """Return the parts of a name that `file_name` makes for the run, or of an unfinished file; None for others."""
    match = _NAME.fullmatch(name.removeprefix(f"{run}/")) if name.startswith(f"{run}/") else None
    return None if match is None else ChunkFile(int(match[1]), int(match[2]), match[3], match[4] is None)


def place_of(url: str) -> tuple[str, str]:
    """Return the URL of the store in which a file lies, and its name there."""
    root, *name = url.rsplit("/", 3)
    return root or "/", "/".join(name)


def root_of(run: str, url: str) -> str | None:
    """Return the URL of the store in which a file lies; None unless `file_name` makes the file's name for the run."""
    root, name = place_of(url)
    return None if parsed(run, name) is None else root


def folder_of(url: str) -> tuple[str, str] | None:
    """Return the URL of the store in which a file lies, and the run for which `file_name` makes the file's name; None
    if it makes the name for no run."""
    root, name = place_of(url)
    run = name.split("/")[0]
    return (root, run) if _RUN.fullmatch(run) and parsed(run, name) is not None else None


_FLOATS = {"float32": "<f4", "float16": "<f2", "bfloat16": "bfloat16"}


def converted(arrays: Mapping[str, NDArray[Any]], dtype: str) -> Mapping[str, NDArray[Any]]:
    """Return the parameters, with float64 and float32 arrays converted to `dtype`; the same mapping if none changes.

    Values are rounded to the nearest, ties to even. float64 becomes bfloat16 by way of float32, so such values are
    rounded twice.
    """
    wanted = dtype_of(_FLOATS[dtype])
    changing = {name for name, array in arrays.items() if array.dtype.kind == "f" and array.dtype.itemsize >= 4}
    changing = {name for name in changing if arrays[name].dtype != wanted}
    if not changing:
        return arrays
    # Values beyond the range of a float16 become infinite there, as in any engine that loads them.
    with np.errstate(over="ignore"):
        return {name: array.astype(wanted) if name in changing else array for name, array in arrays.items()}

"""The content of a policy version: its bytes before they are cut into chunks, and the place of each tensor in them.

Trained parameters are nearly random bits. Zstd saves a fifth of their bytes, but is no faster than a network.
Therefore the bytes of a version are compressed, at the lowest level, only if a sample of them shrinks by at least a
quarter. No I/O.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import Tensor

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

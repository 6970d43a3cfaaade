"""The content of a policy version: its bytes before they are cut into chunks, and the place of each tensor in them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import Tensor

Arrays = Mapping[str, NDArray[Any]]


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

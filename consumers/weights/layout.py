"""Layout of policy versions: arrays to chunks of bytes and back, with digests over chunks, tensors and the whole.

Bytes that do not match their digests are refused. Needs numpy; knows neither Kafka nor JAX.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.arrays import dtype_name, dtype_of, little_endian_bytes
from rollstream.topics.errors import RollstreamError
from rollstream.topics.params_digest import params_digest
from rollstream.topics.records import PolicyManifest, Tensor

Arrays = Mapping[str, NDArray[Any]]


class WeightsRefused(RollstreamError):
    """Bytes of a policy version do not match its manifest."""


def serialize(arrays: Arrays) -> tuple[bytes, tuple[Tensor, ...]]:
    """Return the bytes of all arrays in name order, and the position of each array in them."""
    parts, tensors, start = [], [], 0
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        part = little_endian_bytes(array)
        tensors.append(
            Tensor(
                name=name,
                dtype=dtype_name(array.dtype),
                shape=tuple(array.shape),
                start=start,
                size_bytes=len(part),
                digest=hashlib.sha256(part).hexdigest(),
            )
        )
        parts.append(part)
        start += len(part)
    return b"".join(parts), tuple(tensors)


def split(data: bytes, chunk_bytes: int) -> Iterator[bytes]:
    """Yield consecutive pieces of at most `chunk_bytes`; an empty version has one empty piece."""
    for start in range(0, max(len(data), 1), chunk_bytes):
        yield data[start : start + chunk_bytes]


def assemble(manifest: PolicyManifest, chunks: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a version from its chunks, in order; read-only views of one buffer.

    Raises WeightsRefused unless every chunk, every tensor and the whole match the manifest's digests.
    """
    for chunk, data in zip(manifest.chunks, chunks, strict=True):
        if len(data) != chunk.size_bytes or hashlib.sha256(data).hexdigest() != chunk.digest:
            raise WeightsRefused(f"chunk {chunk.index} of policy version {manifest.version} differs from its manifest")
    whole = memoryview(b"".join(chunks))
    arrays: dict[str, NDArray[Any]] = {}
    for tensor in manifest.tensors:
        dtype = dtype_of(tensor.dtype)
        if tensor.size_bytes != dtype.itemsize * math.prod(tensor.shape):
            raise WeightsRefused(f"tensor {tensor.name} of policy version {manifest.version} has no room for its shape")
        view = whole[tensor.start : tensor.start + tensor.size_bytes]
        if len(view) != tensor.size_bytes or hashlib.sha256(view).hexdigest() != tensor.digest:
            raise WeightsRefused(f"tensor {tensor.name} of policy version {manifest.version} differs from its manifest")
        arrays[tensor.name] = np.frombuffer(view, dtype).reshape(tensor.shape)
    if params_digest(arrays) != manifest.digest:
        raise WeightsRefused(f"policy version {manifest.version} as a whole differs from its manifest")
    return arrays

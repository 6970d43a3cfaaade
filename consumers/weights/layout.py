"""How the arrays of a policy version become chunks of bytes and arrays again, with digests over all of it (numpy only).

What cannot be proved equal to what was published is refused; nothing here knows Kafka or JAX.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topics.arrays import dtype_name, dtype_of, little_endian_bytes
from topics.errors import RollstreamError
from topics.records import PolicyManifest, Tensor

Arrays = Mapping[str, NDArray[Any]]


class WeightsRefused(RollstreamError):
    """Bytes of a policy version do not match its manifest."""


def params_digest(params: Mapping[str, Any]) -> str:
    """sha256, hexadecimal, over each parameter's name, dtype, shape and little-endian bytes in name order."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = np.asarray(params[name])
        digest.update(f"{name}\0{dtype_name(array.dtype)}\0{list(array.shape)}\0".encode())
        digest.update(little_endian_bytes(array))
    return digest.hexdigest()


def serialise(arrays: Arrays) -> tuple[bytes, tuple[Tensor, ...]]:
    """The bytes of all arrays in name order, and where each lies in them."""
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
    """Consecutive pieces of at most `chunk_bytes`; at least one, so that an empty version has a chunk too."""
    for start in range(0, max(len(data), 1), chunk_bytes):
        yield data[start : start + chunk_bytes]


def assemble(manifest: PolicyManifest, chunks: Sequence[bytes]) -> dict[str, NDArray[Any]]:
    """The arrays of a version from its chunks, in order; read-only views of one buffer.

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

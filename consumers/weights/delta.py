"""Deltas: places and new values of the elements of a version whose bits differ from the previous version.

The delta of a tensor holds the gaps between the places of its changed elements (int32, the first one counted from 0),
then the new values. Both are stored in byte planes, all first bytes before all second bytes, because zstd shrinks
planes that hardly vary. New values replace old values, so no bit pattern is special. This module only needs numpy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.content import Arrays, Content, WeightsRefused
from rollstream.topics.records import PolicyManifest, Tensor
from rollstream.topics.records.arrays import dtype_of, little_endian_view
from rollstream.topics.wire.params_digest import TensorDigest

LARGEST_SHARE = 0.5
"""A version is published in full if its delta exceeds this share of the full bytes, both before compression."""
_PLACE_BYTES = 4
_INDEXABLE = 2**31


def delta_content(
    before: Arrays, arrays: Arrays, digests: Sequence[TensorDigest], *, largest_share: float = LARGEST_SHARE
) -> Content | None:
    """Return the delta from `before` to `arrays`; None if the full version should be published.

    `digests` are the digests of `arrays`. A tensor whose delta would not be smaller than its bytes is included whole.
    """
    if before.keys() != arrays.keys():
        return None
    tensors, views, start = [], [], 0
    full_bytes = sum(array.nbytes for array in arrays.values())
    for name, dtype, shape, digest in digests:
        old, new = np.asarray(before[name]), np.asarray(arrays[name])
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            return None
        changed, parts = _difference(little_endian_view(old), little_endian_view(new), new.dtype.itemsize)
        size = sum(map(len, parts))
        tensors.append(
            Tensor(name=name, dtype=dtype, shape=shape, start=start, size_bytes=size, digest=digest, changed=changed)
        )
        views += parts
        start += size
        if start > largest_share * full_bytes:
            return None
    return Content(tuple(tensors), tuple(views))


def _difference(before: memoryview, after: memoryview, itemsize: int) -> tuple[int, list[memoryview]]:
    """Return the number of changed elements, with their places and values; or -1 with all bytes if those are fewer."""
    old, new = _elements(before, itemsize), _elements(after, itemsize)
    unlike = old != new
    places = np.flatnonzero(unlike if unlike.ndim == 1 else unlike.any(axis=1))
    if len(places) * (_PLACE_BYTES + itemsize) >= len(after) > 0 or len(new) >= _INDEXABLE:
        return -1, [after]
    gaps = np.diff(places, prepend=0).astype("<i4")
    return len(places), [_planes(gaps.view(np.uint8), _PLACE_BYTES), _planes(new[places].view(np.uint8), itemsize)]


def apply_delta(
    manifest: PolicyManifest, tensor: Tensor, data: memoryview, base: NDArray[Any], memory: ReusedMemory | None = None
) -> NDArray[Any]:
    """Return a tensor of the base with the changes in `data`, in `memory`.

    If there are none, this is the base itself, or a copy if the base keeps much more memory in use than it takes.
    Raises WeightsRefused if base and delta do not match.
    """
    dtype, memory = dtype_of(tensor.dtype), memory or ReusedMemory(0)
    if base.dtype != dtype or base.shape != tensor.shape:
        raise _refused(manifest, tensor, f"has another shape or dtype than in version {manifest.base}")
    if len(data) != tensor.changed * (_PLACE_BYTES + dtype.itemsize):
        raise _refused(manifest, tensor, "has too many or too few bytes for its changes")
    if not tensor.changed:
        return _apart(base, memory)
    end = tensor.changed * _PLACE_BYTES
    gaps = _from_planes(data[:end], _PLACE_BYTES).view("<i4").reshape(-1)
    places = np.cumsum(gaps, dtype=np.int64)
    if gaps[0] < 0 or (gaps[1:] <= 0).any() or places[-1] >= base.size:
        raise _refused(manifest, tensor, "has changes outside its elements")
    result = memory.copy_of(base)
    elements = _elements(memoryview(result.reshape(-1).view(np.uint8)), dtype.itemsize)  # type: ignore[arg-type]
    values = _from_planes(data[end:], dtype.itemsize)
    elements[places] = _elements(memoryview(values.reshape(-1)), dtype.itemsize)  # type: ignore[arg-type]
    result.flags.writeable = False
    return result


def _apart(array: NDArray[Any], memory: ReusedMemory) -> NDArray[Any]:
    """Return an array, or a copy if it takes less than half of the memory that it keeps in use.

    All tensors of a full version lie in one block, which a small tensor that never changes would keep for good.
    """
    kept: Any = array
    while isinstance(below := kept.obj if isinstance(kept, memoryview) else kept.base, memoryview | np.ndarray):
        kept = below
    if 2 * array.nbytes >= kept.nbytes:
        return array
    copy = memory.copy_of(array)
    copy.flags.writeable = False
    return copy


def _refused(manifest: PolicyManifest, tensor: Tensor, why: str) -> WeightsRefused:
    return WeightsRefused(f"tensor {tensor.name} of policy version {manifest.version} {why}")


def _elements(data: memoryview, itemsize: int) -> NDArray[Any]:
    """Return the bits of each element as an unsigned integer, or as a row of bytes if no integer has that size."""
    if itemsize in (1, 2, 4, 8):
        return np.frombuffer(data, f"<u{itemsize}")
    return np.frombuffer(data, np.uint8).reshape(-1, max(itemsize, 1))


def _planes(data: NDArray[np.uint8], itemsize: int) -> memoryview:
    planes: Any = np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)
    return memoryview(planes)


def _from_planes(data: memoryview, itemsize: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(itemsize, -1).T)

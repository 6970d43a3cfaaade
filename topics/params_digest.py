"""The digest that identifies parameters in memory, in manifests and in the steps of foreign trainers.

It is a tree of shards, tensors and the whole. Several threads can therefore read the bytes, each byte once, and a
changed tensor leaves the digests of all other tensors unchanged. The steps of our learner have the checksum of
params_checksum instead.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from rollstream.topics.arrays import dtype_name, little_endian_view

TREE = ".tree"
"""Suffix of these digests."""
SHARD_BYTES = 16 * 1024 * 1024
"""Size of the part of a tensor that one thread digests."""
_THREADS = min(8, os.cpu_count() or 1)


class TensorDigest(NamedTuple):
    """The identity of one parameter."""

    name: str
    dtype: str
    """Name of the dtype, as `dtype_name` gives it."""
    shape: tuple[int, ...]
    digest: str
    """sha256 of the little-endian bytes in hexadecimal, or of the digests of the shards if there are several."""


def params_digest(params: Mapping[str, Any]) -> str:
    """Digest of parameters over their names, dtypes, shapes and bytes, whatever their order and memory layout."""
    return tree_digest(tensor_digests(params))


def tensor_digests(params: Mapping[str, Any]) -> tuple[TensorDigest, ...]:
    """Digests of parameters, in name order, computed by several threads."""
    tensors = described(params)
    digests = bytes_digests([little_endian_view(np.asarray(params[tensor.name])) for tensor in tensors])
    return tuple(tensor._replace(digest=digest) for tensor, digest in zip(tensors, digests, strict=True))


def described(params: Mapping[str, Any]) -> tuple[TensorDigest, ...]:
    """Names, dtypes and shapes of parameters, in name order; their digests are left empty."""
    arrays = {name: np.asarray(params[name]) for name in sorted(params)}
    return tuple(TensorDigest(name, dtype_name(array.dtype), array.shape, "") for name, array in arrays.items())


def tree_digest(tensors: Iterable[TensorDigest]) -> str:
    """Digest of parameters whose own digests are known."""
    digest = hashlib.sha256()
    for name, dtype, shape, content in sorted(tensors):
        digest.update(f"{name}\0{dtype}\0{list(shape)}\0{content}\0".encode())
    return digest.hexdigest() + TREE


def bytes_digests(views: Iterable[memoryview]) -> list[str]:
    """Digests of tensors, in order: sha256 of the bytes, or of the digests of the shards if there are several."""
    shards = [[view[at : at + SHARD_BYTES] for at in range(0, len(view), SHARD_BYTES)] or [view] for view in views]
    flat = [shard for group in shards for shard in group]
    if sum(map(len, flat)) < SHARD_BYTES or _THREADS == 1:
        digests = [hashlib.sha256(shard).digest() for shard in flat]
    else:
        # hashlib releases the interpreter's lock while it digests.
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(lambda shard: hashlib.sha256(shard).digest(), flat))
    remaining = iter(digests)
    groups = [[next(remaining) for _ in group] for group in shards]
    return [digest_of_shards(group) for group in groups]


def digest_of_shards(digests: Sequence[bytes]) -> str:
    """Digest of a tensor from the digests of its shards, in order."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()

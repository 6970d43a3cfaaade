"""The digest that identifies parameters in memory, in manifests and in the steps of foreign trainers.

It is the BLAKE3 digest of a list of tensors, each with its own BLAKE3 digest, so a changed tensor leaves the digests of
all other tensors unchanged. The steps of our learner have the checksum of params_checksum instead.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from rollstream.topics.records.array_layout import dtype_name, little_endian_view

TREE = ".tree"
"""Suffix of these digests."""
LARGE_BYTES = 16 * 1024 * 1024
"""Size of parameters from which other threads digest them."""
_THREADS = min(8, os.cpu_count() or 1)


class TensorDigest(NamedTuple):
    """The identity of one parameter."""

    name: str
    dtype: str
    """Name of the dtype, as `dtype_name` gives it."""
    shape: tuple[int, ...]
    digest: str
    """BLAKE3 of the little-endian bytes, in hexadecimal."""


def params_digest(params: Mapping[str, Any]) -> str:
    """Digest of parameters over their names, dtypes, shapes and bytes, whatever their order and memory layout."""
    return tree_digest(tensor_digests(params))


def tensor_digests(params: Mapping[str, Any]) -> tuple[TensorDigest, ...]:
    """Digests of parameters, in name order, computed by several threads."""
    tensors = described(params)
    views = [little_endian_view(np.asarray(params[tensor.name])) for tensor in tensors]
    if sum(map(len, views)) < LARGE_BYTES:
        digests = list(map(_digest, views))
    else:
        # blake3 releases the interpreter's lock while it digests.
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(_digest, views))
    return tuple(tensor._replace(digest=digest) for tensor, digest in zip(tensors, digests, strict=True))


def described(params: Mapping[str, Any]) -> tuple[TensorDigest, ...]:
    """Names, dtypes and shapes of parameters, in name order; their digests are left empty."""
    arrays = {name: np.asarray(params[name]) for name in sorted(params)}
    return tuple(TensorDigest(name, dtype_name(array.dtype), array.shape, "") for name, array in arrays.items())


def tree_digest(tensors: Iterable[TensorDigest]) -> str:
    """Digest of parameters whose own digests are known."""
    rows = (f"{name}\0{dtype}\0{list(shape)}\0{content}\0" for name, dtype, shape, content in sorted(tensors))
    return blake3("".join(rows).encode()).hexdigest() + TREE


def _digest(view: memoryview) -> str:
    return blake3(view).hexdigest()

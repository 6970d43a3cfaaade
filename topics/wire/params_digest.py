"""What identifies parameters: a digest in manifests and in the steps of foreign trainers, a checksum in our own steps.

The digest is the BLAKE3 digest of a list of tensors, each with its own BLAKE3 digest, so a changed tensor leaves the
digests of all other tensors unchanged.

Our learner's devices compute the checksum, each over the part of the parameters that it holds. A tensor's checksum is
four sums, modulo 2**32, over its words: each sum adds a hash of every word and its place. Sums may be taken in any
order and in parts, so the result does not depend on how a tensor is sharded, and only sixteen bytes per tensor leave
the devices. It is an additive multiset hash (Clarke et al. 2003, "Incremental Multiset Hash Functions and Their
Application to Memory Integrity Checking") over pairs of place and word, with the mixer "lowbias32" (Wellons 2018,
"Prospecting for Hash Functions"). Tensors that differ in one word always have different checksums; tensors that differ
in several words have the same checksum with a probability of about 2**-128. The checksum detects faults, not forgeries;
the bytes that leave the learner are protected by BLAKE3.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollstream.topics.records.arrays import dtype_name, little_endian_view

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


CHECKSUM = ".checksum"
"""Suffix of digests that consist of these checksums."""
FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
"""Odd, so that no two words have the same product."""
OFFSETS = (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x165667B1)
WORD_BYTES = (1, 2, 4)
"""Sizes of values that form one word each; a value of eight bytes forms two words, the low word first."""
_AT_ONCE = 1 << 18

Words = Any
"""An array of uint32, of numpy or JAX."""


def mix(words: Words) -> Words:
    """Mix the bits of 32-bit words; different words stay different."""
    words = words ^ (words >> 16)
    words = words * np.uint32(0x7FEB352D)
    words = words ^ (words >> 15)
    words = words * np.uint32(0x846CA68B)
    return words ^ (words >> 16)


def terms(words: Words, places: Words) -> tuple[Words, ...]:
    """Return what each word adds to the four sums; `places` are the words' places, modulo 2**32."""
    mixed = mix(places)
    return tuple(
        mix((words * np.uint32(factor)) ^ (mixed + np.uint32(offset)))
        for factor, offset in zip(FACTORS, OFFSETS, strict=True)
    )


def tensor_checksum(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the checksum of one tensor: four integers below 2**32."""
    words = _words(array)
    sums = np.zeros(len(FACTORS), np.uint64)
    for at in range(0, len(words), _AT_ONCE):
        part = words[at : at + _AT_ONCE].astype(np.uint32)
        places = np.arange(at, at + len(part), dtype=np.uint64).astype(np.uint32)
        sums += np.array([term.sum(dtype=np.uint64) for term in terms(part, places)], np.uint64)
    return tuple(int(total) % 2**32 for total in sums)


def checksum_digest(tensors: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]) -> str:
    """Return the digest of parameters, given the dtype name, shape and checksum of each by name."""
    rows = (
        f"{name}\0{dtype}\0{list(shape)}\0{list(checksum)}\0"
        for name, (dtype, shape, checksum) in sorted(tensors.items())
    )
    return blake3("".join(rows).encode()).hexdigest() + CHECKSUM


def params_checksum(params: Mapping[str, Any]) -> str:
    """Return the digest of parameters that lie in this process's memory."""
    arrays = {name: np.asarray(value) for name, value in params.items()}
    return checksum_digest(
        {name: (dtype_name(array.dtype), array.shape, tensor_checksum(array)) for name, array in arrays.items()}
    )


def _words(array: NDArray[Any]) -> NDArray[Any]:
    """Return the words of a tensor, in C order, as unsigned integers of up to four bytes."""
    if array.dtype.kind != "V":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    size = array.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view("<u4" if size not in WORD_BYTES else f"<u{size}")

"""Layout of policy versions: from arrays to chunks of bytes and back, with digests of each tensor and of the whole.

Bytes that do not match their digests are refused. This module needs numpy, but neither Kafka nor JAX.
"""

import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.content import ZSTD, Arrays, Content, NotCompressed, WeightsRefused, decompress
from rollstream.consumers.weights.delta import apply_delta
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Chunk, PolicyManifest, Tensor
from rollstream.topics.records.arrays import dtype_of, little_endian_view
from rollstream.topics.wire.params_digest import LARGE_BYTES, TensorDigest, described, tensor_digests, tree_digest

_MOST_NAMED = 8
"""Maximum number of chunks that a message names one by one."""


def full_content(arrays: Arrays, digests: Sequence[TensorDigest] = ()) -> Content:
    """Return every byte of the arrays, in name order; `digests` is the result of `tensor_digests(arrays)`, if known."""
    tensors, views, start = [], [], 0
    for name, dtype, shape, digest in digests or described(arrays):
        view = little_endian_view(np.asarray(arrays[name]))
        tensors.append(Tensor(name=name, dtype=dtype, shape=shape, start=start, size_bytes=len(view), digest=digest))
        views.append(view)
        start += len(view)
    return Content(tuple(tensors), tuple(views))


def split(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[bytes]:
    """Yield consecutive pieces of `chunk_bytes`; the last may be shorter. No bytes give one empty piece.

    Only one piece is held at a time.
    """
    parts: list[memoryview] = []
    room = chunk_bytes
    pieces = 0
    for view in views:
        at = 0
        while at < len(view):
            parts.append(view[at : at + room])
            at += len(parts[-1])
            room -= len(parts[-1])
            if not room:
                yield b"".join(parts)
                parts, room, pieces = [], chunk_bytes, pieces + 1
    if parts or not pieces:
        yield b"".join(parts)


def assemble(
    manifest: PolicyManifest,
    chunks: Sequence[bytes],
    base: Mapping[str, NDArray[Any]] | None = None,
    *,
    checked: bool = True,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a version from its stored chunks, in order; read-only.

    `base` holds the arrays of the version to which a delta applies. If `checked`, raises WeightsRefused unless every
    tensor and the whole match the manifest's digests; otherwise, a later version of the chain must be checked.
    """
    buffer = ContentBuffer(manifest, checked=checked)
    for chunk, data in zip(manifest.chunks, chunks, strict=True):
        buffer.put(chunk, data)
    return buffer.arrays(base)


class ContentBuffer:
    """The content of one version, filled and digested as its chunks arrive, so that no chunk is held separately."""

    def __init__(self, manifest: PolicyManifest, *, checked: bool = True, memory: ReusedMemory | None = None) -> None:
        """`checked` is as in `assemble`; `memory` holds the arrays. Raises WeightsRefused if memory cannot hold the
        content."""
        self._manifest, self._checked, self._memory = manifest, checked, memory or ReusedMemory(0)
        self._places, end = places_of(manifest)
        try:
            self._data = memoryview(self._memory.lanes(1, end)[0])
        except MemoryError as error:
            raise WeightsRefused(f"policy version {manifest.version} needs {end} bytes of memory") from error
        whole = [tensor for tensor in manifest.tensors if tensor.changed < 0]
        self._digests = ArrivalDigests(whole, self._data) if checked and end >= LARGE_BYTES else None

    def put(self, chunk: Chunk, data: bytes) -> None:
        """Add a stored chunk. Raises WeightsRefused if it differs from the manifest."""
        content = content_of(self._manifest, chunk, data)
        start = self._places[chunk]
        self._data[start : start + len(content)] = content
        if self._digests is not None:
            self._digests.arrived(start, start + len(content))

    def arrays(self, base: Mapping[str, NDArray[Any]] | None = None) -> dict[str, NDArray[Any]]:
        """Return the arrays, read-only views of the content, once all chunks are added; see `assemble`."""
        content, base = self._data.toreadonly(), base or {}
        arrays = {
            tensor.name: array_of(
                self._manifest,
                tensor,
                content[tensor.start : tensor.start + tensor.size_bytes],
                base.get(tensor.name),
                self._memory,
            )
            for tensor in self._manifest.tensors
        }
        if self._checked:
            digests_by_name = {} if self._digests is None else self._digests.result()
            check_digests(self._manifest, _completed(digests_by_name, arrays))
        return arrays


def places_of(manifest: PolicyManifest) -> tuple[dict[Chunk, int], int]:
    """Return where the content of each chunk begins in the content of the version, and where the last chunk ends."""
    places, end = {}, 0
    for chunk in manifest.chunks:
        places[chunk] = end
        end += max(0, chunk.content_bytes if chunk.codec else chunk.size_bytes)
    return places, end


def array_of(
    manifest: PolicyManifest,
    tensor: Tensor,
    view: memoryview,
    base: NDArray[Any] | None,
    memory: ReusedMemory | None = None,
) -> NDArray[Any]:
    """Return a tensor from its part of the content; `base` is the tensor before a delta, and `memory` holds the tensor
    after it. Raises WeightsRefused."""
    name = _named(manifest, tensor)
    dtype = known_dtype(manifest, tensor)
    if len(view) != tensor.size_bytes:
        raise WeightsRefused(f"{name} has too few bytes")
    if tensor.changed >= 0:
        if base is None:
            raise WeightsRefused(f"{name} is a delta on version {manifest.base}, which is missing")
        try:
            return apply_delta(manifest, tensor, view, base, memory)
        except WeightsRefused as error:
            raise WeightsRefused(f"{error}; {_lies(manifest, tensor)}") from error
        except MemoryError as error:
            raise WeightsRefused(f"{name} needs {base.nbytes} bytes of memory") from error
    if min(tensor.shape, default=0) < 0 or tensor.size_bytes != dtype.itemsize * math.prod(tensor.shape):
        raise WeightsRefused(f"{name} has too many or too few bytes for its shape")
    return np.frombuffer(view, dtype).reshape(tensor.shape)


def known_dtype(manifest: PolicyManifest, tensor: Tensor) -> np.dtype[Any]:
    """Return the dtype of a tensor. Raises WeightsRefused if it is not known here."""
    try:
        return dtype_of(tensor.dtype)
    except RecordError as error:
        raise WeightsRefused(f"{_named(manifest, tensor)}: {error}; or upgrade ml-dtypes and rollstream") from error


def content_of(manifest: PolicyManifest, chunk: Chunk, data: bytes) -> bytes:
    """Return the content of a stored chunk. Raises WeightsRefused if the chunk differs from the manifest."""
    differs = f"chunk {chunk.index} of policy version {manifest.version}, {_place(chunk)}, differs from its manifest: "
    if len(data) != chunk.size_bytes:
        raise WeightsRefused(f"{differs}it has {len(data)} bytes instead of {chunk.size_bytes}")
    if chunk.digest and blake3(data).hexdigest() != chunk.digest:
        raise WeightsRefused(f"{differs}its {len(data)} bytes have another digest")
    if not chunk.codec:
        return data
    if chunk.codec != ZSTD:
        raise WeightsRefused(
            f"chunk {chunk.index} of policy version {manifest.version} is compressed by {chunk.codec!r}, which this "
            "release does not know; upgrade rollstream"
        )
    try:
        return decompress(data, chunk.content_bytes)
    except NotCompressed as error:
        raise WeightsRefused(f"{differs}{error}") from error


def check_digests(manifest: PolicyManifest, digests: Iterable[TensorDigest]) -> None:
    """Raise WeightsRefused unless the digests of all tensors, and hence of the whole, match a manifest."""
    digests_by_name = {tensor.name: tensor for tensor in digests}
    for tensor in manifest.tensors:
        if digests_by_name[tensor.name].digest != tensor.digest:
            raise WeightsRefused(f"{_named(manifest, tensor)} differs from its manifest; {_lies(manifest, tensor)}")
    if tree_digest(digests_by_name.values()) != manifest.digest:
        raise WeightsRefused(f"policy version {manifest.version} as a whole differs from its manifest")


def _completed(digests_by_name: Mapping[str, str], arrays: Arrays) -> tuple[TensorDigest, ...]:
    """Return the digests of all arrays; unknown digests are computed."""
    missing = tensor_digests({name: array for name, array in arrays.items() if name not in digests_by_name})
    rest = described({name: array for name, array in arrays.items() if name in digests_by_name})
    return (*(tensor._replace(digest=digests_by_name[tensor.name]) for tensor in rest), *missing)


def _named(manifest: PolicyManifest, tensor: Tensor) -> str:
    return f"tensor {tensor.name} of policy version {manifest.version}"


def _place(chunk: Chunk) -> str:
    return chunk.url or f"offset {chunk.offset} of partition {chunk.partition}"


def _lies(manifest: PolicyManifest, tensor: Tensor) -> str:
    """Name the chunks that hold the bytes of a tensor or of its changes."""
    ends = itertools.accumulate(chunk.content_bytes if chunk.codec else chunk.size_bytes for chunk in manifest.chunks)
    begin, end = tensor.start, tensor.start + tensor.size_bytes
    chunks = [
        chunk
        for chunk, stop in zip(manifest.chunks, ends, strict=True)
        if begin < stop and stop - (chunk.content_bytes if chunk.codec else chunk.size_bytes) < end
    ]
    what = "its bytes are" if tensor.changed < 0 else f"its changes since version {manifest.base} are"
    places = [f"chunk {chunk.index} ({_place(chunk)})" for chunk in chunks]
    if len(places) > _MOST_NAMED:
        return f"{what} in {len(places)} chunks, from {places[0]} to {places[-1]}"
    return f"{what} in {', '.join(places)}" if places else "it has no bytes"


class ArrivalDigests:
    """Digests of tensors whose bytes one or several threads write into a content, each byte once."""

    def __init__(self, tensors: Iterable[Tensor], content: memoryview) -> None:
        """`tensors` are whole tensors in the content; a tensor that reaches beyond the content gets no digest."""
        self._content = content
        # Of several tensors of one name, the last counts, as in the arrays of a version.
        by_name = {tensor.name: tensor for tensor in tensors}.values()
        within = (t for t in by_name if t.start >= 0 and 0 < t.size_bytes <= len(content) - t.start)
        self._waiting = deque(sorted(within, key=lambda tensor: tensor.start))
        """Tensors without a digest. `_hash` has `_hash_bytes` bytes of the first."""
        self._hash, self._hash_bytes = blake3(), 0
        self._digests: dict[str, str] = {}
        # One thread digests faster than chunks arrive.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="digest-arrivals")
        self._lock = threading.Lock()
        self._complete_to = 0
        """End of the bytes that have arrived without a gap."""
        self._ahead: dict[int, int] = {}
        """Byte ranges that arrived after a gap: the end of each, by its beginning."""

    def arrived(self, begin: int, end: int) -> None:
        """Note that these bytes have arrived, and begin to digest the bytes that are now complete."""
        if begin == end:
            return
        with self._lock:
            self._ahead[begin] = end
            if begin != self._complete_to:
                return
            while (reached := self._ahead.pop(self._complete_to, None)) is not None:
                self._complete_to = reached
            self._pool.submit(self._digest, self._complete_to)

    def result(self) -> dict[str, str]:
        """Wait for the digests, and return the digests of the tensors that have arrived whole, by name."""
        self._pool.shutdown()
        return self._digests

    def _digest(self, complete_to: int) -> None:
        while self._waiting and (begin := self._waiting[0].start + self._hash_bytes) < complete_to:
            tensor = self._waiting[0]
            end = min(complete_to, tensor.start + tensor.size_bytes)
            self._hash.update(self._content[begin:end])
            self._hash_bytes += end - begin
            if self._hash_bytes == tensor.size_bytes:
                self._digests[tensor.name] = self._hash.hexdigest()
                self._waiting.popleft()
                self._hash, self._hash_bytes = blake3(), 0

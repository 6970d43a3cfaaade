"""Chains of policy versions, a full version and the deltas after it, loaded into memory or into temporary files.

A SpooledVersion is for tools that write a version to another place: memory holds only one tensor and its changes,
however large the model is.
"""

import os
import tempfile
import threading
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollstream.consumers.reused_memory import ReusedMemory
from rollstream.consumers.weights.content import Arrays, WeightsRefused
from rollstream.consumers.weights.fetcher import ChunkFetcher
from rollstream.consumers.weights.layout import (
    ContentBuffer,
    array_of,
    check_digests,
    content_of,
    known_dtype,
    places_of,
)
from rollstream.topics.closing import Closing
from rollstream.topics.errors import RollstreamError
from rollstream.topics.records import Chunk, PolicyManifest, Tensor
from rollstream.topics.wire.params_digest import tensor_digests


class ChainBroken(RollstreamError):
    """No chain of versions on the log leads to a policy version."""


def links(
    manifests: Mapping[int, PolicyManifest], version: int, held: int = -1, refused: Collection[int] = ()
) -> list[PolicyManifest]:
    """Return the versions to fetch for `version`, in order: deltas on `held` if possible, else from a full version on.

    Raises ChainBroken if there is no such chain, or if one of its versions is `refused`.
    """
    chain: list[PolicyManifest] = []
    wanted = version
    while True:
        manifest = manifests.get(wanted)
        if manifest is None or manifest.kind == "external" or (chain and wanted >= chain[-1].version):
            raise ChainBroken(f"the weights of version {wanted}, for policy version {version}, are not on the log")
        if wanted in refused:
            raise ChainBroken(f"policy version {version} builds on version {wanted}, which was refused")
        chain.append(manifest)
        if manifest.kind == "full" or manifest.base == held >= 0:
            return chain[::-1]
        wanted = manifest.base


def lost(manifests: Mapping[int, PolicyManifest], versions: Collection[int], incomplete: Collection[int]) -> set[int]:
    """Return those of `versions` that nobody can fetch, if no later one can be fetched either.

    `incomplete` are versions of which chunks are missing. External versions are not lost.
    """
    gone = set[int]()
    for version in sorted(versions, reverse=True):
        if manifests[version].kind == "external":
            continue
        try:
            links(manifests, version, refused=incomplete)
            break
        except ChainBroken:
            gone.add(version)
    return gone


def needed(manifests: Mapping[int, PolicyManifest], versions: int) -> set[int]:
    """Return the newest `versions` versions and all versions that they build on."""
    return with_bases(manifests, *sorted(manifests)[-versions:])


def with_bases(manifests: Mapping[int, PolicyManifest], *versions: int) -> set[int]:
    """Return versions and all versions that they build on; only the version itself if no chain leads to it."""
    kept = set[int]()
    for version in sorted(versions, reverse=True):
        if version in kept:
            continue
        kept.add(version)
        with suppress(ChainBroken):
            kept.update(link.version for link in links(manifests, version))
    return kept


def forget(manifests: MutableMapping[int, PolicyManifest], oldest: int) -> None:
    """Remove the versions before the newest full version that is not above `oldest`. Neither `oldest` nor later
    versions build on them."""
    anchor = max((v for v, manifest in manifests.items() if v <= oldest and manifest.kind == "full"), default=-1)
    for version in [version for version in manifests if version < anchor]:
        del manifests[version]


def load_version(
    fetcher: ChunkFetcher,
    manifests: Mapping[int, PolicyManifest],
    version: int,
    *,
    held: tuple[int, Arrays] = (-1, {}),
    refused: Collection[int] = (),
    timeout_s: float = 60.0,
    stop: threading.Event | None = None,
    memory: ReusedMemory | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a version. If deltas lead to it from the version `held`, only these deltas are fetched.

    Nothing is fetched if a version that it builds on is `refused`, because the digests would mismatch again.
    `timeout_s` and `stop` apply to each version of the chain. A caller that loads one version after another passes the
    same `memory` each time, so that the memory of earlier versions is used again. Raises ChainBroken,
    ChunksGone, ChunksLate or WeightsRefused.
    """
    memory = memory or ReusedMemory(0)
    arrays: dict[str, NDArray[Any]] = dict(held[1])
    for link in links(manifests, version, held[0], refused):
        # The digests of the last version also prove the versions that it builds on.
        buffer = ContentBuffer(link, checked=link.version == version, memory=memory)
        fetcher.stream(link, buffer.put, timeout_s=timeout_s, stop=stop)
        arrays = buffer.arrays(arrays)
    return arrays


class SpoolFailed(RollstreamError):
    """A version could not be written to temporary files."""


class SpooledTensor:
    """A tensor of a spooled version. Each conversion to a numpy array reads the tensor from the files again."""

    def __init__(self, version: "SpooledVersion", tensor: Tensor) -> None:
        self._version, self._name = version, tensor.name
        self.dtype = known_dtype(version.manifest, tensor)
        self.shape = tensor.shape

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """Read the tensor, and convert it."""
        return np.asarray(self).astype(dtype)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self._version.read(self._name).astype(dtype or self.dtype, copy=bool(copy))


class SpooledVersion(Closing):
    """A version that matches its digests. Its files have no names, and vanish when it is closed or the process ends."""

    def __init__(
        self,
        fetcher: ChunkFetcher,
        manifests: Mapping[int, PolicyManifest],
        version: int,
        directory: Path,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        """Fetch a version, and the versions it builds on, into files in `directory` or its nearest existing parent.

        Raises ChainBroken, ChunksGone, ChunksLate and WeightsRefused as `load_version` does, and SpoolFailed.
        """
        chain = links(manifests, version)
        self.manifest = chain[-1]
        with ExitStack() as stack:
            self._spools = [stack.enter_context(_Spool(link, directory)) for link in chain]
            for spool in self._spools:
                fetcher.stream(spool.manifest, spool.put, timeout_s=timeout_s)
            self.tensors = {tensor.name: SpooledTensor(self, tensor) for tensor in self.manifest.tensors}
            names = (tensor.name for tensor in self.manifest.tensors)
            check_digests(self.manifest, (tensor_digests({name: self.read(name)})[0] for name in names))
            self._stack = stack.pop_all()

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor: its bytes in the newest full version, with all later changes. Raises WeightsRefused."""
        array: NDArray[Any] | None = None
        for spool in self._spools:
            array = spool.array(name, array)
        assert array is not None  # A chain has a link.
        return array

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()


class _Spool(Closing):
    """The content of one version in a file."""

    def __init__(self, manifest: PolicyManifest, directory: Path) -> None:
        self.manifest = manifest
        self._places, self._size_bytes = places_of(manifest)
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        above = directory.absolute()
        self._directory = next(place for place in (above, *above.parents) if place.exists())
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise self._failed(error) from error

    def put(self, chunk: Chunk, data: bytes) -> None:
        """Add a stored chunk; may be called by several threads. Raises WeightsRefused and SpoolFailed."""
        content, at = memoryview(content_of(self.manifest, chunk, data)), self._places[chunk]
        try:
            while content:
                written = os.pwrite(self._file.fileno(), content, at)
                content, at = content[written:], at + written
        except OSError as error:
            raise self._failed(error) from error

    def array(self, name: str, base: NDArray[Any] | None) -> NDArray[Any]:
        """Return a tensor; `base` is the tensor of the previous version. Raises WeightsRefused."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise WeightsRefused(f"policy version {self.manifest.version} has no tensor {name}")
        within = 0 <= tensor.start <= tensor.start + tensor.size_bytes <= self._size_bytes
        view = self._read(tensor.start, tensor.size_bytes) if within else memoryview(b"")
        return array_of(self.manifest, tensor, view, base)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _read(self, at: int, size_bytes: int) -> memoryview:
        view = memoryview(np.empty(size_bytes, np.uint8))  # type: ignore[arg-type]
        done = 0
        # One call reads at most 2 GiB.
        while done < size_bytes and (count := os.preadv(self._file.fileno(), [view[done:]], at + done)):
            done += count
        return view[:done].toreadonly()

    def _failed(self, error: OSError) -> SpoolFailed:
        return SpoolFailed(
            f"policy version {self.manifest.version} of {self._size_bytes} bytes could not be written to temporary "
            f"files in {self._directory}: {error.strerror or error}; free space, or choose another directory"
        )

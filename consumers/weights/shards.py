"""Shards of a policy version: the tensors that each process of a learner publishes, and how they make one version.

A process owns whole tensors. The digest of a version is computed from the digests of its tensors, so it does not depend
on which process published which tensor, and is computed without the bytes of other processes. No I/O.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.delta import LARGEST_SHARE
from rollstream.consumers.weights.file_names import in_files
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import Chunk, Tensor
from rollstream.topics.wire.params_digest import TensorDigest, tree_digest


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Number of bytes of a version that a process can send."""

    full_bytes: int
    """Bytes of the process's tensors."""
    delta_bytes: int = -1
    """Bytes of the changes since the previous version; -1 if the process cannot send changes."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the processes send a version."""

    delta: bool
    """Whether each process sends the changes since the previous version."""
    files: bool
    """Whether chunks are stored in files and not in records."""
    first_chunks: tuple[int, ...]
    """Number of the first chunk of each process."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a version that a process has sent."""

    tensors: tuple[Tensor, ...]
    """Tensors of the process, each with its place in the content of `chunks`."""
    chunks: tuple[Chunk, ...]
    full_bytes: int
    """Bytes of `tensors`."""

    @property
    def content_bytes(self) -> int:
        """Bytes of the chunks before compression."""
        return sum(chunk.content_bytes for chunk in self.chunks)


def owners(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """Return the process that publishes each tensor; `sizes` are their bytes by name.

    Every process gets the same result. Tensors are assigned by descending size, each to the process with the fewest
    bytes so far, and to the lead last among equals. Therefore no process has more than the average plus one tensor.
    """
    loads = [0] * processes
    owned = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        process = min(range(processes), key=lambda process: (loads[process], -process))
        owned[name] = process
        loads[process] += sizes[name]
    return owned


def planned(offers: Sequence[Offer], config: WeightsConfig) -> Plan:
    """Decide how the processes send a version, by the total number of bytes that they have to send."""
    full_bytes = sum(offer.full_bytes for offer in offers)
    delta_bytes = sum(offer.delta_bytes for offer in offers)
    delta = all(offer.delta_bytes >= 0 for offer in offers) and delta_bytes <= LARGEST_SHARE * full_bytes
    files = in_files(config, delta_bytes if delta else full_bytes)
    chunk_bytes = config.file_bytes if files else config.chunk_bytes
    first_chunks = [0]
    for offer in offers[:-1]:
        size_bytes = offer.delta_bytes if delta else offer.full_bytes
        first_chunks.append(first_chunks[-1] + max(1, math.ceil(size_bytes / chunk_bytes)))
    return Plan(delta=delta, files=files, first_chunks=tuple(first_chunks))


def joined(shards: Iterable[Shard]) -> tuple[tuple[Tensor, ...], tuple[Chunk, ...], str]:
    """Join shards to a version: return its tensors in name order, its chunks in order of the shards, and its digest.

    Raises StateRefused if two shards have the same tensor.
    """
    tensors: dict[str, Tensor] = {}
    chunks: list[Chunk] = []
    start = 0
    for process, shard in enumerate(shards):
        for tensor in shard.tensors:
            if tensor.name in tensors:
                raise StateRefused(
                    f"tensor {tensor.name} was sent by two processes of the learner, one of them process {process}; "
                    "start all of them with the same release and settings"
                )
            tensors[tensor.name] = replace(tensor, start=start + tensor.start)
        chunks += shard.chunks
        start += shard.content_bytes
    ordered = tuple(tensors[name] for name in sorted(tensors))
    digest = tree_digest(TensorDigest(t.name, t.dtype, t.shape, t.digest) for t in ordered)
    return ordered, tuple(chunks), digest

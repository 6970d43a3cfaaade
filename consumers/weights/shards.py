"""Shards of a policy version: the tensors that each process of a learner publishes, and how it writes their bytes.

A process owns whole tensors. The digest of a version is computed from the digests of its tensors, so it does not depend
on which process published which tensor, and is computed without the bytes of other processes. No I/O.

Chunks are sent outside transactions, under keys with the publisher's incarnation. They are part of a version only once
a committed manifest names them. Tensors are digested while they are compared and sent, because only the manifest needs
the digests.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ZSTD, Arrays, Content, compress, in_files, pays
from rollstream.consumers.weights.delta import LARGEST_SHARE, delta_content
from rollstream.consumers.weights.file_publisher import FileWriter
from rollstream.consumers.weights.layout import full_content, split
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError, StateRefused
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.records import Chunk, Tensor
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.params_digest import TensorDigest, described, tensor_digests, tree_digest


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


_RECORD_OVERHEAD_BYTES = 1024
_ATTEMPTS = 3
_QUEUE_BYTES = 8 * 1024 * 1024
"""Memory for copies of chunks that are being sent, in addition to the versions; larger if chunks are large."""


class Draft(NamedTuple):
    """A process's share of a version before it is sent."""

    arrays: Arrays
    digests: Future[tuple[TensorDigest, ...]]
    """Digests of the arrays, which are being computed."""
    delta: Content | None
    """Changes since the previous version; None if this process lacks that version or the changes are too many."""

    @property
    def offer(self) -> Offer:
        """Number of bytes that can be sent, in full and as changes."""
        full_bytes = sum(array.nbytes for array in self.arrays.values())
        return Offer(full_bytes=full_bytes, delta_bytes=-1 if self.delta is None else self.delta.size_bytes)

    def tensors(self, content: Content) -> tuple[Tensor, ...]:
        """Wait for the digests, and return the tensors of a content of these arrays, with their digests."""
        known = self.digests.result()
        return tuple(replace(tensor, digest=its.digest) for tensor, its in zip(content.tensors, known, strict=True))


def draft(arrays: Arrays, before: Arrays | None, *, alone: bool) -> Draft:
    """Begin to digest arrays, and compare them with the arrays of the previous version, if given.

    Unless this process is `alone`, the size of all shares together decides whether changes are sent.
    """
    digesting = ThreadPoolExecutor(1, thread_name_prefix="digest-weights")
    digests = digesting.submit(tensor_digests, arrays)
    digesting.shutdown(wait=False)
    share = LARGEST_SHARE if alone else 1.0
    changes = None if before is None else delta_content(before, arrays, described(arrays), largest_share=share)
    return Draft(arrays, digests, changes)


class ShardWriter(Closing):
    """Writes the shares of one process in the versions of a run."""

    def __init__(self, kafka: KafkaConfig, run: str, config: WeightsConfig, files: FileWriter | None) -> None:
        """`files` is needed if learner.weights.url is set."""
        if config.chunk_bytes + _RECORD_OVERHEAD_BYTES > kafka.max_record_bytes:
            raise ConfigurationError(
                f"learner.weights.chunk_bytes {config.chunk_bytes} does not fit into kafka.max_record_bytes "
                f"{kafka.max_record_bytes}; lower chunk_bytes or raise max_record_bytes"
            )
        self._config, self._files = config, files
        self._topic = topic_name(run, "weights")
        self._partitions = topic_admin.partitions_of(kafka, self._topic)
        # The producer does not compress, because chunks are compressed before they are sent if that pays.
        queue_bytes = max(_QUEUE_BYTES, 4 * config.chunk_bytes)
        limits = {"compression.type": "none", "queue.buffering.max.kbytes": queue_bytes // 1024}
        producer = clients.producer(kafka, **limits)
        self._sender = Sender(producer, remedy="start the learner again: it publishes the version again")

    def send(self, draft: Draft, plan: Plan, process: int, version: int, epoch: str) -> Shard:
        """Send the share of a process as planned, and return it once it is stored. Raises DeliveryError."""
        content = draft.delta if plan.delta and draft.delta is not None else full_content(draft.arrays)
        first = plan.first_chunks[process]
        if plan.files and self._files is not None:
            chunks = self._files.write(version, content, first)
        else:
            chunks = self._send_content(content, version, epoch, first)
        return Shard(tensors=draft.tensors(content), chunks=chunks, full_bytes=draft.offer.full_bytes)

    def _send_content(self, content: Content, version: int, epoch: str, first: int) -> tuple[Chunk, ...]:
        """Send the content in chunks, compressed if that pays, and return the chunks once the broker has them."""
        codec = ZSTD if pays(content.views) else ""
        places: dict[int, tuple[int, int]] = {}
        sizes: dict[int, tuple[int, int]] = {}
        # A broker that received a chunk twice may acknowledge it without its offset. The chunk is then sent once more.
        for _attempt in range(_ATTEMPTS):
            for index, piece in enumerate(split(content.views, self._config.chunk_bytes), first):
                if index not in places:
                    stored = compress(piece) if codec else piece
                    sizes[index] = len(stored), len(piece)
                    self._send(encode_key(version, epoch, index), stored, index % self._partitions, places, index)
            self.flush()
            if len(places) == len(sizes):
                break
        else:
            raise DeliveryError(
                f"{self._topic}: the broker acknowledged {len(sizes) - len(places)} chunks of version {version} "
                f"without their offsets, {_ATTEMPTS} times; start the learner again: it publishes the version again"
            )
        return tuple(
            Chunk(
                index=index,
                partition=places[index][0],
                offset=places[index][1],
                size_bytes=stored,
                digest="",
                codec=codec,
                content_bytes=size,
            )
            for index, (stored, size) in sizes.items()
        )

    def tombstone(self, key: bytes, partition: int) -> None:
        """Remove a chunk from the topic."""
        self._send(key, None, partition)

    def flush(self) -> None:
        """Wait until the broker has everything that was sent. Raises DeliveryError or DeadlineExceeded."""
        self._sender.flush(self._config.store_timeout_s)

    def close(self) -> None:
        """Wait until the broker has everything that was sent."""
        self.flush()

    def _send(
        self,
        key: bytes,
        value: bytes | None,
        partition: int,
        places: dict[int, tuple[int, int]] | None = None,
        index: int = 0,
    ) -> None:
        def delivered(delivery: Delivery) -> None:
            if places is not None and delivery.known_offset is not None:
                places[index] = delivery.partition, delivery.known_offset

        name = f"chunk {key.decode()}"
        self._sender.send(self._topic, value, key, partition=partition, name=name, on_delivery=delivered)

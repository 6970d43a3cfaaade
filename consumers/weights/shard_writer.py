"""ShardWriter: makes the bytes of a process's share of a version, and sends them to the topic or to files.

Chunks are sent outside transactions, under keys with the publisher's incarnation. They are part of a version only once
a committed manifest names them. Tensors are digested while they are compared and sent, because only the manifest needs
the digests.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import ZSTD, Arrays, Content, compress, pays
from rollstream.consumers.weights.delta import LARGEST_SHARE, delta_content
from rollstream.consumers.weights.file_publisher import FileWriter
from rollstream.consumers.weights.layout import full_content, split
from rollstream.consumers.weights.shards import Offer, Plan, Shard
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeliveryError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.records import Chunk, Tensor
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.params_digest import TensorDigest, described, tensor_digests

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

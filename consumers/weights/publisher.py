"""WeightsPublisher: sends chunks outside transactions, then the manifest, which is the commit point of the version.

The manifest commits in the transaction of its step. A version number is never reused; chunks left by a crash are
tombstoned at the next start, and files used again or removed.
"""

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollstream.consumers.weights.chains import needed
from rollstream.consumers.weights.compression import ZSTD, compress, pays
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Arrays, Content
from rollstream.consumers.weights.delta import delta_content
from rollstream.consumers.weights.file_names import in_files
from rollstream.consumers.weights.file_publisher import FilePublisher
from rollstream.consumers.weights.file_retention import remove_expired
from rollstream.consumers.weights.layout import full_content, split
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.keys import decode_key, encode_key
from rollstream.topics.logs import event
from rollstream.topics.params_digest import TensorDigest, tensor_digests, tree_digest
from rollstream.topics.records import Chunk, PolicyManifest

logger = logging.getLogger(__name__)

_DELIVERY_TIMEOUT_S = 120.0
_RECORD_OVERHEAD_BYTES = 1024


def read_manifests(kafka: KafkaConfig, run: str, start: int = BEGINNING) -> dict[int, PolicyManifest]:
    """Every committed manifest of a run from an offset of `policies` on, by version; unreadable records are skipped."""
    topic = topic_name(run, "policies")
    records = SkippedRecords("policies").records(PolicyManifest, read_to_end(kafka, topic, start=start))
    return {manifest.version: manifest for _message, manifest in records}


class WeightsPublisher:
    """Publishes for one learner. Build it after the learner's StepLog, so that no other learner of the run can commit.

    Usage: `manifest = stage(...)`, write `record(manifest)` in the transaction of the step, `committed(manifest)`.
    """

    def __init__(self, kafka: KafkaConfig, run: str, learner: str, model: str, config: WeightsConfig) -> None:
        if config.chunk_bytes + _RECORD_OVERHEAD_BYTES > kafka.max_record_bytes:
            raise ConfigurationError(
                f"learner.weights.chunk_bytes {config.chunk_bytes} does not fit kafka.max_record_bytes "
                f"{kafka.max_record_bytes}; lower the one or raise the other"
            )
        self._config = config
        self._learner = learner
        self._model = model
        self._epoch = uuid.uuid4().hex[:12]
        self._weights_topic = topic_name(run, "weights")
        self._policies_topic = topic_name(run, "policies")
        self._partitions = topic_admin.partitions_of(kafka, self._weights_topic)
        self._manifests = read_manifests(kafka, run)
        # Chunks are compressed where it pays, before they are sent.
        producer = clients.producer(kafka, **{"compression.type": "none"})
        self._sender = Sender(producer, remedy="start the learner again, it publishes the version anew")
        self._live = needed(self._manifests, config.keep_versions)
        """Versions whose chunks are not tombstoned."""
        self._staged: tuple[PolicyManifest, Arrays] | None = None
        self._base: tuple[PolicyManifest, Arrays] | None = None
        """The latest version, if this publisher made it."""
        self._tombstone_unnamed(kafka)
        self._files = FilePublisher(run, config, self._manifests) if config.url else None

    @property
    def versions(self) -> dict[int, int]:
        """Learner step of every published version; may be called from another thread."""
        return {version: manifest.step for version, manifest in list(self._manifests.items())}

    @property
    def latest_version(self) -> int:
        """Highest version published, -1 before the first."""
        return max(self._manifests, default=-1)

    def manifest(self, version: int) -> PolicyManifest | None:
        """Manifest of a published version; None if there is no version of that number."""
        return self._manifests.get(version)

    def published(self, step: int, digest: str) -> PolicyManifest | None:
        """Manifest of the version this learner published after `step`, if its parameters have that digest.

        The digest is that of the learner's parameters, before any conversion.
        """
        of_step = [m for m in self._manifests.values() if m.learner == self._learner and m.step == step]
        newest = max(of_step, key=lambda manifest: manifest.version, default=None)
        return newest if newest is not None and params_digest_of(newest) == digest else None

    def stage(
        self,
        step: int,
        arrays: Arrays,
        *,
        params_digest: str = "",
        dtype: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> PolicyManifest:
        """Send the chunks of a new version, wait until broker or store has them, and return the manifest to commit.

        `arrays` are numpy arrays by name, which must not change afterwards: the next version is compared with them. If
        they were converted to `dtype`, `params_digest` is the digest of the parameters before. `figures` are those of
        earlier stages. Nobody reads the chunks before the manifest is committed. Raises DeliveryError if the broker
        or the store does not accept them.
        """
        clock = _Stages(figures or {})
        digests = tensor_digests(arrays)
        clock.ended("digest_s")
        delta = self._delta(arrays, digests)
        content = delta or full_content(arrays, digests)
        clock.ended("compare_s")
        if self._files is not None and in_files(self._config, content.size_bytes):
            chunks = self._files.write(self.latest_version + 1, content)
        else:
            chunks = self._send_content(content)
        clock.ended("send_s")
        digest = tree_digest(digests)
        manifest = self._manifest(
            step,
            digest,
            kind="delta" if delta else "full",
            base=self.latest_version if delta else -1,
            tensors=content.tensors,
            chunks=chunks,
            params_digest=params_digest or digest,
            dtype=dtype,
            figures=clock.figures | _sizes(content, chunks, arrays),
        )
        self._staged = manifest, arrays
        return manifest

    def _delta(self, arrays: Arrays, digests: Sequence[TensorDigest]) -> Content | None:
        """The changes since the latest version; None if this version is to be full.

        It is at the start of a publisher, every `anchor_every` versions, and if its delta is no smaller by half.
        """
        if self._base is None:
            return None
        before, previous = self._base
        anchor = max(v for v, manifest in self._manifests.items() if manifest.kind == "full")
        if before.version != self.latest_version or before.version + 1 - anchor >= self._config.anchor_every:
            return None
        return delta_content(previous, arrays, digests)

    def stage_external(self, step: int, digest: str) -> PolicyManifest:
        """Return the manifest to commit for a new version whose parameters are not on the log."""
        return self._manifest(step, digest, kind="external")

    def _send_content(self, content: Content) -> tuple[Chunk, ...]:
        """Send the content in chunks, compressed if that pays, and return them once the broker has them."""
        version, codec = self.latest_version + 1, ZSTD if pays(content.views) else ""
        places: dict[int, tuple[int, int]] = {}
        sizes: list[tuple[int, int]] = []
        for index, piece in enumerate(split(content.views, self._config.chunk_bytes)):
            stored = compress(piece) if codec else piece
            sizes.append((len(stored), len(piece)))
            self._send(encode_key(version, self._epoch, index), stored, index % self._partitions, places, index)
        self._sender.flush(_DELIVERY_TIMEOUT_S)
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
            for index, (stored, size) in enumerate(sizes)
        )

    def _manifest(self, step: int, digest: str, **fields: Any) -> PolicyManifest:
        """Build the manifest of the version after the latest."""
        whole: dict[str, Any] = {"tensors": (), "chunks": ()} | fields
        return PolicyManifest(
            version=self.latest_version + 1,
            learner=self._learner,
            step=step,
            epoch=self._epoch,
            digest=digest,
            model=self._model,
            created=time.time(),
            **whole,
        )

    def record(self, manifest: PolicyManifest) -> tuple[str, bytes, bytes]:
        """Topic, key and value of the manifest's record."""
        return self._policies_topic, encode_key(manifest.version), encode(manifest)

    def committed(self, manifest: PolicyManifest) -> None:
        """Note that the manifest is committed, and remove the chunks of versions that no kept one builds on."""
        self._manifests[manifest.version] = manifest
        self._live.add(manifest.version)
        staged, self._staged = self._staged, None
        keeps = self._config.anchor_every > 1 and staged is not None and staged[0] is manifest
        self._base = staged if keeps else None
        files: list[str] = []
        for version in sorted(self._live - needed(self._manifests, self._config.keep_versions)):
            expired = self._manifests[version]
            for chunk in expired.chunks:
                if chunk.url:
                    files.append(chunk.url)
                else:
                    self._send(encode_key(expired.version, expired.epoch, chunk.index), None, chunk.partition)
            self._live.remove(version)
            # Nobody asks for its tensors and chunks any more, and of a large model they are many.
            self._manifests[version] = replace(expired, tensors=(), chunks=())
        if self._files is not None:
            self._files.committed(manifest)
        remove_expired(files, self._config)

    def close(self) -> None:
        """Wait until the broker has every tombstone."""
        self._sender.flush(_DELIVERY_TIMEOUT_S)

    def _tombstone_unnamed(self, kafka: KafkaConfig) -> None:
        """Tombstone chunks of versions no longer kept, and chunks that a crash left without a manifest."""
        kept = {
            encode_key(manifest.version, manifest.epoch, chunk.index)
            for version in self._live
            for manifest in (self._manifests[version],)
            for chunk in manifest.chunks
        }
        live = _live_keys(read_to_end(kafka, self._weights_topic, isolation="read_uncommitted"))
        removed = {key: partition for key, partition in live.items() if key not in kept}
        for key, partition in removed.items():
            self._send(key, None, partition)
        self._sender.flush(_DELIVERY_TIMEOUT_S)
        if removed:
            versions = sorted({int(decode_key(key)[0]) for key in removed})
            event(logger, "chunks_tombstoned", chunks=len(removed), versions=versions)

    def _send(
        self,
        key: bytes,
        value: bytes | None,
        partition: int,
        places: dict[int, tuple[int, int]] | None = None,
        index: int = 0,
    ) -> None:
        def delivered(delivery: Delivery) -> None:
            if places is not None:
                places[index] = delivery.partition, delivery.offset

        name = f"chunk {key.decode()}"
        self._sender.send(self._weights_topic, value, key, partition=partition, name=name, on_delivery=delivered)


def params_digest_of(manifest: PolicyManifest) -> str:
    """Digest of the learner's parameters that a version was published from, before any conversion."""
    return manifest.params_digest or manifest.digest


class _Stages:
    """Seconds of the stages of a publication, one after another."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self.figures = dict(before)
        self._began = time.monotonic()

    def ended(self, stage: str) -> None:
        now = time.monotonic()
        self.figures[stage] = now - self._began
        self._began = now


def _sizes(content: Content, chunks: Sequence[Chunk], arrays: Arrays) -> dict[str, float]:
    return {
        "full_bytes": float(sum(array.nbytes for array in arrays.values())),
        "content_bytes": float(content.size_bytes),
        "stored_bytes": float(sum(chunk.size_bytes for chunk in chunks)),
    }


def _live_keys(messages: Iterable[KafkaRecord]) -> dict[bytes, int]:
    """Keys whose last record is not a tombstone, with their partition."""
    live: dict[bytes, int] = {}
    for message in messages:
        key, partition = message.key, message.partition
        if key is None:
            continue
        if message.value is None:
            live.pop(key, None)
        else:
            live[key] = partition
    return live

"""Publishes policy versions: chunks first, in no transaction; the manifest, in the learner's, is the commit point.

A version number is never reused, and what a crash left half published is tombstoned at the next start.
"""

import hashlib
import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message

from consumers.weights.config import WeightsConfig
from consumers.weights.layout import Arrays, params_digest, serialise, split
from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeliveryError
from topics.keys import decode_key, encode_key
from topics.logs import event
from topics.records import Chunk, PolicyManifest
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)

_DELIVERY_TIMEOUT_S = 120.0
_RECORD_OVERHEAD_BYTES = 1024


def read_manifests(kafka: KafkaConfig, run: str, start: int = OFFSET_BEGINNING) -> dict[int, PolicyManifest]:
    """Every committed manifest of a run from an offset of `policies` on, by version; what is none is skipped."""
    topic = topic_name(run, "policies")
    found = SkippedRecords("policies").records(PolicyManifest, clients.read_to_end(kafka, topic, start=start))
    return {manifest.version: manifest for _message, manifest in found}


class WeightsPublisher:
    """Publishes for one learner. Build it after its StepLog, so that no other learner of the run can commit.

    Use: `manifest = stage(...)`, write `record(manifest)` in the transaction of the step, `committed(manifest)`.
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
        self._partitions = clients.partitions_of(kafka, self._weights_topic)
        self._manifests = read_manifests(kafka, run)
        self._producer = clients.producer(kafka)
        self._failures: list[str] = []
        self._tombstone_unnamed(kafka)

    @property
    def versions(self) -> dict[int, int]:
        """Learner step of every published version; may be asked from another thread."""
        return {version: manifest.step for version, manifest in list(self._manifests.items())}

    @property
    def latest_version(self) -> int:
        """Highest version published, -1 before the first."""
        return max(self._manifests, default=-1)

    def manifest(self, version: int) -> PolicyManifest | None:
        """A published version; None where there is none of that number."""
        return self._manifests.get(version)

    def published(self, step: int, digest: str) -> PolicyManifest | None:
        """The version this learner published after `step`, if its parameters had that digest."""
        of_step = [m for m in self._manifests.values() if m.learner == self._learner and m.step == step]
        newest = max(of_step, key=lambda manifest: manifest.version, default=None)
        return newest if newest is not None and newest.digest == digest else None

    def stage(self, step: int, arrays: Arrays) -> PolicyManifest:
        """Send the chunks of a new version and wait until the broker has them; returns the manifest to commit.

        `arrays` are numpy arrays by name. Until the manifest is committed nobody reads the chunks. Raises
        DeliveryError when the broker does not take them.
        """
        version = self.latest_version + 1
        data, tensors = serialise(arrays)
        pieces = list(split(data, self._config.chunk_bytes))
        places: dict[int, tuple[int, int]] = {}
        for index, piece in enumerate(pieces):
            self._produce(encode_key(version, self._epoch, index), piece, index % self._partitions, places, index)
        self._flush()
        chunks = tuple(
            Chunk(
                index=index,
                partition=places[index][0],
                offset=places[index][1],
                size_bytes=len(piece),
                digest=hashlib.sha256(piece).hexdigest(),
            )
            for index, piece in enumerate(pieces)
        )
        return self._manifest(step, params_digest(arrays), tensors=tensors, chunks=chunks)

    def stage_external(self, step: int, digest: str) -> PolicyManifest:
        """The manifest of a new version whose parameters travel outside the log, to be committed."""
        return self._manifest(step, digest, kind="external")

    def _manifest(self, step: int, digest: str, **fields: Any) -> PolicyManifest:
        """Of the version after the latest."""
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
        """Take note that the manifest is committed, and tombstone the chunks of versions no longer kept."""
        self._manifests[manifest.version] = manifest
        oldest_kept = manifest.version - self._config.keep_versions + 1
        expired = self._manifests.get(oldest_kept - 1)
        if expired is not None:
            for chunk in expired.chunks:
                self._produce(encode_key(expired.version, expired.epoch, chunk.index), None, chunk.partition)
        self._producer.poll(0)

    def close(self) -> None:
        """Wait until every tombstone is with the broker."""
        self._flush()

    def _tombstone_unnamed(self, kafka: KafkaConfig) -> None:
        """Tombstone chunks of versions no longer kept, and those no manifest names: a crash left them."""
        kept = {
            encode_key(manifest.version, manifest.epoch, chunk.index)
            for manifest in self._manifests.values()
            if manifest.version > self.latest_version - self._config.keep_versions
            for chunk in manifest.chunks
        }
        live = _live_keys(clients.read_to_end(kafka, self._weights_topic, isolation="read_uncommitted"))
        removed = {key: partition for key, partition in live.items() if key not in kept}
        for key, partition in removed.items():
            self._produce(key, None, partition)
        self._flush()
        if removed:
            versions = sorted({int(decode_key(key)[0]) for key in removed})
            event(logger, "chunks_tombstoned", chunks=len(removed), versions=versions)

    def _produce(
        self,
        key: bytes,
        value: bytes | None,
        partition: int,
        places: dict[int, tuple[int, int]] | None = None,
        index: int = 0,
    ) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            offset = message.offset()
            if error is not None or offset is None or offset < 0:
                self._failures.append(error.str() if error is not None else "the broker reported no offset")
            elif places is not None:
                places[index] = (partition, offset)

        clients.produce(self._producer, self._weights_topic, value, key, partition=partition, on_delivery=delivered)

    def _flush(self) -> None:
        remaining = self._producer.flush(_DELIVERY_TIMEOUT_S)
        if remaining or self._failures:
            reason = self._failures[0] if self._failures else f"{remaining} chunks not acknowledged"
            self._failures.clear()
            raise DeliveryError(f"weights were not published to {self._weights_topic}: {reason}")


def _live_keys(messages: Iterable[Message]) -> dict[bytes, int]:
    """Keys whose last record is not a tombstone, with their partition."""
    live: dict[bytes, int] = {}
    for message in messages:
        key, partition = message.key(), message.partition()
        if not isinstance(key, bytes) or partition is None:
            continue
        if message.value() is None:
            live.pop(key, None)
        else:
            live[key] = partition
    return live


def as_numpy(params: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of arrays (JAX's too) in this process's memory, by name."""
    return {name: np.array(value) for name, value in params.items()}

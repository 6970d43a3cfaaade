"""Fetches the bytes of a policy version from where its manifest says they lie, or says that they are gone.

Reads uncommitted: chunks travel in no transaction, and the committed manifest that names them proves them.
"""

import threading
import time
from collections.abc import Iterable

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, RollstreamError
from topics.keys import encode_key
from topics.records import PolicyManifest


class ChunksGone(RollstreamError):
    """The chunks a manifest names are no longer in the log, and will not come back."""


class ChunksLate(RollstreamError):
    """The chunks a manifest names did not come in time; they may yet."""


_ASK_TIMEOUT_S = 10.0


class ChunkFetcher:
    """Fetches the chunks manifests name, through one consumer that is kept between versions."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._topic = topic_name(run, "weights")
        self._consumer = clients.reader(kafka, isolation="read_uncommitted")

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def fetch(
        self, manifest: PolicyManifest, *, timeout_s: float = 60.0, stop: threading.Event | None = None
    ) -> list[bytes]:
        """The chunks in order, read where the manifest says they are; it proves that they are committed.

        Raises ChunksGone when one is no longer there, ChunksLate when none came for `timeout_s`, no broker answered, or
        `stop` was set. Digests are the caller's to check.
        """
        wanted = {(chunk.partition, chunk.offset): chunk.index for chunk in manifest.chunks}
        found: dict[int, bytes] = {}
        deadline = time.monotonic() + timeout_s
        self._read_from(_lowest(wanted))
        try:
            while len(found) < len(wanted):
                if time.monotonic() > deadline or (stop is not None and stop.is_set()):
                    raise ChunksLate(
                        f"{len(wanted) - len(found)} of {len(wanted)} chunks of version {manifest.version} are "
                        f"missing, and none came for {timeout_s:g} s"
                    )
                message = self._consumer.poll(0.05)
                if message is not None and _is_reset(message):
                    missing = _lowest(place for place, index in wanted.items() if index not in found)
                    self._check_low(message, missing)
                    self._read_from(missing)
                    continue
                if message is None or _is_end(message, self._topic):
                    continue
                partition, offset = message.partition(), message.offset()
                if partition is None or offset is None:
                    continue
                passed = [o for (p, o), i in wanted.items() if p == partition and o < offset and i not in found]
                if passed:
                    raise ChunksGone(f"{self._topic}[{partition}] has no record at offset {passed[0]} any more")
                if (partition, offset) in wanted:
                    index = wanted[partition, offset]
                    found[index] = _value(message, encode_key(manifest.version, manifest.epoch, index))
                    # A version that keeps coming is waited for, however long it takes.
                    deadline = time.monotonic() + timeout_s
        except BrokerUnavailable as unavailable:
            raise ChunksLate(str(unavailable)) from unavailable
        finally:
            self._consumer.unassign()
        return [found[chunk.index] for chunk in manifest.chunks]

    def _read_from(self, places: dict[int, int]) -> None:
        self._consumer.assign([TopicPartition(self._topic, partition, offset) for partition, offset in places.items()])

    def _check_low(self, message: Message, missing: dict[int, int]) -> None:
        """Raise ChunksGone if the partition no longer reaches back to what is missing.

        The message alone does not say so: it may be about the version before, which was given up an instant ago.
        """
        partition, error = message.partition(), message.error()
        try:
            low, _high = self._consumer.get_watermark_offsets(
                TopicPartition(self._topic, partition or 0), timeout=_ASK_TIMEOUT_S, cached=False
            )
        except KafkaException as exception:
            raise ChunksLate(f"where {self._topic} begins was not answered: {exception.args[0].str()}") from exception
        if partition in missing and missing[partition] < low:
            reason = error.str() if error is not None else ""
            raise ChunksGone(f"{self._topic}[{partition}] no longer reaches back to the chunks: {reason}")


def _lowest(places: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The lowest offset of each partition."""
    found: dict[int, int] = {}
    for partition, offset in places:
        found[partition] = min(offset, found.get(partition, offset))
    return found


def _is_reset(message: Message) -> bool:
    """Whether the message says that an offset asked for is not there."""
    error = message.error()
    return error is not None and error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


def _is_end(message: Message, topic: str) -> bool:
    """Whether the message is an event without a record. Raises what an error means."""
    error = message.error()
    if error is None:
        return False
    if error.code() != KafkaError._PARTITION_EOF:
        clients.raise_for(error, f"fetching chunks from {topic}")
    return True


def _value(message: Message, key: bytes) -> bytes:
    value = message.value()
    if message.key() != key or not isinstance(value, bytes):
        raise ChunksGone(f"the record at offset {message.offset()} is not chunk {key.decode()}")
    return value

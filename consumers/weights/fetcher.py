"""Fetches the chunks of a policy version from the offsets in its manifest, or reports that they are gone.

It reads uncommitted records: chunks are sent outside transactions, and the committed manifest vouches for them.
"""

import threading
import time
from collections.abc import Iterable

from rollstream.topics.catalogue import topic_name
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, RollstreamError
from rollstream.topics.kafka.client_errors import OffsetGone
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.keys import encode_key
from rollstream.topics.records import PolicyManifest


class ChunksGone(RollstreamError):
    """Chunks that a manifest names are no longer in the log, and will not come back."""


class ChunksLate(RollstreamError):
    """Chunks that a manifest names did not arrive in time; they still may."""


_WAIT_S = 0.05


class ChunkFetcher(Closing):
    """Fetches chunks named by manifests, with one consumer for all versions."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        self._topic = topic_name(run, "weights")
        self._reader = Reader(kafka, isolation="read_uncommitted", doing="fetching chunks from")

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()

    def fetch(
        self, manifest: PolicyManifest, *, timeout_s: float = 60.0, stop: threading.Event | None = None
    ) -> list[bytes]:
        """Return the chunks in order, read from the offsets in the manifest. The caller checks their digests.

        Raises ChunksGone if a chunk no longer exists, ChunksLate if no chunk arrived for `timeout_s`, no broker
        answered, or `stop` was set.
        """
        wanted = {(chunk.partition, chunk.offset): chunk.index for chunk in manifest.chunks}
        chunks: dict[int, bytes] = {}
        deadline = time.monotonic() + timeout_s
        try:
            self._read_from(_lowest(wanted))
            while len(chunks) < len(wanted):
                if time.monotonic() > deadline or (stop is not None and stop.is_set()):
                    raise ChunksLate(
                        f"{len(wanted) - len(chunks)} of {len(wanted)} chunks of version {manifest.version} are "
                        f"missing, and none came for {timeout_s:g} s"
                    )
                try:
                    records = self._reader.poll(1, _WAIT_S).records
                except OffsetGone as gone:
                    missing = _lowest(place for place, index in wanted.items() if index not in chunks)
                    self._check_begins(missing, gone)
                    self._read_from(missing)
                    continue
                for record in records:
                    partition, offset = record.partition, record.offset
                    passed = [o for (p, o), i in wanted.items() if p == partition and o < offset and i not in chunks]
                    if passed:
                        raise ChunksGone(f"{self._topic}[{partition}] has no record at offset {passed[0]} any more")
                    if (partition, offset) in wanted:
                        index = wanted[partition, offset]
                        chunks[index] = _value(record, encode_key(manifest.version, manifest.epoch, index))
                        # As long as chunks arrive, the version has no time limit.
                        deadline = time.monotonic() + timeout_s
        except BrokerUnavailable as unavailable:
            raise ChunksLate(str(unavailable)) from unavailable
        finally:
            self._reader.unassign()
        return [chunks[chunk.index] for chunk in manifest.chunks]

    def _read_from(self, offsets: dict[int, int]) -> None:
        self._reader.assign({(self._topic, partition): offset for partition, offset in offsets.items()})

    def _check_begins(self, missing: dict[int, int], gone: OffsetGone) -> None:
        """Raise ChunksGone if a partition no longer holds the missing chunks.

        The error alone does not show that: it may concern the previous version, which was just abandoned.
        """
        for partition, (begin, _end) in self._reader.bounds(self._topic, missing, timeout_s=0.0).items():
            if missing[partition] < begin:
                raise ChunksGone(f"{self._topic}[{partition}] no longer reaches back to the chunks: {gone}")


def _lowest(places: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The lowest offset of each partition."""
    lowest: dict[int, int] = {}
    for partition, offset in places:
        lowest[partition] = min(offset, lowest.get(partition, offset))
    return lowest


def _value(record: KafkaRecord, key: bytes) -> bytes:
    if record.key != key or record.value is None:
        raise ChunksGone(f"the record at offset {record.offset} is not chunk {key.decode()}")
    return record.value

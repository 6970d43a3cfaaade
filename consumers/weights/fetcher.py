"""Fetches the chunks of a policy version from the offsets and files in its manifest, or reports that they are gone.

It reads uncommitted records, because chunks are sent outside transactions and the committed manifest vouches for them.
A failed read of a file is repeated with growing delays until it succeeds, or until no file has arrived within the time
limit. A file that is missing, or whose size or digest in the store is wrong, is given up, because another read does not
help.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rollstream.consumers.weights.content import ChunksGone, ChunksLate, WeightsRefused, place_of
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.parallel import abandoned_threads, in_parallel
from rollstream.topics.files.stores import Store, check_mounted, fault_of, open_store, shown
from rollstream.topics.kafka.client_calls import OffsetGone
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.logs import event
from rollstream.topics.records import Chunk, PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)


_WAIT_S = 0.05
_SAY_EVERY_S = 5.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
MOST_ABANDONED = 32
"""Number of reads that never returned, in this process, at which no further read begins."""
_POLL_S = 0.05
_HEALED = (
    "the next full version replaces it (every learner.weights.anchor_every versions), and a learner that is started "
    "again publishes one at once"
)
_AGAIN = (
    "check the store, and the credentials in this process's environment; raise learner.weights.fetch_timeout_s if the "
    "store is slow"
)


class ChunkFetcher(Closing):
    """Fetches chunks named by manifests, with one consumer for all versions."""

    def __init__(self, kafka: KafkaConfig, run: str, *, files_at_once: int = 8) -> None:
        """`files_at_once` is the number of files read at a time."""
        self._topic = topic_name(run, "weights")
        self._reader = Reader(kafka, isolation="read_uncommitted", doing="fetching chunks from")
        self._files_at_once = files_at_once

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()

    def fetch(
        self, manifest: PolicyManifest, *, timeout_s: float = 60.0, stop: threading.Event | None = None
    ) -> list[bytes]:
        """Return the chunks in order. The arguments and the errors are the same as for `stream`."""
        chunks: dict[int, bytes] = {}
        self.stream(manifest, lambda chunk, data: chunks.__setitem__(chunk.index, data), timeout_s=timeout_s, stop=stop)
        return [chunks[chunk.index] for chunk in manifest.chunks]

    def stream(
        self,
        manifest: PolicyManifest,
        take: Callable[[Chunk, bytes], object],
        *,
        timeout_s: float = 60.0,
        stop: threading.Event | None = None,
    ) -> None:
        """Pass each chunk to `take` as it arrives, in any order, and keep none. The caller checks their digests.

        Several threads at a time may call `take` for chunks in files. Raises ChunksGone if a chunk no longer exists,
        WeightsRefused if a file is damaged, and ChunksLate if no chunk arrived for `timeout_s`, no broker answered, or
        `stop` was set. An error from `take` also ends the fetch and is raised.
        """
        progress = _Progress(manifest)
        logged = [chunk for chunk in manifest.chunks if not chunk.url]
        if logged:
            self._stream_log(manifest, logged, take, progress, timeout_s, stop)
        filed = [chunk for chunk in manifest.chunks if chunk.url]
        if filed:
            fetch_files(
                manifest,
                filed,
                take,
                at_once=self._files_at_once,
                timeout_s=timeout_s,
                stop=stop,
                on_chunk=progress.fetched,
                on_wait=progress.report,
            )

    def _stream_log(
        self,
        manifest: PolicyManifest,
        chunks: Sequence[Chunk],
        take: Callable[[Chunk, bytes], object],
        progress: "_Progress",
        timeout_s: float,
        stop: threading.Event | None,
    ) -> None:
        missing, left = _by_partition(chunks), len(chunks)
        deadline = time.monotonic() + timeout_s
        try:
            self._read_from(_lowest(missing))
            while left:
                if time.monotonic() > deadline or (stop is not None and stop.is_set()):
                    raise ChunksLate(
                        f"{left} of {len(chunks)} chunks of version {manifest.version} have not arrived; none arrived "
                        f"for {timeout_s:g} s"
                    )
                try:
                    records = self._reader.poll(1, _WAIT_S).records
                except OffsetGone as gone:
                    self._check_begins(_lowest(missing), gone)
                    self._read_from(_lowest(missing))
                    continue
                for record in records:
                    chunk = self._next_chunk(missing, record)
                    if chunk is not None:
                        take(chunk, _value(record, encode_key(manifest.version, manifest.epoch, chunk.index)))
                        left -= 1
                        progress.fetched(chunk)
                        # The version has no time limit while chunks arrive.
                        deadline = time.monotonic() + timeout_s
                progress.report()
        except BrokerUnavailable as unavailable:
            raise ChunksLate(str(unavailable)) from unavailable
        finally:
            self._reader.unassign()

    def _next_chunk(self, missing: Mapping[int, deque[Chunk]], record: KafkaRecord) -> Chunk | None:
        """Return the chunk that a record holds, and remove it from `missing`; None for other records.

        Raises ChunksGone if the record is beyond the next missing chunk.
        """
        chunks = missing.get(record.partition)
        if not chunks or record.offset < chunks[0].offset:
            return None
        if record.offset > chunks[0].offset:
            raise ChunksGone(f"{self._topic}[{record.partition}] has no record at offset {chunks[0].offset} any more")
        return chunks.popleft()

    def _read_from(self, offsets: dict[int, int]) -> None:
        self._reader.assign({(self._topic, partition): offset for partition, offset in offsets.items()})

    def _check_begins(self, missing: dict[int, int], gone: OffsetGone) -> None:
        """Raise ChunksGone if a partition no longer holds the missing chunks.

        The error alone is not proof, because it may concern the previous version, whose fetch was just abandoned.
        """
        for partition, (begin, _end) in self._reader.bounds(self._topic, missing, timeout_s=0.0).items():
            if missing[partition] < begin:
                raise ChunksGone(f"{self._topic}[{partition}] no longer holds the first missing chunk: {gone}")


class _Progress:
    """Logs every few seconds how much of a version has arrived."""

    def __init__(self, manifest: PolicyManifest) -> None:
        self._manifest, self._said_at = manifest, time.monotonic()
        self._chunks = self._size_bytes = 0

    def fetched(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self._chunks += 1
        self._size_bytes += chunk.size_bytes
        self.report()

    def report(self) -> None:
        """Log the progress if it is due."""
        if time.monotonic() - self._said_at > _SAY_EVERY_S:
            self._said_at = time.monotonic()
            chunks = {"fetched": self._chunks, "of": len(self._manifest.chunks)}
            event(logger, "policy_fetching", version=self._manifest.version, **chunks, size_bytes=self._size_bytes)


def _by_partition(chunks: Iterable[Chunk]) -> dict[int, deque[Chunk]]:
    """Return the chunks of each partition in the order of their offsets."""
    queues: dict[int, deque[Chunk]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        queues.setdefault(chunk.partition, deque()).append(chunk)
    return queues


def _lowest(missing: Mapping[int, deque[Chunk]]) -> dict[int, int]:
    """Return the lowest offset in each partition with missing chunks."""
    return {partition: chunks[0].offset for partition, chunks in missing.items() if chunks}


def _value(record: KafkaRecord, key: bytes) -> bytes:
    if record.key != key or record.value is None:
        raise ChunksGone(f"the record at offset {record.offset} is not chunk {key.decode()}")
    return record.value


def fetch_files(
    manifest: PolicyManifest,
    chunks: Sequence[Chunk],
    take: Callable[[Chunk, bytes], object],
    *,
    at_once: int,
    timeout_s: float,
    stop: threading.Event | None = None,
    on_chunk: Callable[[Chunk], object] = lambda _chunk: None,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Pass each chunk to `take`, on the thread that read it, in any order; `take` checks the digest.

    `on_chunk` is called for each chunk that arrives, and `on_wait` while none arrives, both on the caller's thread.

    Raises ChunksGone if a file is missing, WeightsRefused if it is damaged, and ChunksLate if none arrived for
    `timeout_s` or `stop` was set. These errors name the URL. An error from `take` also ends the fetch and is raised.
    """
    reading = _Reading(manifest, [take], _stores(chunks), threading.Event(), {})
    left, deadline = len(chunks), time.monotonic() + timeout_s

    def check() -> None:
        on_wait()
        stopped = stop is not None and stop.is_set()
        if stopped or time.monotonic() > deadline:
            problem = next(iter(list(reading.problems.values())), f"{shown(chunks[0].url)}: no answer")
            raise ChunksLate(
                f"{left} of {len(chunks)} files of policy version {manifest.version} have not arrived; none arrived "
                f"for {timeout_s:g} s; {problem}; {_AGAIN}"
            )

    try:
        # Each attempt on a store that hangs leaves threads, so that without a limit, a follower that tries again and
        # again would fill the process with them.
        while abandoned_threads() >= MOST_ABANDONED:
            check()
            reading.ended.wait(_POLL_S)
        for chunk in in_parallel(chunks, reading.fetch, min(at_once, left), check=check, ended=reading.ended):
            left, deadline = left - 1, time.monotonic() + timeout_s
            on_chunk(chunk)
            if stop is not None and stop.is_set():
                check()
    finally:
        reading.take.clear()


def _stores(chunks: Sequence[Chunk]) -> Mapping[str, Store]:
    """Open the store of every chunk in the caller's thread, because file systems keep connections for each thread."""
    try:
        return {root: open_store(root) for root in {place_of(chunk.url)[0] for chunk in chunks}}
    except ConfigurationError as error:
        # The fault is in this process, not in the version, which can be read once the missing package is installed.
        raise ChunksLate(str(error)) from error


class _Reading(NamedTuple):
    """The files of one version that are being read."""

    manifest: PolicyManifest
    take: list[Callable[[Chunk, bytes], object]]
    """The function that takes files; empty once the fetch has ended, so that a thread whose read never returns does not
    keep the memory of the version."""
    stores: Mapping[str, Store]
    ended: threading.Event
    problems: dict[str, str]
    """Last problem of each file, by URL."""

    def fetch(self, chunk: Chunk) -> Chunk:
        """Read a file until it is whole, and pass it to `take`."""
        delay_s, mismatched = FIRST_DELAY_S, False
        while not self.ended.is_set():
            try:
                data = self._read(chunk)
            except (ChunksGone, WeightsRefused):
                raise
            except (StoreError, OSError) as error:
                self.problems[chunk.url] = f"{shown(chunk.url)}: {fault_of(error)}"
            else:
                if not self.take:
                    break
                try:
                    self.take[0](chunk, data)
                    self.problems.pop(chunk.url, None)
                    return chunk
                except WeightsRefused as refused:
                    if mismatched:
                        raise WeightsRefused(
                            f"{shown(chunk.url)} is damaged: {refused}; {_HEALED} if this file is deleted before"
                        ) from refused
                    # Read the file once more, because the bytes may have been damaged in transit.
                    mismatched = True
            self.ended.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return chunk

    def _read(self, chunk: Chunk) -> bytes:
        """Read a file. Raises ChunksGone, WeightsRefused, and StoreError or OSError if it cannot be read now."""
        root, name = place_of(chunk.url)
        store, version = self.stores[root], self.manifest.version
        try:
            data = store.read(name)
            if len(data) == chunk.size_bytes:
                return data
            stored = store.size_bytes(name)
        except FileNotFoundError as error:
            check_mounted(store, name.split("/")[0])  # Publishers make a folder for each run.
            raise ChunksGone(
                f"{shown(chunk.url)}, chunk {chunk.index} of policy version {version}, is missing; {_HEALED}"
            ) from error
        if stored != chunk.size_bytes:
            raise WeightsRefused(
                f"{shown(chunk.url)}, chunk {chunk.index} of policy version {version}, has {stored} bytes "
                f"instead of {chunk.size_bytes}; {_HEALED}"
            )
        raise OSError(f"{len(data)} of {chunk.size_bytes} bytes arrived")

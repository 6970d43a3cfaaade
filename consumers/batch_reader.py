"""BatchReader: follows the batches of a run in the order of its index. It needs no JAX, so any trainer can use it.

Delivery: at least once from the given position. The reader commits nothing; its caller saves `position` together with
the model. It fetches each batch by the offset in the index, waits for a batch that is not there yet, and skips no batch
of a readable index record.
"""

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rollstream.consumers.array_fetcher import ArrayFetcher
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, StateRefused, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import BEGINNING, UNREADABLE, KafkaRecord, Place
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, TrainingBatch
from rollstream.topics.traces.stages import batch_fetched
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as, frame_of
from rollstream.topics.wire.rl_examples import RLExample, batch_digest, examples_of, has_digest

_AHEAD_BYTES = 128 * 1024 * 1024
_PARTITION_BYTES = 1024 * 1024
"""Bytes of a partition in one answer of a broker, unless a batch has more.

With answers of 16 MiB, the client got so far ahead in some partitions that batches were discarded and read again."""
_GAP = 100
"""Longest gap of offsets to read through; for a longer gap a seek, which discards fetched data, is cheaper."""


@dataclass(frozen=True)
class IndexedBatch:
    """One entry of the index."""

    entry: BatchIndexEntry
    index_offset: int
    """Offset of the entry in batch-index."""

    @property
    def position(self) -> int:
        """Offset of the next entry."""
        return self.index_offset + 1


@dataclass(frozen=True)
class ReadBatch:
    """One entry of the index with its batch."""

    entry: BatchIndexEntry
    batch: TrainingBatch
    index_offset: int
    """Offset of the entry in batch-index."""
    position: int
    """Position at which all `processes` readers continue once each of them has read its batch of this round."""
    begin: int
    """Position of the reader before this round."""
    round: tuple[IndexedBatch, ...]
    """Entries between `begin` and `position`, one for each process."""

    missing: Mapping[int, str] = field(default_factory=dict)
    """Rows with an array that is missing in its store or damaged there, with the reason."""

    def examples(self) -> list[RLExample]:
        """The rows of the batch as examples, without those that lack an array."""
        return [example for row, example in enumerate(examples_of(self.batch)) if row not in self.missing]


def first_offset(kafka: KafkaConfig, run: str) -> int:
    """First offset of a run's index; 0 until records are deleted from it. Raises TopicError or BrokerUnavailable."""
    return topic_admin.bounds(kafka, topic_name(run, "batch-index"))[0][0]


def check_within_index(kafka: KafkaConfig, run: str, position: int, checkpoints: str) -> None:
    """Raise StateRefused if a run's index ends before the position of a checkpoint in the directory `checkpoints`."""
    end = topic_admin.bounds(kafka, topic_name(run, "batch-index"))[0][1]
    if position > end:
        raise StateRefused(
            f"the newest checkpoint in {checkpoints} was made with batch-index of run {run} read to offset {position}, "
            f"but it ends at {end}: its topics were created again, or kafka.bootstrap_servers names another cluster. "
            "Start a run of another name, or move the checkpoints away"
        )


class IndexReader(Closing):
    """Follows batch-index, which describes batches and their places, without reading the batches."""

    def __init__(self, kafka: KafkaConfig, run: str, start: int = 0) -> None:
        """Start at index offset `start`. Raises TopicError if entries from there on were deleted."""
        self._topic = topic_name(run, "batch-index")
        self.position = start
        clients.check_broker(kafka)
        begin = first_offset(kafka, run)
        if start < begin:
            raise TopicError(
                f"{self._topic} begins at offset {begin}, but is to be read from {start}: the entries between "
                f"were deleted, by `rollstream prune` or otherwise; start at {begin} (batch_reader.first_offset) to "
                f"continue without their batches"
            )
        self._follower = TopicFollower(kafka, {(self._topic, 0): start or BEGINNING})
        self._entries: deque[IndexedBatch] = deque()
        self.skipped = SkippedRecords("index-reader")
        """Index records that could not be read; the batches they named are not delivered."""

    @property
    def at_end(self) -> bool:
        """Whether the index was read to its end and every entry read was returned."""
        return (self._topic, 0) in self._follower.ends and not self._entries

    def poll(self, timeout_s: float = 1.0) -> IndexedBatch | None:
        """Return the next entry, or None if none arrives in time. Raises TopicError if the position was deleted."""
        if not self._entries:
            self._read(timeout_s)
        if not self._entries:
            return None
        indexed = self._entries.popleft()
        self.position = indexed.position
        return indexed

    def _read(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._entries:
            messages = self._follower.poll(100, max(0.0, min(0.05, deadline - time.monotonic())))
            for message, entry in self.skipped.records(BatchIndexEntry, messages):
                self._entries.append(IndexedBatch(entry, message.offset))
            if time.monotonic() >= deadline:
                return

    def close(self) -> None:
        """Close the consumer."""
        self._follower.close()


class BatchFetcher(Closing):
    """Fetches the batches named by index entries, by offset, and checks their digests."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        wait_s: float = 60.0,
        ahead_bytes: int = _AHEAD_BYTES,
    ) -> None:
        """Wait up to `wait_s` for a batch the index names; keep up to `ahead_bytes` of batches read before their turn.

        The client fetches each partition in large pieces, independently of other partitions, so batches arrive early.
        """
        self._run = run
        self._wait_s = wait_s
        # An entry of the index proves that its batch is committed, even if the commit marker has not yet reached the
        # partition of the batch.
        self._reader = Reader(kafka, isolation="read_uncommitted", partition_bytes=_PARTITION_BYTES)
        self._reader.partitions_of(topic_name(run, "batches"))
        self._ahead_bytes = ahead_bytes
        self._held_bytes = 0
        self._ahead: dict[Place, deque[tuple[int, bytes]]] = {}
        """Batches read before their turn, by partition, with their offsets; batches beyond the limit are read again."""

    def fetch(self, entry: BatchIndexEntry, *, check_digest: bool = True) -> TrainingBatch:
        """Return the batch that an entry names. Fetching in the order of the index is the cheapest.

        Raises DeadlineExceeded if the batch does not arrive, TopicError if its record is unreadable or does not match
        its digest, and RecordError if the record cannot be decoded.
        """
        place, offset = self._place(entry), entry.offset
        deadline = time.monotonic() + self._wait_s
        value = self._pop_ahead(place, offset)
        if value is None:
            self._move_to(place, offset)
        while value is None:
            # One record at a time, because the client waits if it is asked for more records than it has.
            for record in self._reader.poll(1, 0.02).records:
                self._keep(record, place, offset)
            value = self._pop_ahead(place, offset)
            if value is None and time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"batch {entry.batch_id} at {place[0]}[{entry.partition}] offset {offset} did not arrive within "
                    f"{self._wait_s:g} s; the index names it, so check the broker"
                )
        batch = decode_as(TrainingBatch, value)
        if check_digest and not has_digest(frame_of(value), entry.digest):
            self._compare(entry, batch)
        batch_fetched(self._run, entry, batch)
        return batch

    def _place(self, entry: BatchIndexEntry) -> Place:
        """Topic and partition of a batch."""
        return topic_name(self._run, "batches"), entry.partition

    def _compare(self, entry: BatchIndexEntry, batch: TrainingBatch) -> None:
        """Raise TopicError unless the content of a batch, however it was written, has the digest in the index."""
        if not batch_digest(batch) == batch.digest == entry.digest:
            raise TopicError(
                f"batch {entry.batch_id} at {self._place(entry)[0]}[{entry.partition}] offset {entry.offset} does not "
                f"match its digest; run `rollstream verify`"
            )

    def _pop_ahead(self, place: Place, offset: int) -> bytes | None:
        """Return the value read ahead at an offset, if any, and discard earlier values.

        Earlier values were already delivered, or belong to an aborted transaction.
        """
        ahead = self._ahead.get(place, ())
        while ahead and ahead[0][0] <= offset:
            at, value = ahead.popleft()
            self._held_bytes -= len(value)
            if at == offset:
                return value
        return None

    def _move_to(self, place: Place, offset: int) -> None:
        """Seek to `offset`, unless the reader is at it or just before it."""
        at = self._reader.positions.get(place)
        if at is None:
            self._ahead[place] = deque()
            self._reader.add(place, offset)
        elif not offset - _GAP <= at <= offset:
            self._held_bytes -= sum(len(value) for _at, value in self._ahead[place])
            self._ahead[place].clear()
            self._reader.seek(place, offset)

    def _keep(self, record: KafkaRecord, wanted: Place, offset: int) -> None:
        place, value = (record.topic, record.partition), record.value or b""
        is_wanted = place == wanted and record.offset == offset
        if is_wanted and not record.readable:
            raise TopicError(f"{place[0]}[{place[1]}] offset {offset}, which the index names: {UNREADABLE}")
        # The wanted batch is kept even if other batches already fill the limit.
        if is_wanted or self._held_bytes + len(value) <= self._ahead_bytes:
            self._ahead[place].append((record.offset, value))
            self._held_bytes += len(value)

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()


class BatchReader(Closing):
    """Reads the batches of an index in order: all of them, or, as process i of n, every n-th batch.

    Processes that start at the same position each read the same number of batches, and no batch twice; together they
    read every batch.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        start: int = 0,
        *,
        process: int = 0,
        processes: int = 1,
        wait_s: float = 60.0,
        arrays: Collection[str] = (),
    ) -> None:
        """Start at index offset `start`; wait up to `wait_s` for a batch that the index already names. `arrays` names
        the arrays to fetch from the store if they lie there, "media" all images.

        Raises TopicError if the index begins after `start`; `first_offset` returns its first offset.
        """
        if not 0 <= process < processes:
            raise ConfigurationError(f"process {process} of {processes}; give a number from 0 to {processes - 1}")
        self._process, self._processes = process, processes
        self._index = IndexReader(kafka, run, start)
        self._fetcher = BatchFetcher(kafka, run, wait_s=wait_s)
        self._arrays = ArrayFetcher(kafka, run, arrays, wait_s=wait_s)
        self._round: list[IndexedBatch] = []
        self.position = start
        """Offset at which to restart readers; with several processes, always the end of a round."""

    def poll(self, timeout_s: float = 1.0) -> ReadBatch | None:
        """Return the next batch, or None if the index has no further round of entries within `timeout_s`.

        A round is one batch for each process, so that all processes read the same number. Raises TopicError if the
        position was deleted, and the errors of BatchFetcher.fetch and ArrayFetcher.fetch.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._round) < self._processes:
            indexed = self._index.poll(max(0.0, deadline - time.monotonic()))
            if indexed is None:
                return None
            self._round.append(indexed)
        mine, whole, begin = self._round[self._process], tuple(self._round), self.position
        batch, missing = self._arrays.fetch(mine.entry, self._fetcher.fetch(mine.entry))
        self._round.clear()
        self.position = whole[-1].position
        return ReadBatch(mine.entry, batch, mine.index_offset, self.position, begin, whole, missing)

    def close(self) -> None:
        """Close both consumers."""
        self._index.close()
        self._fetcher.close()

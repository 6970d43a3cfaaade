"""BatchReader: follow a run's batches in the order of its index. Needs no JAX; any trainer may use it.

Delivery: at least once from the position given; the reader commits nothing, its caller keeps `position` with what it
trained. A batch the index names is fetched by offset and waited for: "not there yet" is never "missing".
"""

import time
from collections import deque
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from consumers.closing import Closing
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeadlineExceeded, TopicError
from topics.examples import RLExample, batch_digest, examples_of
from topics.following import TopicFollower
from topics.records import BatchIndexEntry, TrainingBatch
from topics.skipped import SkippedRecords

_AHEAD_BYTES = 128 * 1024 * 1024
_GAP = 100
"""Offsets that are read on through; across more of them a seek, which throws away what was fetched, costs less."""


@dataclass(frozen=True)
class Indexed:
    """One entry of the index."""

    entry: BatchIndexEntry
    index_offset: int
    """Offset of the entry in batch-index."""

    @property
    def position(self) -> int:
        """Where a reader goes on after this entry."""
        return self.index_offset + 1


@dataclass(frozen=True)
class ReadBatch:
    """One entry of the index with its batch."""

    entry: BatchIndexEntry
    batch: TrainingBatch
    index_offset: int
    """Offset of the entry in batch-index."""
    position: int
    """Where every reader of the same `processes` goes on once all of them have had their batches up to this one."""
    begin: int
    """`position` before this batch."""
    round: tuple[Indexed, ...]
    """Entries between `begin` and `position`: one for each of `processes`."""

    def examples(self) -> list[RLExample]:
        """The rows of the batch."""
        return examples_of(self.batch)


def first_offset(kafka: KafkaConfig, run: str) -> int:
    """Where the index of a run begins: 0 until something of it is deleted. Raises TopicError, BrokerUnavailable."""
    return clients.bounds(kafka, topic_name(run, "batch-index"))[0][0]


class IndexReader(Closing):
    """Follows batch-index: where batches are, and what is in them, without reading any."""

    def __init__(self, kafka: KafkaConfig, run: str, start: int = 0) -> None:
        """Start at index offset `start`. Raises TopicError where the index begins after it: entries are gone."""
        self._topic = topic_name(run, "batch-index")
        self.position = start
        clients.check_broker(kafka)
        begin = first_offset(kafka, run)
        if start < begin:
            raise TopicError(
                f"{self._topic} begins at offset {begin} and is to be read from {start} on: entries between were "
                f"deleted, by `rollstream prune` or otherwise; start at {begin} (batch_reader.first_offset) to go "
                f"without the batches they named"
            )
        self._follower = TopicFollower(kafka, [TopicPartition(self._topic, 0, start or OFFSET_BEGINNING)])
        self._entries: deque[Indexed] = deque()
        self.skipped = SkippedRecords("index-reader")
        """Records of the index that could not be read: no batch that they may have named is delivered."""

    @property
    def at_end(self) -> bool:
        """Whether the index has no further entry, as far as it is known by now."""
        return (self._topic, 0) in self._follower.ends and not self._entries

    def poll(self, timeout_s: float = 1.0) -> Indexed | None:
        """The next entry, or None when there is none in time. Raises TopicError when the position is gone."""
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
                self._entries.append(Indexed(entry, message.offset() or 0))
            if time.monotonic() >= deadline:
                return

    def close(self) -> None:
        """Close the consumer."""
        self._follower.close()


class BatchFetcher(Closing):
    """Fetches the batches that entries of the index name, by offset, and checks their digests."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        wait_s: float = 60.0,
        check_digests: bool = True,
        ahead_bytes: int = _AHEAD_BYTES,
    ) -> None:
        """`wait_s` bounds the wait for a batch the index already names, `ahead_bytes` what came before its turn.

        Partitions are fetched in large pieces, each at its own pace: kept is what several of them bring at once.
        """
        self._topic = topic_name(run, "batches")
        self._wait_s = wait_s
        self._check_digests = check_digests
        # The index proves the commit, so its batch may be read before the transaction shows on that partition.
        self._consumer: Consumer = clients.reader(kafka, isolation="read_uncommitted")
        clients.partitions_of(kafka, self._topic, self._consumer)
        self._at: dict[int, int] = {}
        self._ahead_bytes = ahead_bytes
        self._held_bytes = 0
        self._ahead: dict[int, deque[tuple[int, bytes]]] = {}
        """Batches read before their turn, by partition, with their offsets; what does not fit is read again."""

    def fetch(self, entry: BatchIndexEntry) -> TrainingBatch:
        """The batch an entry names. Cheapest in the order of the index.

        Raises DeadlineExceeded when it does not come, TopicError when it does not match its digest.
        """
        wanted = (entry.partition, entry.offset)
        deadline = time.monotonic() + self._wait_s
        value = self._take(*wanted)
        if value is None:
            self._move_to(*wanted)
        while value is None:
            for message in clients.at_hand(self._consumer, 20, 0.02):
                self._keep(message, wanted)
            value = self._take(*wanted)
            if value is None and time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"batch {entry.batch_id} at {self._topic}[{entry.partition}] offset {entry.offset} did not "
                    f"come within {self._wait_s:g} s; the index names it, so look at the broker"
                )
        batch = decode_as(TrainingBatch, value)
        if self._check_digests:
            self.check(entry, batch)
        return batch

    def check(self, entry: BatchIndexEntry, batch: TrainingBatch) -> None:
        """Raise TopicError unless a batch is what the index says, bit for bit; may be called from another thread."""
        if not batch_digest(batch) == batch.digest == entry.digest:
            raise TopicError(
                f"batch {entry.batch_id} at {self._topic}[{entry.partition}] offset {entry.offset} does not "
                f"match its digest; run `rollstream verify`"
            )

    def _take(self, partition: int, offset: int) -> bytes | None:
        """What was read ahead at an offset, if it was; all before it is let go.

        What lies before a batch the index names is either delivered or of an aborted transaction.
        """
        ahead = self._ahead.get(partition, ())
        while ahead and ahead[0][0] <= offset:
            at, value = ahead.popleft()
            self._held_bytes -= len(value)
            if at == offset:
                return value
        return None

    def _move_to(self, partition: int, offset: int) -> None:
        """Have the partition read from `offset`, unless it is on its way there already."""
        at = self._at.get(partition)
        if at is None:
            self._ahead[partition] = deque()
            self._consumer.incremental_assign([TopicPartition(self._topic, partition, offset)])
        elif offset - _GAP <= at <= offset:
            return
        else:
            self._held_bytes -= sum(len(value) for _at, value in self._ahead[partition])
            self._ahead[partition].clear()
            self._consumer.seek(TopicPartition(self._topic, partition, offset))
        self._at[partition] = offset

    def _keep(self, message: Message, wanted: tuple[int, int]) -> None:
        error = message.error()
        if error is None:
            partition, offset, value = message.partition() or 0, message.offset() or 0, message.value() or b""
            self._at[partition] = offset + 1
            # The one that is waited for has a place however many of other partitions came before it.
            if (partition, offset) == wanted or self._held_bytes + len(value) <= self._ahead_bytes:
                self._ahead[partition].append((offset, value))
                self._held_bytes += len(value)
        elif error.code() != KafkaError._PARTITION_EOF:
            clients.raise_for(error, f"reading {self._topic}")

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


class BatchReader(Closing):
    """Reads batches one by one, in index order; or, as process i of n, every n-th of them from `start` on.

    Processes that start at the same position read different batches, equally many, and all of them together.
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
        check_digests: bool = True,
    ) -> None:
        """Start at index offset `start`. `wait_s` bounds the wait for a batch the index already names.

        Raises TopicError where the index begins after `start`; `first_offset` tells where it does.
        """
        if not 0 <= process < processes:
            raise ConfigurationError(f"process {process} of {processes}; give a number from 0 to {processes - 1}")
        self._process, self._processes = process, processes
        self._index = IndexReader(kafka, run, start)
        self._fetcher = BatchFetcher(kafka, run, wait_s=wait_s, check_digests=check_digests)
        self._round: list[Indexed] = []
        self.position = start
        """Where readers have to start to go on: after a whole round where there are several processes."""

    def poll(self, timeout_s: float = 1.0) -> ReadBatch | None:
        """The next batch, or None when the index has no further round of entries within `timeout_s`.

        A round is one batch for each process, so that none ever has one more than another. Raises DeadlineExceeded
        when a batch the index names does not come, TopicError when the position is gone or a batch does not match its
        digest.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._round) < self._processes:
            indexed = self._index.poll(max(0.0, deadline - time.monotonic()))
            if indexed is None:
                return None
            self._round.append(indexed)
        mine, whole, begin = self._round[self._process], tuple(self._round), self.position
        batch = self._fetcher.fetch(mine.entry)
        self._round.clear()
        self.position = whole[-1].position
        return ReadBatch(mine.entry, batch, mine.index_offset, self.position, begin, whole)

    def close(self) -> None:
        """Close both consumers."""
        self._index.close()
        self._fetcher.close()

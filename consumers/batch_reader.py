"""BatchReader: follow a run's batches in the order of its index. Needs no JAX; any trainer may use it.

Delivery: at least once from the position given; the reader commits nothing, its caller keeps `position` with what it
trained. A batch the index names is fetched by offset and waited for: "not there yet" is never "missing".
"""

import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded, TopicError
from topics.examples import RLExample, batch_digest, examples_of
from topics.records import BatchIndexEntry, TrainingBatch

_MOST_AHEAD = 64
_GAP = 100
"""Offsets that are read on through; across more of them a seek, which throws away what was fetched, costs less."""


@dataclass(frozen=True)
class ReadBatch:
    """One entry of the index with its batch."""

    entry: BatchIndexEntry
    batch: TrainingBatch
    index_offset: int
    """Offset of the entry in batch-index."""

    @property
    def position(self) -> int:
        """Where a reader goes on after this batch."""
        return self.index_offset + 1

    def examples(self) -> list[RLExample]:
        """The rows of the batch."""
        return examples_of(self.batch)


class BatchReader:
    """Reads batches one by one, in index order."""

    def __init__(
        self, kafka: KafkaConfig, run: str, start: int = 0, *, wait_s: float = 60.0, check_digests: bool = True
    ) -> None:
        """Start at index offset `start`. `wait_s` bounds the wait for a batch the index already names."""
        self._run = run
        self._index_topic = topic_name(run, "batch-index")
        self._batches_topic = topic_name(run, "batches")
        self._wait_s = wait_s
        self._check_digests = check_digests
        self.position = start
        clients.check_broker(kafka)
        self._index: Consumer = clients.reader(kafka)
        clients.follow(self._index, kafka, [TopicPartition(self._index_topic, 0, start or OFFSET_BEGINNING)])
        # The index proves the commit, so its batch may be read before the transaction shows on that partition.
        self._batches: Consumer = clients.reader(kafka, isolation="read_uncommitted")
        clients.partitions_of(kafka, self._batches_topic, self._batches)
        self._at: dict[int, int] = {}
        self._entries: deque[tuple[int, BatchIndexEntry]] = deque()
        self._ahead: dict[tuple[int, int], bytes] = {}
        """Batches read before their turn, by partition and offset; bounded, what does not fit is read again."""

    def poll(self, timeout_s: float = 1.0) -> ReadBatch | None:
        """The next batch, or None when the index has no further entry within `timeout_s`.

        Raises DeadlineExceeded when a batch the index names does not come, TopicError when the position is gone or a
        batch does not match its digest.
        """
        if not self._entries:
            self._read_index(timeout_s)
        if not self._entries:
            return None
        offset, entry = self._entries[0]
        batch = self._fetch(entry)
        self._entries.popleft()
        self.position = offset + 1
        return ReadBatch(entry, batch, offset)

    def _read_index(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._entries:
            for message in clients.at_hand(self._index, 100, max(0.0, min(0.05, deadline - time.monotonic()))):
                error = message.error()
                if error is None:
                    self._entries.append((message.offset() or 0, decode_as(BatchIndexEntry, message.value())))
                elif error.code() != KafkaError._PARTITION_EOF:
                    clients.raise_for(error, f"reading {self._index_topic}")
            if time.monotonic() >= deadline:
                return

    def _fetch(self, entry: BatchIndexEntry) -> TrainingBatch:
        wanted = (entry.partition, entry.offset)
        self._move_to(*wanted)
        deadline = time.monotonic() + self._wait_s
        while wanted not in self._ahead:
            for message in clients.at_hand(self._batches, 20, 0.02):
                self._keep(message, wanted)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"batch {entry.batch_id} at {self._batches_topic}[{entry.partition}] offset {entry.offset} did not "
                    f"come within {self._wait_s:g} s; the index names it, so look at the broker"
                )
        batch = decode_as(TrainingBatch, self._ahead.pop(wanted))
        # What lies before a batch the index names is either delivered or of an aborted transaction.
        self._ahead = {at: value for at, value in self._ahead.items() if at[0] != wanted[0] or at[1] > wanted[1]}
        if self._check_digests and not batch_digest(batch) == batch.digest == entry.digest:
            raise TopicError(
                f"batch {entry.batch_id} at {self._batches_topic}[{entry.partition}] offset {entry.offset} does not "
                f"match its digest; run `rollstream verify`"
            )
        return batch

    def _move_to(self, partition: int, offset: int) -> None:
        """Have the partition read from `offset`, unless it is on its way there already."""
        at = self._at.get(partition)
        if at is None:
            self._at[partition] = offset
            self._batches.incremental_assign([TopicPartition(self._batches_topic, partition, offset)])
        elif (partition, offset) not in self._ahead and not offset - _GAP <= at <= offset:
            self._at[partition] = offset
            self._batches.seek(TopicPartition(self._batches_topic, partition, offset))

    def _keep(self, message: Message, wanted: tuple[int, int]) -> None:
        error = message.error()
        if error is None:
            partition, offset = message.partition() or 0, message.offset() or 0
            self._at[partition] = offset + 1
            # The one that is waited for has a place however many of other partitions came before it.
            if len(self._ahead) < _MOST_AHEAD or (partition, offset) == wanted:
                self._ahead[partition, offset] = message.value() or b""
        elif error.code() != KafkaError._PARTITION_EOF:
            clients.raise_for(error, f"reading {self._batches_topic}")

    def close(self) -> None:
        """Close both consumers."""
        self._index.close()
        self._batches.close()

    def __enter__(self) -> "BatchReader":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

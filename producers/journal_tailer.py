"""Follows `journal` and `steps` of a run in a thread of its own, for flow control: `progress` is the newest seen.

At start it reads the last record of each journal partition, not the topic; `steps`, compacted, it reads from the start.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from producers.capacity import PartitionCounts, Progress, consumed_by
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, DeadlineExceeded, RecordError
from topics.records import JournalRecord, LearnerStep

_TIMEOUT_S = 30.0
_FIRST_LOOK_BACK = 16
_LEADERLESS = (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE)


class JournalTailer:
    """Keeps `progress` up to date between `start` and `close`; use it as a context manager."""

    def __init__(self, kafka: KafkaConfig, run: str, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress` is called in the tailer's thread after each change. Raises as clients.partitions_of does."""
        self._journal, self._steps = topic_name(run, "journal"), topic_name(run, "steps")
        self._rollouts = topic_name(run, "rollouts")
        self._kafka = kafka
        self._partitions = clients.partitions_of(kafka, self._journal)
        self._on_progress = on_progress
        self._stop = threading.Event()
        self._caught_up = threading.Event()
        self._error: Exception | None = None
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="journal-tailer", daemon=True)
        self.rollout_ends: dict[int, int] = {}
        """End of each partition of rollouts when the tailer started."""

    def start(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Start the thread and wait until both topics were read to where they ended."""
        self._thread.start()
        if not self._caught_up.wait(timeout_s):
            raise DeadlineExceeded(
                f"{self._journal} and {self._steps} were not read to their ends in {timeout_s:g} s; is the broker up?"
            )
        if self._error is not None:
            raise self._error

    @property
    def progress(self) -> Progress:
        """The newest progress seen. Raises what stopped the thread, if anything did."""
        if self._error is not None:
            raise self._error
        return self._progress

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        consumer = clients.reader(self._kafka)
        try:
            self._follow(consumer)
        except Exception as error:  # handed to whoever asks for `progress`, in its own thread
            self._error = error
        finally:
            self._caught_up.set()
            consumer.close()
            self._on_progress()

    def _follow(self, consumer: Consumer) -> None:
        self.rollout_ends = {
            p: _watermarks(consumer, self._rollouts, p)[1]
            for p in range(clients.partitions_of(self._kafka, self._rollouts))
        }
        positions = [self._after_last(consumer, p) for p in range(self._partitions)]
        clients.follow(consumer, self._kafka, [*positions, TopicPartition(self._steps, 0, OFFSET_BEGINNING)])
        behind = {(self._journal, p) for p in range(self._partitions)} | {(self._steps, 0)}
        while not self._stop.is_set():
            changed = False
            for message in clients.at_hand(consumer, 500, 0.02):
                error = message.error()
                if error is None:
                    changed |= self._take(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    behind.discard((message.topic() or "", message.partition() or 0))
                    if not behind:
                        self._caught_up.set()
                else:
                    clients.raise_for(error, f"following {message.topic()}")
            if changed:
                self._on_progress()

    def _after_last(self, consumer: Consumer, partition: int) -> TopicPartition:
        """Take the last journal record of a partition and return the position after it.

        Transaction markers take offsets too, so the last record is looked for at growing distances from the end.
        """
        low, high = _watermarks(consumer, self._journal, partition)
        distance = _FIRST_LOOK_BACK
        while high > low:
            start = max(low, high - distance)
            last = None
            read = clients.read_to_end(
                self._kafka, self._journal, partitions=[partition], start={partition: start}, timeout_s=_TIMEOUT_S
            )
            for message in read:
                last = message
            if last is not None:
                self._take(last)
                return TopicPartition(self._journal, partition, (last.offset() or 0) + 1)
            if start == low:
                break
            distance *= 16
        return TopicPartition(self._journal, partition, low)

    def _take(self, message: Message) -> bool:
        if message.value() is None:
            return False
        now = self._progress
        try:
            if message.topic() == self._journal:
                counts = PartitionCounts.of(decode_as(JournalRecord, message.value()))
                self._progress = Progress({**now.partitions, message.partition() or 0: counts}, now.consumed)
            else:
                # A learner that resumed writes steps again with the same totals: the highest is the newest.
                consumed = consumed_by(decode_as(LearnerStep, message.value()))
                self._progress = Progress(now.partitions, max(now.consumed, consumed))
        except RecordError as error:
            raise RecordError(f"{message.topic()}[{message.partition()}] offset {message.offset()}: {error}") from error
        return True


def _watermarks(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """First offset and end of a partition. Tries again where a topic just created has no leader yet."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            low, high = consumer.get_watermark_offsets(TopicPartition(topic, partition), _TIMEOUT_S)
            return low, high
        except KafkaException as error:
            if error.args[0].code() not in _LEADERLESS:
                clients.raise_for(error.args[0], f"asking for the ends of {topic}")
            if time.monotonic() > deadline:
                raise BrokerUnavailable(f"{topic}[{partition}] has no end: {error.args[0].str()}") from error
            time.sleep(0.05)

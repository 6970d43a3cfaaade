"""Follows `journal` and `steps` of a run in a thread of its own, for flow control: `progress` is the newest seen.

At start it reads the last record of each journal partition, not the topic; `steps`, compacted, it reads from the start.
"""

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition

from producers.capacity import PartitionCounts, Progress, consumed_by
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.following import TopicFollower
from topics.records import JournalRecord, LearnerStep
from topics.skipped import SkippedRecords

_FIRST_LOOK_BACK = 16


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
        self.skipped = SkippedRecords("journal-tailer")
        """Records that could not be read: progress is what the others say."""
        self.rollout_ends: dict[int, int] = {}
        """End of each partition of rollouts when the tailer started."""

    def start(self) -> None:
        """Start the thread and wait until both topics were read to where they ended."""
        self._thread.start()
        if not self._caught_up.wait(self._kafka.patience_s):
            raise DeadlineExceeded(
                f"{self._journal} and {self._steps} were not read to their ends in {self._kafka.patience_s:g} s; is "
                f"the broker up?"
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
            self._thread.join(self._kafka.patience_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # handed to whoever asks for `progress`, in its own thread
            self._error = error
        finally:
            self._caught_up.set()
            self._on_progress()

    def _follow(self) -> None:
        self.rollout_ends = {p: end for p, (_low, end) in clients.bounds(self._kafka, self._rollouts).items()}
        start = [self._after_last(p, *bounds) for p, bounds in clients.bounds(self._kafka, self._journal).items()]
        start.append(TopicPartition(self._steps, 0, OFFSET_BEGINNING))
        with closing(TopicFollower(self._kafka, start)) as follower:
            behind = {(place.topic, place.partition) for place in start}
            while not self._stop.is_set():
                messages = follower.poll(500, 0.02)
                for message in messages:
                    self._take(message)
                behind.difference_update(follower.ends)
                if not behind:
                    self._caught_up.set()
                if messages:
                    self._progress = replace(self._progress, skipped=self.skipped.total)
                    self._on_progress()

    def _after_last(self, partition: int, low: int, high: int) -> TopicPartition:
        """Take the last journal record of a partition that can be read, and return the position after those seen.

        Transaction markers take offsets too, so the last record is looked for at growing distances from the end.
        """
        resume, stop, distance = low, high, _FIRST_LOOK_BACK
        while stop > low:
            start = max(low, stop - distance)
            newest = None
            reading = clients.read_to_end(self._kafka, self._journal, partitions=[partition], start={partition: start})
            with closing(reading) as messages:
                for message in messages:
                    if (offset := message.offset() or 0) >= stop:
                        break
                    resume = max(resume, offset + 1)
                    newest = self.skipped.decode(JournalRecord, message) or newest
            if newest is not None:
                self._grouped(partition, newest)
                break
            stop, distance = start, distance * 16
        return TopicPartition(self._journal, partition, resume)

    def _take(self, message: Message) -> None:
        if message.topic() == self._journal:
            record = self.skipped.decode(JournalRecord, message)
            if record is not None:
                self._grouped(message.partition() or 0, record)
        else:
            step = self.skipped.decode(LearnerStep, message)
            if step is not None:
                # A learner that resumed writes steps again with the same totals: the highest is the newest.
                self._progress = replace(self._progress, consumed=max(self._progress.consumed, consumed_by(step)))

    def _grouped(self, partition: int, record: JournalRecord) -> None:
        counts = PartitionCounts.of(record)
        self._progress = replace(self._progress, partitions={**self._progress.partitions, partition: counts})

"""Follows `journal`, `batch-index` and `steps` of a run in a thread of its own, for flow control: `progress` is the
newest seen.

At start it reads each journal partition from the last record on that holds every count, not the topic; the other two
it reads from the beginning.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition

from producers.capacity import PartitionCounts, Progress
from producers.consumption import Consumption
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import DeadlineExceeded
from topics.following import TopicFollower
from topics.journal_counts import JournalCounts, holds_all
from topics.records import BatchIndexEntry, JournalRecord, LearnerStep, RetiredLearner
from topics.retired import note_retired
from topics.skipped import SkippedRecords

_FIRST_LOOK_BACK = 16


class JournalTailer:
    """Keeps `progress` up to date between `start` and `close`; use it as a context manager."""

    def __init__(self, kafka: KafkaConfig, run: str, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress` is called in the tailer's thread after each change. Raises as clients.partitions_of does."""
        self._journal, self._steps = topic_name(run, "journal"), topic_name(run, "steps")
        self._rollouts, self._index = topic_name(run, "rollouts"), topic_name(run, "batch-index")
        self._control = topic_name(run, "control")
        self._retired: dict[str, RetiredLearner] = {}
        self._name = run
        self._kafka = kafka
        self._partitions = clients.partitions_of(kafka, self._journal)
        self._on_progress = on_progress
        self._stop = threading.Event()
        self._caught_up = threading.Event()
        self._error: Exception | None = None
        self._progress = Progress()
        self._counts: defaultdict[int, JournalCounts] = defaultdict(JournalCounts)
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
                f"{self._journal}, {self._index} and {self._steps} were not read to their ends in "
                f"{self._kafka.patience_s:g} s; is the broker up?"
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
        first, _end = clients.bounds(self._kafka, self._index)[0]
        self._consumption = Consumption(self._name, pruned=first > 0)
        start = [self._after_last(p, *bounds) for p, bounds in clients.bounds(self._kafka, self._journal).items()]
        self._consumption.retired = self._retired
        start += [TopicPartition(topic, 0, OFFSET_BEGINNING) for topic in (self._index, self._steps, self._control)]
        with closing(TopicFollower(self._kafka, start)) as follower:
            behind = {(place.topic, place.partition) for place in start}
            while not self._stop.is_set():
                messages = follower.poll(500, 0.02)
                for message in messages:
                    self._take(message)
                if (self._index, 0) in follower.ends:
                    self._consumption.reached_end()
                behind.difference_update(follower.ends)
                if messages or not (behind or self._caught_up.is_set()):
                    consumed, skipped = self._consumption.consumed, self.skipped.total
                    self._progress = replace(self._progress, consumed=consumed, skipped=skipped)
                    self._on_progress()
                if not behind:
                    self._caught_up.set()

    def _after_last(self, partition: int, low: int, high: int) -> TopicPartition:
        """Take the journal of a partition from the last record on that holds every count, and return the position
        after those seen.

        That record is looked for at growing distances from the end.
        """
        resume, stop, distance = low, high, _FIRST_LOOK_BACK
        records: list[JournalRecord] = []
        while stop > low and not any(map(holds_all, records)):
            start = max(low, stop - distance)
            earlier = []
            reading = clients.read_to_end(self._kafka, self._journal, partitions=[partition], start={partition: start})
            with closing(reading) as messages:
                for message in messages:
                    if (offset := message.offset() or 0) >= stop:
                        break
                    resume = max(resume, offset + 1)
                    if (record := self.skipped.decode(JournalRecord, message)) is not None:
                        earlier.append(record)
            records = earlier + records
            stop, distance = start, distance * 16
        if records:
            self._grouped(partition, *records)
        return TopicPartition(self._journal, partition, resume)

    def _take(self, message: Message) -> None:
        if message.topic() == self._journal:
            record = self.skipped.decode(JournalRecord, message)
            if record is not None:
                self._grouped(message.partition() or 0, record)
        elif message.topic() == self._index:
            entry = self.skipped.decode(BatchIndexEntry, message)
            if entry is not None:
                with self.skipped.passing(message):
                    self._consumption.entry(message.offset() or 0, entry)
        elif message.topic() == self._control:
            note_retired(self._retired, message, self.skipped)
        else:
            step = self.skipped.decode(LearnerStep, message)
            if step is not None:
                self._consumption.step(step)

    def _grouped(self, partition: int, *records: JournalRecord) -> None:
        for record in records:
            self._counts[partition].add(record)
        newest = records[-1]
        counts = PartitionCounts.of(newest.position, self._counts[partition])
        self._consumption.grouped(partition, newest.batch_number, counts.batched)
        self._progress = replace(self._progress, partitions={**self._progress.partitions, partition: counts})

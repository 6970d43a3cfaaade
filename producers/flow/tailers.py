"""Followers of a run's topics in separate threads, for the flow control of workers and gateways.

At start a JournalTailer reads each journal partition from the last record that holds every count, and the other topics
from the beginning. It looks into `rollouts` once, for the last record that grouping has not read.

A LabelTailer reads the committed positions of the labeling processes, so it costs two requests a second, however many
rollouts are labeled.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Self

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import FlowControl, LabelingPosition, PartitionProgress, RunProgress
from rollstream.producers.flow.rollout_counts import EnvironmentCounts, LearnerConsumption
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import RETIRED, note_named
from rollstream.topics.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.reader import Reader, ends_of_records, read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import BatchIndexEntry, JournalRecord, LearnerStep, RetiredLearner
from rollstream.topics.records.journal import JournalCounts
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)


class Tailer(Closing):
    """Runs `_follow` in a thread between `start` and `close`; use it as a context manager."""

    def __init__(self, kafka: KafkaConfig, name: str) -> None:
        self._kafka = kafka
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._kafka.patience_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def _check(self) -> None:
        """Raise the error that stopped the thread, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # `_check` raises it in the caller's thread
            self._error = error

    def _follow(self) -> None:
        """Follow until `_stop` is set; subclasses define it."""
        raise NotImplementedError


_FIRST_LOOK_BACK = 16


class JournalTailer(Tailer):
    """Keeps `progress` up to date."""

    def __init__(self, kafka: KafkaConfig, run: str, *, on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress` is called in the tailer's thread after each change. Raises as `partitions_of` does."""
        super().__init__(kafka, "journal-tailer")
        self._journal, self._steps = topic_name(run, "journal"), topic_name(run, "steps")
        self._rollouts, self._index = topic_name(run, "rollouts"), topic_name(run, "batch-index")
        self._control = topic_name(run, "control")
        self._retired: dict[str, RetiredLearner] = {}
        self._name = run
        self._partitions = topic_admin.partitions_of(kafka, self._journal)
        self._on_progress = on_progress
        self._caught_up = threading.Event()
        self._progress = RunProgress()
        self._counts: defaultdict[int, JournalCounts] = defaultdict(JournalCounts)
        self._environments = EnvironmentCounts()
        self.skipped = SkippedRecords("journal-tailer")
        """Records that could not be read; progress is computed without them."""
        self.rollout_ends: dict[int, int] = {}
        """Offset after the last record of each partition of rollouts when the tailer started; the position of grouping
        if it is higher. Transaction markers do not count, because no position passes those that come last."""

    def start(self) -> None:
        """Start the thread, and wait until the topics are read to the ends that they had at the start."""
        super().start()
        if not self._caught_up.wait(self._kafka.patience_s):
            raise DeadlineExceeded(
                f"{self._journal}, {self._index} and {self._steps} were not read to their ends in "
                f"{self._kafka.patience_s:g} s; is the broker up?"
            )
        self._check()

    @property
    def progress(self) -> RunProgress:
        """The newest progress. Raises the error that stopped the thread, if any."""
        self._check()
        return self._progress

    def _run(self) -> None:
        super()._run()
        self._caught_up.set()
        self._on_progress()

    def _follow(self) -> None:
        first, _end = topic_admin.bounds(self._kafka, self._index)[0]
        self._consumption = LearnerConsumption(self._name, pruned=first > 0)
        bounds = topic_admin.bounds(self._kafka, self._journal)
        start = {(self._journal, p): self._after_last(p, begin, end) for p, (begin, end) in bounds.items()}
        positions = {p: self._progress.position(p) for p in range(self._partitions)}
        self.rollout_ends = ends_of_records(self._kafka, self._rollouts, positions)
        self._consumption.retired = self._retired
        start |= {(topic, 0): BEGINNING for topic in (self._index, self._steps, self._control)}
        with closing(TopicFollower(self._kafka, start)) as follower:
            behind = set(start)
            while not self._stop.is_set():
                messages = follower.poll(500, 0.02)
                for message in messages:
                    self._apply(message)
                if (self._index, 0) in follower.ends:
                    self._consumption.end_index()
                behind.difference_update(follower.caught_up)
                if messages or not (behind or self._caught_up.is_set()):
                    consumed, skipped = self._consumption.consumed, self.skipped.total
                    self._progress = replace(
                        self._progress,
                        consumed=consumed,
                        skipped=skipped,
                        by_environment=self._environments.outstanding(consumed),
                    )
                    self._on_progress()
                if not behind:
                    self._caught_up.set()

    def _after_last(self, partition: int, low: int, high: int) -> int:
        """Apply the journal of a partition from the last record that holds every count; return the next offset to read.

        The search for that record goes back from the end over growing distances.
        """
        resume, stop, distance = low, high, _FIRST_LOOK_BACK
        records: list[JournalRecord] = []
        while stop > low and not any(record.snapshot for record in records):
            start = max(low, stop - distance)
            earlier = []
            reading = read_to_end(self._kafka, self._journal, partitions=[partition], start={partition: start})
            with closing(reading) as messages:
                for message in messages:
                    if (offset := message.offset) >= stop:
                        break
                    resume = max(resume, offset + 1)
                    if (record := self.skipped.decode(JournalRecord, message)) is not None:
                        earlier.append(record)
            records = earlier + records
            stop, distance = start, distance * 16
        if records:
            self._apply_journal(partition, *records)
        return resume

    def _apply(self, message: KafkaRecord) -> None:
        if message.topic == self._journal:
            record = self.skipped.decode(JournalRecord, message)
            if record is not None:
                self._apply_journal(message.partition, record)
        elif message.topic == self._index:
            entry = self.skipped.decode(BatchIndexEntry, message)
            if entry is not None:
                with self.skipped.passing(message):
                    self._consumption.add_entry(message.offset, entry)
        elif message.topic == self._control:
            note_named(self._retired, RETIRED, RetiredLearner, message, self.skipped)
        else:
            step = self.skipped.decode(LearnerStep, message)
            if step is not None:
                self._consumption.add_step(step)

    def _apply_journal(self, partition: int, *records: JournalRecord) -> None:
        for record in records:
            self._counts[partition].add(record)
            self._environments.add(partition, self._counts[partition])
        newest = records[-1]
        counts = PartitionProgress.of(newest.position, self._counts[partition])
        self._consumption.add_journal(partition, newest.batch_number, counts.batched)
        self._progress = replace(self._progress, partitions={**self._progress.partitions, partition: counts})


_INTERVAL_S = 0.5


class LabelTailer(Tailer):
    """Keeps `positions` up to date."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str) -> None:
        """`group` is the full name of the consumer group of the labeling processes."""
        super().__init__(kafka, "label-tailer")
        self._group = group
        self._topic = topic_name(run, "unlabelled")
        self._positions: dict[int, LabelingPosition] = {}
        self.waiting: dict[int, range] = {}
        """Offsets that waited for a label when the tailer started, by partition."""

    def start(self) -> None:
        """Read the positions once and start the thread. Raises TopicError, BrokerUnavailable."""
        # Read the ends first, so that rollouts labeled before the positions are read do not count as waiting.
        bounds = topic_admin.bounds(self._kafka, self._topic)
        with closing(Reader(self._kafka, group=self._group)) as reader:
            self._positions = self._read(reader, len(bounds))
        for partition, (begin, end) in bounds.items():
            labeled = self._positions.get(partition)
            self.waiting[partition] = range(max(begin, labeled.position if labeled else begin), end)
        super().start()

    @property
    def positions(self) -> dict[int, LabelingPosition]:
        """The newest positions, by partition; none before labeling has begun. Raises the error that stopped the
        thread, if any."""
        self._check()
        return self._positions

    def _follow(self) -> None:
        with closing(Reader(self._kafka, group=self._group)) as reader:
            while not self._stop.wait(_INTERVAL_S):
                self._update(lambda: self._read(reader, len(self.waiting)))

    def _update(self, read: Callable[[], dict[int, LabelingPosition]]) -> None:
        try:
            self._positions = read()
        except BrokerUnavailable as error:
            # An open transaction hides the positions; old positions only make the worker wait longer.
            event(logger, "labeling_positions_not_read", level=logging.WARNING, error=str(error))

    def _read(self, reader: Reader, partitions: int) -> dict[int, LabelingPosition]:
        places = reader.committed(self._topic, range(partitions), f"reading offsets of group {self._group}")
        return {
            place.partition: LabelingPosition(place.offset, LabelingProgress.decode(place).written)
            for place in places
            if place.offset >= 0
        }


async def open_flow(
    stack: ExitStack,
    kafka: KafkaConfig,
    run: str,
    capacity: CapacityConfig | None,
    labeled: Collection[str] = (),
    labeling_group: str = "",
) -> tuple[FlowControl | None, Callable[[], RunProgress] | None]:
    """Return the flow control and a reader of the run's progress, both None without `capacity`.

    `stack` closes the clients. `labeled` are the environments whose rollouts wait for labels, and `labeling_group` is
    the full name of the labelers' consumer group. Raises ConfigurationError, TopicError, BrokerUnavailable.
    """
    if capacity is None:
        return None, None
    if labeled and not labeling_group:
        raise ConfigurationError(f"environments {', '.join(labeled)} wait for labels, but no labeling_group is given")
    tailer = JournalTailer(kafka, run)
    stack.callback(tailer.close)
    await asyncio.to_thread(tailer.start)
    if not labeled:
        return FlowControl(capacity, tailer.rollout_ends), lambda: tailer.progress
    labels = LabelTailer(kafka, run, labeling_group)
    stack.callback(labels.close)
    await asyncio.to_thread(labels.start)
    flow = FlowControl(capacity, tailer.rollout_ends, labels.waiting)
    return flow, lambda: replace(tailer.progress, labeling=labels.positions)

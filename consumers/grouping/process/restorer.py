"""Restores the tasks of assigned partitions one by one, in short steps."""

from collections.abc import Collection, Iterable

from rollstream.consumers.grouping.config import GrouperConfig, largest_batch_bytes
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.process.restoration import Restoration, RestoreProgress, reader_of_restores
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.skipped_records import SkippedRecords


class Restorer:
    """Partitions whose task is to be restored, and the restore in progress."""

    def __init__(
        self, kafka: KafkaConfig, run: str, grouper: GrouperConfig, name: str, skipped: SkippedRecords
    ) -> None:
        """`name` is the name of the process, for the marks of its tasks. Raises TopicError if `rollouts` is missing."""
        self._kafka, self._run, self._grouper, self._name, self._skipped = kafka, run, grouper, name, skipped
        self._topic = topic_name(run, "rollouts")
        self._partitions = topic_admin.partitions_of(kafka, self._topic)
        self._topic_id = topic_admin.topic_ids(kafka, [self._topic])[self._topic]
        self.waiting: set[int] = set()
        """Partitions to restore, including the partition of the restore in progress."""
        self._restoration: Restoration | None = None
        self._reader: Reader | None = None

    @property
    def restoring(self) -> bool:
        """Whether a restore is in progress."""
        return self._restoration is not None

    @property
    def progress(self) -> dict[int, RestoreProgress]:
        """Progress of the restore in progress, by partition."""
        return {} if self._restoration is None else {self._restoration.partition: self._restoration.progress}

    def add(self, partitions: Iterable[int]) -> None:
        """Add partitions to restore."""
        self.waiting.update(partitions)

    def withdraw(self, partitions: Collection[int] | None = None) -> None:
        """Stop restoring these partitions, or all partitions for None."""
        self.waiting.difference_update(list(self.waiting) if partitions is None else partitions)
        if self._restoration is not None and self._restoration.partition not in self.waiting:
            self._stop()
        if not self.waiting:
            self._close_reader()

    def close(self) -> None:
        """Stop the restore in progress."""
        self._stop()
        self._close_reader()

    def _stop(self) -> None:
        if self._restoration is not None:
            self._restoration.close()
            self._restoration = None

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def check_partitions(self, partitions: int) -> None:
        """Raise StateRefused if the topic has more partitions than when the process started."""
        if partitions > self._partitions:
            raise StateRefused(
                f"{self._topic} has {partitions} partitions, but had {self._partitions} when this process started; "
                f"keys have moved, and the new partitions have no journal: `rollstream fork` the run into another with "
                f"more partitions, or start a run of another name"
            )

    def begin(self) -> None:
        """Begin to restore the first waiting partition."""
        if self._reader is None:
            self._reader = reader_of_restores(self._kafka, self._run, self._grouper)
        self._restoration = Restoration(
            self._kafka,
            self._run,
            min(self.waiting),
            self._partitions,
            self._topic_id,
            self._grouper,
            self._skipped,
            self._reader,
        )

    def step(self, for_s: float) -> GroupingTask | None:
        """Continue the restore in progress for about `for_s` seconds; return its task once it is done.

        Raises StateRefused as `Restoration` does.
        """
        assert self._restoration is not None
        if not self._restoration.step(for_s):
            return None
        assert self._restoration.restored is not None
        room = largest_batch_bytes(self._kafka.max_record_bytes)
        task = GroupingTask(*self._restoration.restored, self._grouper, self._name, room)
        self._restoration = None
        return task

"""Restores the tasks of assigned partitions, a few at once, in short steps, and seeks the client to their positions."""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing

from rollstream.consumers.grouping.config import GrouperConfig, largest_batch_bytes
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.process.restoration import Restoration, RestoreProgress, reader_of_restores
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.groups import GroupMember, NotFetching
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Number of restores in progress: while the records of one are folded, the clients of the others fetch."""


class Restorer:
    """Partitions whose task is to be restored, and the restores in progress."""

    def __init__(
        self, kafka: KafkaConfig, run: str, grouper: GrouperConfig, name: str, skipped: SkippedRecords
    ) -> None:
        """`name` is the name of the process, for the marks of its tasks. Raises TopicError if `rollouts` is missing."""
        self._kafka, self._run, self._grouper, self._name, self._skipped = kafka, run, grouper, name, skipped
        self._topic = topic_name(run, "rollouts")
        self._partitions = topic_admin.partitions_of(kafka, self._topic)
        self._topic_id = topic_admin.topic_ids(kafka, [self._topic])[self._topic]
        self.waiting: set[int] = set()
        """Partitions to restore, including those of the restores in progress."""
        self._restorations: dict[int, tuple[Restoration, Reader]] = {}
        """Restores in progress, by partition; the first one is continued next."""
        self._readers: list[Reader] = []
        """Readers for the next restores."""

    @property
    def restoring(self) -> bool:
        """Whether a restore is in progress."""
        return bool(self._restorations)

    @property
    def progress(self) -> dict[int, RestoreProgress]:
        """Progress of the restores in progress, by partition."""
        return {partition: restoration.progress for partition, (restoration, _) in self._restorations.items()}

    def add(self, partitions: Iterable[int]) -> None:
        """Add partitions to restore."""
        self.waiting.update(partitions)

    def withdraw(self, partitions: Collection[int] | None = None) -> None:
        """Stop restoring these partitions, or all partitions for None."""
        self.waiting.difference_update(list(self.waiting) if partitions is None else partitions)
        for partition in self._restorations.keys() - self.waiting:
            self._stop(partition)
        if not self.waiting:
            self._close_readers()

    def close(self) -> None:
        """Stop the restores in progress."""
        for partition in list(self._restorations):
            self._stop(partition)
        self._close_readers()

    def _stop(self, partition: int) -> None:
        restoration, reader = self._restorations.pop(partition)
        restoration.close()
        self._readers.append(reader)

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def check_partitions(self, partitions: int) -> None:
        """Raise StateRefused if the topic has more partitions than when the process started."""
        if partitions > self._partitions:
            raise StateRefused(
                f"{self._topic} has {partitions} partitions, but had {self._partitions} when this process started; "
                f"keys have moved, and the new partitions have no journal: `rollstream fork` the run into another with "
                f"more partitions, or start a run of another name"
            )

    def begin(self) -> None:
        """Begin to restore the first waiting partitions."""
        for partition in sorted(self.waiting - self._restorations.keys())[: AT_ONCE - len(self._restorations)]:
            place = self._kafka, self._run, partition, self._partitions, self._topic_id
            reader = self._readers.pop() if self._readers else reader_of_restores(self._kafka, self._run, self._grouper)
            asking = next((used for _, used in self._restorations.values()), reader)
            restoration = Restoration(*place, self._grouper, self._skipped, reader, asking)
            self._restorations[partition] = restoration, reader

    def step(self, for_s: float) -> GroupingTask | None:
        """Continue the restores in progress in turns for about `for_s` seconds; return a task as soon as it is done.

        Raises StateRefused as `Restoration` does.
        """
        until = time.monotonic() + for_s
        while True:
            partition = next(iter(self._restorations))
            restoration, reader = self._restorations.pop(partition)
            self._restorations[partition] = restoration, reader
            if restoration.step(0.0):
                self._stop(partition)
                assert restoration.restored is not None
                room = largest_batch_bytes(self._kafka.max_record_bytes)
                return GroupingTask(*restoration.restored, self._grouper, self._name, room)
            if time.monotonic() >= until:
                return None


class Seeks:
    """Partitions in which the client has to seek, and the offsets of its last seeks."""

    def __init__(self, kafka: KafkaConfig, topic: str, member: GroupMember) -> None:
        """`topic` is the full name of the member's topic."""
        self._kafka, self._topic, self._member = kafka, topic, member
        self._wanted: set[int] = set()
        self._put_off: set[int] = set()
        """Partitions whose delayed seek was logged."""
        self._sought: dict[int, int] = {}
        """Offset of the client's last seek, by partition, until a record or the partition's end confirms it."""

    def __contains__(self, partition: int) -> bool:
        """Whether a partition's seek is outstanding; until the seek, records are ignored."""
        return partition in self._wanted

    def want(self, partition: int) -> None:
        """Have the next `seek` include a partition."""
        self._wanted.add(partition)

    def forget(self, partitions: Iterable[int]) -> None:
        """Forget outstanding seeks in partitions that were taken away."""
        self._wanted.difference_update(partitions)

    def seek(self, tasks: Mapping[int, GroupingTask]) -> None:
        """Seek to the positions of tasks with outstanding seeks; the next call repeats seeks that failed."""
        for partition in sorted(self._wanted):
            task = tasks.get(partition)
            try:
                if task is not None:
                    self._member.seek(partition, task.fold.position)
                    self._sought[partition] = task.fold.position
                self._wanted.discard(partition)
                self._put_off.discard(partition)
            except NotFetching as error:
                # The partition may also have been taken away, which the member may learn later.
                if partition not in self._put_off:
                    self._put_off.add(partition)
                    event(logger, "seek_put_off", partition=partition, error=str(error))

    def confirm(self, partition: int, offset: int) -> bool:
        """Return whether no record lies between the offset of the last seek and the first offset returned after it.

        A client that seeks while its own request for the partition's end offset is pending continues at the offset in
        the response, and leaves out the records before that offset. If there are any, the client seeks again.
        """
        sought = self._sought.pop(partition, offset)
        if offset <= sought:
            return True
        with closing(read_to_end(self._kafka, self._topic, partitions=[partition], start=sought)) as between:
            first = next(between, None)
        if first is None or first.offset >= offset:
            return True  # transaction markers alone
        event(logger, "seek_repeated", level=logging.WARNING, partition=partition, sought=sought, offset=offset)
        self.want(partition)
        return False

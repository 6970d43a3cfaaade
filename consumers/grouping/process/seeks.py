"""Seeks of the client to the positions of restored tasks; records from before the seek or past a gap are ignored."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing

from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.groups import GroupMember, NotFetching
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


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

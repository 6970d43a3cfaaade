"""The tasks of one membership: each is restored when its partition is assigned, and suspended when it is revoked.

The task of an assigned partition waits for its restore, has the client seek to its position, and then runs. A
suspended task runs again without a restore if no other process has committed for its partition in the meantime. If a
transaction was aborted because ownership was lost, every task is restored. A task whose partition an operator pauses
keeps its state, reads nothing and writes no marks; it is restored after the pause.
"""

import logging
import time
from collections.abc import Collection, Mapping
from types import MappingProxyType

from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.rollout_reader import read_rollouts
from rollstream.consumers.grouping.process.committer import CommitPace, Committer
from rollstream.consumers.grouping.process.restoration import records_of
from rollstream.consumers.grouping.process.restorer import Restorer, Seeks
from rollstream.consumers.transactions import OwnershipLost
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.groups import GroupMember
from rollstream.topics.kafka.reader import Polled
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata

logger = logging.getLogger(__name__)
_SLICE_S = 0.25
"""Duration of restores between two polls; a member that does not poll loses its partitions."""


class TaskManager:
    """Tasks of the partitions that the group assigns to a member."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        member: GroupMember,
        restorer: Restorer,
        committer: Committer,
        pace: CommitPace,
    ) -> None:
        self._pace = pace
        self._topic = topic_name(run, "rollouts")
        self._member, self._restorer, self._committer = member, restorer, committer
        self._tasks: dict[int, GroupingTask] = {}
        self._suspended: dict[int, GroupingTask] = {}
        """Tasks whose partition was taken away, kept to run again unless another process commits for the partition."""
        self._seeks = Seeks(kafka, self._topic, member)
        self._paused: frozenset[int] = frozenset()
        """Paused partitions, whether or not this process owns them."""
        self.tasks: Mapping[int, GroupingTask] = MappingProxyType(self._tasks)
        """Restored tasks, by partition."""

    @property
    def wait_s(self) -> float:
        """How long a poll may wait for its first record; 0 while there are restores to continue."""
        if self._restorer.waiting:
            return 0.0
        return self._pace.wait_s(batches=self._has_batches, free=self._committer.done)

    @property
    def _has_batches(self) -> bool:
        return any(task.fold.has_batches for task in self._tasks.values())

    # ------------------------------------------------------------------ rebalances

    def assign(self, partitions: list[int]) -> None:
        """Restore the tasks of partitions that were assigned."""
        event(logger, "assigned", partitions=partitions)
        self._restorer.add(partitions)

    def revoke(self, partitions: list[int]) -> None:
        """Commit and suspend the tasks of partitions that are about to be taken away."""
        event(logger, "revoked", partitions=partitions)
        self._commit_at_once(partitions)
        self._suspended = {p: self._tasks.pop(p) for p in partitions if p in self._tasks}
        self._seeks.forget(partitions)
        self._restorer.withdraw(partitions)

    def _commit_at_once(self, partitions: Collection[int]) -> None:
        try:
            self._committer.begin(
                self._tasks[p] for p in partitions if p in self._tasks and self._tasks[p].fold.changed
            )
            self._committer.settle()
        except OwnershipLost as error:
            self._ownership_lost(error)

    def lose(self, partitions: list[int]) -> None:
        """Drop the tasks of partitions that were already taken away; nothing can be committed for them."""
        event(logger, "lost", level=logging.WARNING, partitions=partitions)
        for partition in partitions:
            self._tasks.pop(partition, None)
        self._seeks.forget(partitions)
        self._restorer.withdraw(partitions)

    def abandon(self) -> None:
        """Drop every task without a commit, and cancel all restores."""
        self._drop_tasks()
        self._restorer.withdraw()

    def close(self) -> None:
        """Stop the restore in progress."""
        self._restorer.close()

    def _ownership_lost(self, error: OwnershipLost) -> None:
        """Restore every task from its committed state, because the transaction was aborted."""
        event(logger, "ownership_lost", level=logging.WARNING, error=str(error))
        self._drop_tasks()
        self._restorer.add(self._member.assignment)

    def _drop_tasks(self) -> None:
        self._tasks.clear()
        self._suspended.clear()

    # ------------------------------------------------------------------ pauses

    @property
    def running(self) -> Mapping[int, GroupingTask]:
        """Restored tasks whose partition is not paused, by partition."""
        return {partition: task for partition, task in self._tasks.items() if partition not in self._paused}

    @property
    def paused(self) -> set[int]:
        """Partitions of restored tasks that are paused."""
        return self._tasks.keys() & self._paused

    def pause(self, partitions: Collection[int]) -> None:
        """Pause exactly these partitions; tasks of resumed partitions are restored, so that they heed new skips."""
        begun, over = set(partitions) - self._paused, self._paused - set(partitions)
        self._paused = frozenset(partitions)
        for partition in sorted(begun & self._tasks.keys()):
            self._hold(partition)
        if continued := sorted(over & self._tasks.keys()):
            self._commit_at_once(continued)
            for partition in continued:
                event(logger, "partition_resumed", partition=partition)
                self._tasks.pop(partition, None)
            self._restorer.add(continued)

    def _hold(self, partition: int) -> None:
        event(logger, "partition_paused", level=logging.WARNING, partition=partition)
        self._seeks.forget([partition])
        self._member.pause([partition])

    # ------------------------------------------------------------------ restores

    def restore(self) -> bool:
        """Continue the restores for a short time; then the client is polled again, and running tasks continue.

        A partition is not fetched during its restore. Returns whether there are tasks and all of them are restored.
        """
        until = time.monotonic() + _SLICE_S
        while self._restorer.waiting:
            if not self._restorer.restoring:
                self._begin_restoring()
            elif (task := self._restorer.step(max(0.0, until - time.monotonic()))) is not None:
                self._restored(task)
            if time.monotonic() >= until:
                return False
        return bool(self._tasks)

    def _begin_restoring(self) -> None:
        self._restorer.check_partitions(max(self._restorer.waiting) + 1)
        try:
            self._committer.settle()
        except OwnershipLost as error:
            self._ownership_lost(error)
        for partition in sorted(self._restorer.waiting & self._suspended.keys()):
            if self._last_journal(partition) == self._suspended[partition].journal_offset:
                # No other process has committed since the task was suspended, so the fold still agrees with the log.
                self._restored(self._suspended[partition])
        self._suspended.clear()
        if self._restorer.waiting:
            self._member.pause(self._restorer.waiting)
            self._restorer.begin()

    def _last_journal(self, partition: int) -> int:
        [committed] = self._member.committed(self._topic, [partition], "reading committed offsets")
        return CommitMetadata.decode(committed.metadata, f"{self._topic}[{partition}]").journal

    def _restored(self, task: GroupingTask) -> None:
        self._tasks[task.partition] = task
        self._restorer.withdraw([task.partition])
        if task.partition in self._paused:
            self._hold(task.partition)
        else:
            self._seeks.want(task.partition)
            self._member.resume([task.partition])

    def seek(self) -> None:
        """Seek the client to the positions of restored tasks."""
        self._seeks.seek(self._tasks)

    # ------------------------------------------------------------------ records and commits

    def take_in(self, polled: Polled) -> None:
        """Pass records to the running tasks, and note which tasks have reached the ends of their partitions."""
        self._pace.passed(len(polled.records))
        try:
            rollouts = read_rollouts([record.value for record in polled.records])
        except Exception:  # Each task then reads its records one by one, and names the one at which a check fails.
            rollouts = [None] * len(polled.records)
        for record, rollout in zip(polled.records, rollouts, strict=True):
            task = self._reading(record.partition)
            if task is not None and self._seeks.confirm(record.partition, record.offset):
                task.apply(records_of(record, rollout), record.leader_epoch)
        for (_topic, partition), end in polled.ends.items():
            task = self._reading(partition)
            # If a record arrived after the end was reached, the position is past that end.
            at_end = self._member.positions[self._topic, partition] <= end
            if at_end and task is not None and self._seeks.confirm(partition, end):
                task.reach_end(end)

    def _reading(self, partition: int) -> GroupingTask | None:
        """Return the task that reads the records of a partition; None while it is seeking or paused."""
        return None if partition in self._seeks or partition in self._paused else self._tasks.get(partition)

    def commit(self, *, closing: bool = False) -> None:
        """Begin a transaction with the changed tasks if one is due; reading continues while it is in progress.

        There is one transaction at a time. When `closing`, every task is committed with a snapshot, and the call waits
        for the transaction.
        """
        tasks = [task for task in self._tasks.values() if closing or task.fold.changed]
        if not closing:
            free = self._committer.done
            if tasks and not self._pace.is_due(batches=self._has_batches, free=free):
                tasks = []
            if not tasks and not free:
                return
        try:
            self._committer.begin(tasks, closing=closing)
            if tasks:
                self._pace.begun()
            if closing:
                self._committer.settle()
        except OwnershipLost as error:
            self._ownership_lost(error)

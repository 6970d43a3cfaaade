"""Commits tasks in transactions, one at a time, while the tasks read on; reports what was committed."""

import logging
from collections.abc import Iterable

from rollstream.consumers.grouping.core.effects import Effects
from rollstream.consumers.grouping.core.grouping_task import GroupingTask, TaskCommit
from rollstream.consumers.grouping.process.grouping_metrics import GroupingFigures
from rollstream.consumers.grouping.process.transaction_publisher import TransactionPublisher
from rollstream.topics.logs import event
from rollstream.topics.traces.spans import SPANS
from rollstream.topics.traces.stages import batch_committed

logger = logging.getLogger(__name__)


class Committer:
    """The transaction in progress, if there is one."""

    def __init__(self, run: str, group: str, publisher: TransactionPublisher, figures: GroupingFigures) -> None:
        """`group` is the full name of the consumer group."""
        self._run, self._group = run, group
        self._publisher = publisher
        self._figures = figures
        self._publishing: list[TaskCommit] = []
        """Parts of the transaction that was begun."""

    @property
    def done(self) -> bool:
        """Whether `settle` would return without waiting."""
        return self._publisher.done

    def begin(self, tasks: Iterable[GroupingTask], *, closing: bool = False) -> None:
        """Settle the last transaction, then begin one with the effects of these tasks, if there are any tasks.

        Raises OwnershipLost or Fenced as `settle` does.
        """
        self.settle()
        commits = [task.prepare_commit(closing=closing) for task in tasks]
        if commits:
            self._publishing = commits
            self._publisher.begin(commits)

    def settle(self) -> None:
        """Wait for the transaction in progress.

        Raises OwnershipLost if it was aborted and partitions may belong to another process, and Fenced if another
        process runs under the same ordinal.
        """
        commits, self._publishing = self._publishing, []
        self._publisher.settle()
        if commits:
            self._figures.committed([commit.effects for commit in commits], self._publisher.latest_s)
        for commit in commits:
            _report(commit.effects)
            for batch in commit.effects.batches if SPANS.enabled else ():
                offset = self._publisher.batch_offsets.get(batch.batch_id, -1)
                batch_committed(self._run, self._group, batch, offset, self._publisher.latest_s)


def _report(effects: Effects) -> None:
    for batch in effects.encoded:
        event(logger, "batch", batch=batch.batch_id, rollouts=batch.entry.rollouts, cut=batch.cut)
    for letter in effects.dead_letters:
        event(
            logger,
            "dead_letter",
            level=logging.WARNING,
            partition=effects.journal.partition,
            offset=letter.record.offset,
            error=letter.error,
        )

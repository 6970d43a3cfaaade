"""The number of unread offsets of a task: transaction markers take offsets, and are never read."""

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.consumers.grouping.testing import example_rollout
from tests.support.pairs import driver


def test_what_lies_before_an_end_that_was_reached_is_no_lag() -> None:
    d = driver()
    task = GroupingTask(d.fold, JournalPointers(0, 0), GrouperConfig(), "test")
    assert task.lag(0) == 0
    d.pipe(example_rollout("open", 1.0))
    assert (task.lag(1), task.lag(2)) == (0, 1)
    task.reach_end(2)
    assert (task.lag(2), task.lag(5)) == (0, 4)
    d.pipe(example_rollout("late", 1.0, example_id="1"))
    task.reach_end(1)
    assert task.lag(2) == 0, "an end that was reached stays reached"

"""The one barrier of tests that look at what grouping made of a log: all of it read, committed and visible."""

from collections.abc import Callable

from rollstream.pipeline.audit.ledger import Ledger, ledger
from rollstream.topics.kafka.groups import group_assignment, members
from rollstream.topics.kafka.open_transactions import undecided
from tests.support.runs import RealRun
from tests.support.waiting import eventually

_WRITTEN = ("rollouts", "journal", "batches", "batch-index")


def settled(
    run: RealRun, timeout_s: float = 60.0, *, meanwhile: Callable[[], None] = lambda: None, **expected: object
) -> Ledger:
    """Wait until grouping has read, and committed, all that it is sent; return the ledger.

    By then no transaction hides a record, the group does not rebalance, and its positions reach the end of each
    partition. `expected` are fields of the ledger to wait for, since a batch may have to grow old; `meanwhile` is
    called again and again.
    """
    group = run.grouper.group_id(run.name)

    def book() -> Ledger:
        meanwhile()
        for topic in map(run.topic, _WRITTEN):
            assert not undecided(run.kafka, topic), f"a transaction hides records of {topic}"
        rollouts = run.topic("rollouts")
        assert group_assignment(run.kafka, group, rollouts, 60) or not members(run.kafka, group), "a rebalance"
        current = ledger(run.kafka, run.name, group)
        state = {name: getattr(current, name) for name in expected}
        assert (current.unread, state) == (0, expected), f"{current.unread} unread, {state}"
        return current

    return eventually(book, timeout_s, f"everything sent to run {run.name} read, with {expected}", every_s=0.1)

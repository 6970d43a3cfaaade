"""A task and its uncrashed twin read the same log, step by step; transactions, snapshots and crashes occur anywhere.

Hypothesis shrinks its findings here to the few steps that matter; test_fold_properties checks the same on long logs.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.plug_ins import MAKERS
from rollstream.consumers.grouping.testing import GroupingTestDriver
from rollstream.topics.records.journal import from_ranges
from tests import strategies as draw
from tests.strategies import Event

NAMES = tuple(MAKERS)
TABLE = draw.step_table(NAMES)
steps = st.integers(0, len(TABLE) - 1).map(lambda at: TABLE[at])


class TaskAndTwin(RuleBasedStateMachine):
    """`task` is committed, cut and crashed; `twin` only reads."""

    @initialize(config=st.sampled_from(draw.config_table(NAMES)), version=st.sampled_from([0, 1, -1]))
    def begin(self, config: draw.GroupingConfig, version: int) -> None:
        self.task, self.twin = (
            GroupingTestDriver(config, draw.PARTITION, draw.PARTITIONS, policy_version=version) for _ in range(2)
        )
        self.now_ms = 1_000

    @rule(several=st.lists(steps, min_size=1, max_size=6))
    def read(self, several: list[tuple[Event, ...]]) -> None:
        for event in (event for step in several for event in step):
            self.now_ms = max(0, self.now_ms + event.wait_ms)
            record = InputRecord(self.task.end + event.gap, self.now_ms, *event.what.record())
            self.task.pipe(record)
            self.twin.pipe(record)

    @precondition(lambda self: self.task.fold.changed)
    @rule(snapshot=st.booleans())
    def commit(self, snapshot: bool) -> None:
        self.task.commit(snapshot=snapshot)

    @rule()
    def crash(self) -> None:
        self.task.crash_and_restore()

    @rule()
    def restoring_alone_has_no_effect(self) -> None:
        self.task.commit()
        journal = self.task.journal
        reached = task_state.restored_state(journal)
        fold = Fold(reached)
        if fold.replaying:
            for record in self.task.log:
                if reached.watermark <= record.offset < reached.position:
                    fold.replay(record)
            fold.resume()
        assert not fold.changed
        again = fold.prepare_commit(snapshot=True)
        assert (again.batches, again.dead_letters, again.journal.drops, again.journal.finished) == ((), (), (), ())
        assert task_state.restored_state([again.journal]).unfinished == reached.unfinished
        assert task_state.restored_state([again.journal]).counts == reached.counts

    @invariant()
    def both_stand_alike(self) -> None:
        if not hasattr(self, "task"):
            return
        ours, theirs = self.task.fold, self.twin.fold
        for name in ("position", "stream_time_ms", "policy_version", "config", "held_bytes", "in_flight"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert (ours.open_groups, ours.next_deadline_ms) == (theirs.open_groups, theirs.next_deadline_ms)

    def teardown(self) -> None:
        if not hasattr(self, "task"):
            return
        assert [b.digest for b in self.task.batches] == [b.digest for b in self.twin.batches]
        assert self.task.drops == self.twin.drops
        ended = Counter(
            offset for record in self.task.journal for fate in record.finished for offset in from_ranges(fate.runs)
        )
        unfinished = task_state.restored_state(self.task.journal).unfinished
        assert set(ended) | unfinished == {record.offset for record in self.task.log}
        assert set(ended).isdisjoint(unfinished)
        assert all(count == 1 for count in ended.values())


TestTaskAndTwin = TaskAndTwin.TestCase
TestTaskAndTwin.settings = settings(max_examples=max(20, settings().max_examples // 3), stateful_step_count=40)

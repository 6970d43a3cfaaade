"""Skipped records are left out unread, recorded, and left out again whenever the log is folded again."""

import re

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import CORE_VERSION, InputRecord, OffsetSkip
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.journal_pointers import JournalPointers
from rollstream.consumers.grouping.core.plug_ins import BUILT_IN
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker, SealedGroup
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.pipeline.audit.refold import skips_in
from rollstream.topics.codec import encode
from rollstream.topics.errors import StateRefused
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import from_ranges
from rollstream.topics.records import Mark, Rollout, same
from rollstream.topics.rl_examples import RLExample
from tests.support.pairs import driver, pair, reasons, uids

NEWER = Mark(
    kind="configuration",
    generation=1,
    configuration=GroupingConfig(generation=1)
    .to_json()
    .replace(f'"core_version": {CORE_VERSION}', f'"core_version": {CORE_VERSION + 1}'),
)


def with_a_skipped_mark() -> GroupingTestDriver:
    """Return a driver with an open group, a left-out mark of newer code, and records after it, all committed."""
    d = driver()
    d.pipe(example_rollout("open-a", 1.0, example_id="open"))
    d.skip(1, "nobody here wrote it")
    d.pipe(NEWER)
    pair(d, "after")
    d.commit()
    return d


def test_a_skipped_record_is_not_read_and_its_drop_names_the_reason() -> None:
    d = with_a_skipped_mark()
    assert [(drop.offset, drop.reason, drop.detail) for drop in d.drops] == [(1, "skipped", "nobody here wrote it")]
    assert uids(d) == [("aftera", "afterb")]
    assert d.fold.config.generation == 0


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_skipped_record_stays_skipped_when_it_is_read_again(snapshot: bool) -> None:
    d = with_a_skipped_mark()
    d.skip(0, "asked for too late")
    d.skip(2, "asked for too late")
    d.commit(snapshot=snapshot)
    d.crash_and_restore()
    assert d.fold.in_flight == 1
    d.pipe(example_rollout("open-b", 0.0, example_id="open"))
    assert uids(d) == [("aftera", "afterb"), ("open-a", "open-b")]
    assert reasons(d) == {1: "skipped"}
    d.crash_and_restore()
    assert d.fold.config.generation == 0


def test_a_skipped_offset_is_forgotten_once_nothing_before_it_is_in_flight() -> None:
    d = with_a_skipped_mark()
    assert [*from_ranges(d.journal[-1].hopped)] == [1]
    d.pipe(example_rollout("open-b", 0.0, example_id="open"))
    assert [*from_ranges(d.journal[-1].hopped)] == []


def test_a_refold_leaves_out_the_offsets_that_the_journal_names() -> None:
    d = with_a_skipped_mark()
    journal = d.journal
    fold = Fold(task_state.restored_state(journal[:1]), BUILT_IN, skips_in(journal))
    for record in d.log:
        fold.apply(record)
    output = fold.prepare_commit()
    assert all(same(a, b) for a, b in zip(output.batches, d.batches, strict=True))
    assert list(output.journal.drops) == d.drops


def test_a_skipped_record_is_no_dead_letter() -> None:
    d = driver()
    d.skip(0, "why not")
    d.pipe(b"not a record")
    assert reasons(d) == {0: "skipped"}
    assert d.dead_letters == []


# ---------------------------------------------------------------------- without the record


def hopped(stop: int = 3) -> GroupingTestDriver:
    """Return a driver with an open group and offsets 1 to `stop` - 1 left out without their records, all committed."""
    d = driver(group_deadline_s=10.0)
    d.pipe(example_rollout("open-a", 1.0, example_id="open"))
    for offset in range(1, stop):
        d.skip(offset, "a bomb")
    d.fold.hop(stop)
    d.commit()
    return d


def test_offsets_are_left_out_without_their_records() -> None:
    d = hopped()
    assert d.fold.position == 3
    assert reasons(d) == {1: "skipped", 2: "skipped"}
    assert d.fold.hops_ahead() == []
    d.pipe(InputRecord(3, 0, encode_key("env", "open"), encode(example_rollout("open-b", 0.0, example_id="open"))))
    assert uids(d) == [("open-a", "open-b")]


def test_an_offset_left_out_without_its_record_stays_out_when_the_log_is_read_again() -> None:
    d = hopped()
    d.crash_and_restore()
    assert (d.fold.position, d.fold.in_flight) == (3, 1)
    fold = Fold(task_state.restored_state(d.journal[:1]), BUILT_IN, skips_in(d.journal))
    for record in d.log:
        fold.apply(record)
    fold.hop(3)
    output = fold.prepare_commit()
    assert list(output.journal.drops) == d.drops
    assert output.journal.position == 3


def test_the_append_time_of_a_hopped_record_does_not_count() -> None:
    d = driver(group_deadline_s=10.0)
    d.pipe(example_rollout("open-a", 1.0, example_id="open"))
    d.skip(1, "a bomb")
    d.pipe(b"a bomb", at_ms=60_000)
    d.commit()
    assert (d.fold.stream_time_ms, d.fold.in_flight) == (0, 1)


def test_the_append_time_of_a_record_skipped_by_an_earlier_release_keeps_counting() -> None:
    d = driver(group_deadline_s=10.0)
    d.fold = Fold(task_state.restored_state(d.journal), BUILT_IN, {1: OffsetSkip("a mark", timed=True)})
    d.pipe(example_rollout("open-a", 1.0, example_id="open", group_size=3))
    d.pipe(b"a mark", at_ms=4_000)
    d.commit()
    assert (d.fold.stream_time_ms, d.journal[-1].skipped) == (4_000, (1,))
    assert skips_in(d.journal) == {1: OffsetSkip("a mark", timed=True)}
    d.crash_and_restore()
    assert d.fold.stream_time_ms == 4_000
    fold = Fold(task_state.restored_state(d.journal[:1]), BUILT_IN, skips_in(d.journal))
    for record in d.log:
        fold.apply(record)
    assert list(fold.prepare_commit().journal.drops) == d.drops


def test_a_transaction_names_the_offsets_it_left_out_though_nothing_before_is_in_flight() -> None:
    d = driver()
    d.skip(0, "a bomb")
    d.fold.hop(1)
    record = d.commit()
    assert [*from_ranges(record.hopped)] == [0]
    assert skips_in([record]) == {0: OffsetSkip("a bomb")}
    d.pipe(InputRecord(1, 0, encode_key("env", "0"), encode(example_rollout("a", 1.0))))
    assert [*from_ranges(d.journal[-1].hopped)] == []


# ---------------------------------------------------------------------- errors of a task


def read(value: Mark | Rollout, offset: int = 0) -> InputRecord:
    key = ("mark", value.kind) if isinstance(value, Mark) else (value.environment, value.example_id)
    return InputRecord(offset, 0, encode_key(*key), encode(value))


def task_of(d: GroupingTestDriver, **settings: int) -> GroupingTask:
    return GroupingTask(d.fold, JournalPointers(0, 0), GrouperConfig(), "test", **settings)


def test_a_mark_of_newer_code_names_the_command_that_leaves_it_out() -> None:
    d = driver()
    with pytest.raises(StateRefused, match=r"upgrade rollstream; .*`rollstream role group skip 0:0 --reason"):
        task_of(d).apply(read(NEWER))


def test_a_configuration_without_room_in_this_process_s_records_names_both_remedies() -> None:
    d = driver()
    large = GroupingConfig(generation=1, batch_bytes=2**30)
    record = read(Mark(kind="configuration", generation=1, configuration=large.to_json()))
    with pytest.raises(StateRefused, match=r"room for 1000: raise kafka\.max_record_bytes; .*group skip 0:0"):
        task_of(d, largest_batch=1000).apply(record)


class Dividing(FifoBatchMaker):
    """A maker with a bug."""

    def add_rollout(self, rollout: RLExample, group: SealedGroup) -> None:
        raise ZeroDivisionError


def test_an_error_of_a_maker_has_a_note_with_the_record_and_the_remedy() -> None:
    d = GroupingTestDriver(GroupingConfig(maker="mine", batch_rollouts=2), makers={"mine": Dividing})
    d.pipe(example_rollout("a", 1.0))
    record = read(example_rollout("b", 0.0), 1)
    with pytest.raises(ZeroDivisionError) as raised:
        task_of(d).apply(record)
    assert re.match(r"offset 1 of rollouts\[0\] ends grouping; .*skip 0:1", raised.value.__notes__[0])

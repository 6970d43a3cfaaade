"""Records left out unread: whatever they hold, on the record, and the same whenever the log is folded again."""

import pytest

from consumers.grouping import state
from consumers.grouping.changes import CORE_VERSION, Record
from consumers.grouping.config import GrouperConfig, GroupingConfig
from consumers.grouping.fold import Fold
from consumers.grouping.makers import MAKERS
from consumers.grouping.restore import Journal
from consumers.grouping.task import GroupingTask
from consumers.grouping.testing import GroupingTestDriver, example_rollout
from pipeline.refold import skips_in
from tests.unit.consumers.grouping.pairs import driver, pair, reasons, uids
from topics.codec import encode
from topics.errors import StateRefused
from topics.keys import encode_key
from topics.records import Mark, Rollout, same

NEWER = Mark(
    kind="configuration",
    generation=1,
    configuration=GroupingConfig(generation=1)
    .to_json()
    .replace(f'"core_version": {CORE_VERSION}', f'"core_version": {CORE_VERSION + 1}'),
)


def with_a_skipped_mark() -> GroupingTestDriver:
    """An open group, a mark of newer code that was left out, and records behind it; all committed."""
    d = driver()
    d.pipe(example_rollout("open-a", 1.0, example_id="open"))
    d.skip(1, "nobody here wrote it")
    d.pipe(NEWER)
    pair(d, "after")
    d.commit()
    return d


def test_a_skipped_record_is_not_read_and_the_drop_says_why() -> None:
    d = with_a_skipped_mark()
    assert [(drop.offset, drop.reason, drop.detail) for drop in d.drops] == [(1, "skipped", "nobody here wrote it")]
    assert uids(d) == [("aftera", "afterb")]
    assert d.fold.config.generation == 0


@pytest.mark.parametrize("snapshot", [False, True])
def test_what_was_skipped_stays_so_when_it_is_read_again_whatever_is_asked_for_by_then(snapshot: bool) -> None:
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


def test_what_was_skipped_is_forgotten_once_nothing_before_it_is_in_flight() -> None:
    d = with_a_skipped_mark()
    assert d.journal[-1].skipped == (1,)
    d.pipe(example_rollout("open-b", 0.0, example_id="open"))
    assert d.journal[-1].skipped == ()


def test_a_refold_leaves_out_what_the_journal_says() -> None:
    d = with_a_skipped_mark()
    journal = d.journal
    fold = Fold(state.restore(journal[:1]), MAKERS, skips_in(journal))
    for record in d.log:
        fold.apply(record)
    output = fold.take()
    assert all(same(a, b) for a, b in zip(output.batches, d.batches, strict=True))
    assert list(output.journal.drops) == d.drops


def test_a_record_is_skipped_under_every_core_version() -> None:
    d = driver(core_version=1)
    d.skip(0, "why not")
    d.pipe(b"not a record")
    assert reasons(d) == {0: "skipped"}
    assert d.dead_letters == []


# ---------------------------------------------------------------------- what a task says


def read(value: Mark | Rollout, offset: int = 0) -> Record:
    key = ("mark", value.kind) if isinstance(value, Mark) else (value.environment, value.example_id)
    return Record(offset, 0, encode_key(*key), encode(value))


def task_of(d: GroupingTestDriver, **settings: int) -> GroupingTask:
    return GroupingTask(d.fold, Journal(0, 0), GrouperConfig(), "test", **settings)


def test_a_mark_of_newer_code_names_the_command_that_leaves_it_out() -> None:
    d = driver()
    with pytest.raises(StateRefused, match=r"upgrade rollstream; .*`rollstream group skip 0:0 --reason"):
        task_of(d).apply(read(NEWER))


def test_a_configuration_without_room_in_this_process_s_records_names_both_remedies() -> None:
    d = driver()
    large = GroupingConfig(generation=1, batch_bytes=2**30)
    record = read(Mark(kind="configuration", generation=1, configuration=large.to_json()))
    with pytest.raises(StateRefused, match=r"room for 1000: raise it; .*group skip 0:0"):
        task_of(d, largest_batch=1000).apply(record)


def test_whatever_else_reading_a_record_raises_names_it_and_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver()
    d.pipe(example_rollout("a", 1.0))
    monkeypatch.setattr(d.fold, "_seal", lambda _group: 1 // 0)
    record = read(example_rollout("b", 0.0), 1)
    with pytest.raises(StateRefused, match=r"offset 1 of rollouts\[0\] ends grouping \(ZeroDivisionError.*skip 0:1"):
        task_of(d).apply(record)

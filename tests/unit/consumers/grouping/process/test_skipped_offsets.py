"""Skipped records become dead letters undecoded, on record, and again whenever the log is folded again."""

import re

import pytest

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import CORE_VERSION, InputRecord
from rollstream.consumers.grouping.core.fold import Fold
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.core.plug_ins import BUILT_IN
from rollstream.consumers.grouping.core.task_journal import JournalPointers
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker, SealedGroup
from rollstream.consumers.grouping.testing import GroupingTestDriver, example_rollout
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.refold import skips_in
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import Mark, Rollout, SkippedOffset, same
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import RLExample
from tests.simulation.installation import World, installed
from tests.support.modelled_run import KAFKA, RUN, ModelledRun
from tests.support.pairs import driver, fates, pair, uids

NEWER = Mark(
    kind="configuration",
    generation=1,
    configuration=GroupingConfig(generation=1)
    .to_json()
    .replace(f'"core_version": {CORE_VERSION}', f'"core_version": {CORE_VERSION + 1}'),
)


def with_a_skipped_mark() -> GroupingTestDriver:
    """Return a driver with an open group, a skipped mark of newer code, and records after it, all committed."""
    d = driver()
    d.pipe(example_rollout("open-a", 1.0, example_id="open"))
    d.skip(1, "nobody here wrote it")
    d.pipe(NEWER)
    pair(d, "after")
    d.commit()
    return d


def test_a_skipped_record_is_not_decoded_and_its_dead_letter_names_the_reason() -> None:
    d = with_a_skipped_mark()
    assert [(letter.record, letter.error) for letter in d.dead_letters] == [(d.log[1], "skipped: nobody here wrote it")]
    assert d.drops == []
    assert uids(d) == [("aftera", "afterb")]
    assert d.fold.config.generation == 0
    assert fates(d) == {"batched": 2, "dead_lettered": 1}


def test_each_transaction_names_the_skips_that_a_restore_needs() -> None:
    d = with_a_skipped_mark()
    assert d.journal[-1].skipped == (1,)
    d.pipe(example_rollout("open-b", 0.0, example_id="open"))
    assert d.journal[-1].skipped == (1,), "offset 0 was in flight before this transaction"
    d.pipe(example_rollout("c", 1.0))
    assert d.journal[-1].skipped == ()


def test_a_transaction_names_its_skips_though_nothing_before_is_in_flight() -> None:
    d = driver()
    d.skip(0, "a mark")
    d.pipe(NEWER)
    pair(d)
    assert d.commit().skipped == (0,)
    pair(d, "1")
    assert d.journal[-1].skipped == ()


def test_a_refold_skips_what_the_journal_names() -> None:
    d = with_a_skipped_mark()
    journal = d.journal
    fold = Fold(task_state.restored_state(journal[:1]), BUILT_IN, skips_in(journal))
    for record in d.log:
        fold.apply(record)
    output = fold.prepare_commit()
    assert all(same(a, b) for a, b in zip(output.batches, d.batches, strict=True))
    assert [letter.record.offset for letter in output.dead_letters] == [1]
    assert output.journal.skipped == (1,)


# ---------------------------------------------------------------------- a request


@pytest.mark.parametrize("follow_request", [True, False])
def test_a_request_takes_effect_if_a_task_reads_it_before_the_record(follow_request: bool) -> None:
    world = World()
    with installed(world):
        run = ModelledRun(world)
        run.send()
        run.group()
        run.send()
        offset = run.log("rollouts").end - 2
        request = SkippedOffset(partition=0, offset=offset, reason="a test")
        control = run.log("control")
        run.write("control", encode_key("skip", f"0:{offset}"), encode(request))
        if not follow_request:
            control.begin = control.end
        run.group(batches=2 - follow_request)
        control.begin = 0
        book = world.result_of(lambda: ledger(KAFKA, RUN))
        assert book.problems == []
        assert (book.batched, book.dead_lettered, book.in_flight) == ((4, 1, 3) if follow_request else (8, 0, 0))
        assert world.result_of(lambda: verify(KAFKA, RUN)).mismatches == []


# ---------------------------------------------------------------------- errors of a task


def read(value: Mark | Rollout, offset: int = 0) -> InputRecord:
    key = ("mark", value.kind) if isinstance(value, Mark) else (value.environment, value.example_id)
    return InputRecord(offset, 0, encode_key(*key), encode(value))


def task_of(d: GroupingTestDriver, **settings: int) -> GroupingTask:
    return GroupingTask(d.fold, JournalPointers(0, 0), GrouperConfig(), "test", **settings)


def test_a_mark_of_newer_code_names_the_command_that_skips_it() -> None:
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

"""State and logs of earlier core versions: gone on with, refolded bit for bit, or refused with the remedy."""

from consumers.grouping import state
from consumers.grouping.changes import Output, Record
from consumers.grouping.fold import Fold
from consumers.grouping.runs import from_runs
from tests import upgrade
from topics.records import JournalRecord, TrainingBatch, same

RECORDED = upgrade.load(1)


def restored(journal: list[JournalRecord], log: list[Record]) -> Fold:
    """The fold that today's code makes of a journal and the log it re-reads."""
    reached = state.restore(journal)
    fold = Fold(reached)
    for record in log[reached.watermark : reached.position]:
        fold.replay(record)
    fold.resume()
    return fold


def agree(ours: list[TrainingBatch], theirs: list[TrainingBatch]) -> bool:
    return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))


def finished(journal: JournalRecord) -> list[int]:
    return [offset for fate in journal.finished for offset in from_runs(fate.runs)]


def go_on() -> tuple[Fold, Output]:
    fold = restored(RECORDED.journal_records(), RECORDED.log)
    for record in RECORDED.log[RECORDED.position :]:
        fold.apply(record)
    return fold, fold.take()


def test_the_fixture_holds_what_an_upgrade_may_meet() -> None:
    journal = RECORDED.journal_records()
    reached = state.restore(journal)
    assert {record.core_version for record in journal} == {1}
    assert not journal[-1].snapshot, "deltas follow the snapshot"
    assert reached.watermark < reached.position < len(RECORDED.log)
    assert journal[-1].watermark_generation < journal[-1].generation, "a configuration mark lies between"
    assert len(RECORDED.committed()) < len(RECORDED.batches)
    assert {drop.reason for drop in RECORDED.drops} >= {"late", "cancelled", "stale_version", "group_too_small"}
    fold = restored(journal, RECORDED.log)
    assert fold.open_groups > 0
    assert fold.in_flight > fold.open_groups


def test_today_s_code_goes_on_from_the_state_of_core_version_1_and_loses_and_repeats_nothing() -> None:
    fold, output = go_on()
    committed = RECORDED.committed()
    assert agree([*committed, *output.batches], RECORDED.batches)
    written = [drop for record in RECORDED.journal_records() for drop in record.drops]
    assert [*written, *output.journal.drops] == RECORDED.drops
    before = [offset for record in RECORDED.journal_records() for offset in finished(record)]
    ended = [*before, *finished(output.journal)]
    assert len(ended) == len(set(ended))
    assert len(ended) + fold.in_flight == len(RECORDED.log)


def test_today_s_code_folds_the_log_of_core_version_1_bit_for_bit() -> None:
    fold = Fold(state.restore(RECORDED.journal_records()[:1]))
    for record in RECORDED.log:
        fold.apply(record)
    output = fold.take()
    assert agree(list(output.batches), RECORDED.batches)
    assert list(output.journal.drops) == RECORDED.drops
    assert [letter.record.offset for letter in output.dead_letters] == RECORDED.dead_letters
    assert {batch.core_version for batch in output.batches} == {1}

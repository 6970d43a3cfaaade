"""Answers of a run from its index, and fates of offsets according to a journal."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.task_journal import split_record
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.pipeline.index import sqlite_files
from rollstream.pipeline.index.fates import IN_FLIGHT, SETTLED, UNREAD
from rollstream.pipeline.index.indexed_run import Fate, RolloutPlace, fates_in, oldest_snapshot
from rollstream.topics.records import Chunk, Drop, FinishedOffsets, JournalRecord, LearnerStep
from rollstream.topics.records.fates import BATCHED, DROPPED
from rollstream.topics.records.journal import to_ranges
from rollstream.topics.wire.codec import encode
from tests.support.index_logs import ListedLog, MadeRun, indexed
from tests.support.manifests import one_chunk_manifest


def test_offsets_before_a_pruned_journal_are_settled_or_in_flight_and_never_unread() -> None:
    first = initial_record(0, 1, "topic", GroupingConfig())
    unfinished = to_ranges([1, 3, 5, 11, 13, 15, 20, 22])
    snapshot = replace(first, sequence=7, begin=20, position=24, admitted=to_ranges([20, 22]), unfinished=unfinished)
    parts = split_record(replace(snapshot, finished=(FinishedOffsets(fate=BATCHED, runs=to_ranges([9])),)), 50)
    assert len(parts) > 2
    later = replace(
        snapshot,
        sequence=7 + len(parts),
        begin=24,
        position=30,
        finished=(FinishedOffsets(fate=BATCHED, runs=to_ranges([3])),),
        unfinished=to_ranges([1, 5]),
    )
    journal = [*parts, later]
    assert sequences(oldest_snapshot(journal)) == sequences(parts)
    fates = fates_in(journal, range(20, 30), {0, 1, 3, 5, 9, 20, 29, 30}, oldest_snapshot(journal))
    assert {offset: fate.name for offset, fate in fates.items()} == {
        0: SETTLED,
        1: IN_FLIGHT,
        3: BATCHED,
        5: IN_FLIGHT,
        9: BATCHED,
        20: IN_FLIGHT,
        29: IN_FLIGHT,
        30: UNREAD,
    }


def test_a_snapshot_whose_first_parts_were_pruned_is_not_the_oldest_one() -> None:
    snapshot = replace(initial_record(0, 1, "topic", GroupingConfig()), unfinished=to_ranges(range(0, 40, 2)))
    cut, whole = (split_record(replace(snapshot, sequence=sequence), 100) for sequence in (7, 50))
    assert len(whole) > 2
    other = replace(snapshot, sequence=40, snapshot=False, unfinished=to_ranges(()))
    assert sequences(oldest_snapshot([*cut[1:], other, *whole])) == sequences(whole)
    assert oldest_snapshot([*cut[1:], *whole[:-1], other]) == []


def sequences(records: Iterable[JournalRecord]) -> list[int]:
    return [record.sequence for record in records]


def test_the_fates_of_a_transaction_in_parts_are_those_of_the_whole_transaction() -> None:
    drops = tuple(Drop(offset=offset, reason="late", detail=f"detail {offset}") for offset in range(4))
    first = initial_record(0, 1, "topic", GroupingConfig())
    whole = replace(
        first,
        sequence=7,
        position=6,
        finished=(
            FinishedOffsets(fate=DROPPED, runs=to_ranges(range(4))),
            FinishedOffsets(fate=BATCHED, runs=to_ranges([4, 5])),
        ),
        drops=drops,
        batch_ids=("0-0", "0-1"),
    )
    parts = split_record(whole, limit_bytes=100)
    assert len(parts) > 2
    later = replace(first, sequence=7 + len(parts), begin=6, position=7, batch_ids=("0-2",))
    fates = fates_in([first, *parts, later], range(7), set(range(7)))
    assert fates == fates_in([first, whole, later], range(7), set(range(7)))
    assert fates[2] == Fate(DROPPED, drops[2], generation=0)
    assert fates[5] == Fate(BATCHED, batch_ids=("0-0", "0-1"))


def test_a_rollback_comes_from_the_step_of_its_source_and_a_version_from_the_step_that_names_it(tmp_path: Path) -> None:
    made = MadeRun()
    steps = []
    for learner, number, version in (("default", 4, 2), ("default", 5, 3), ("other", 4, -1)):
        step = LearnerStep(
            learner=learner,
            step=number,
            input_run="main",
            uses=(),
            position=0,
            policy_version=version,
            params_digest="d",
            trained_total=0,
            skipped_total=0,
        )
        steps.append(made.record("steps", 0, encode(step)))
    with indexed(tmp_path, ListedLog(steps)) as run:
        chunk = Chunk(index=0, partition=0, offset=0, size_bytes=1, digest="")
        published = replace(one_chunk_manifest(2, chunk), step=4)
        rollback = replace(published, version=7)
        for manifest in (published, rollback):
            assert [(step.learner, step.step) for step in run.steps_before(manifest)] == [("default", 4)]
        assert [step.step for step in run.steps_before(one_chunk_manifest(3, chunk, learner="trainer"))] == [5]


def test_all_parts_of_a_large_transaction_are_read(tmp_path: Path) -> None:
    drops = tuple(Drop(offset=offset, reason="late", detail=f"detail {offset}") for offset in range(4))
    first = initial_record(0, 1, "topic", GroupingConfig())
    finished = (FinishedOffsets(fate=DROPPED, runs=to_ranges(range(4))),)
    parts = split_record(replace(first, sequence=1, position=4, finished=finished, drops=drops), limit_bytes=100)
    assert len(parts) > 2
    made = MadeRun()
    with indexed(tmp_path, ListedLog([made.record("journal", 0, encode(record)) for record in (first, *parts)])) as run:
        fates = [run.fate(RolloutPlace(0, offset)) for offset in (1, 3)]
    assert fates == [Fate(DROPPED, drops[offset], generation=0) for offset in (1, 3)]


@pytest.mark.parametrize("indexed_before", [False, True])
def test_a_pruned_journal_tells_what_was_in_flight_and_what_its_pruned_part_had_finished(
    tmp_path: Path, indexed_before: bool
) -> None:
    first = initial_record(0, 1, "topic", GroupingConfig())
    waiting = to_ranges(range(1, 80, 2))
    early = replace(first, sequence=1, position=4, finished=(FinishedOffsets(fate=DROPPED, runs=to_ranges([0])),))
    parts = split_record(replace(first, sequence=9, begin=90, position=96, unfinished=waiting), limit_bytes=100)
    assert len(parts) > 2
    batched = (FinishedOffsets(fate=BATCHED, runs=to_ranges([3])),)
    after = replace(first, sequence=9 + len(parts), begin=96, position=99, finished=batched, snapshot=False)
    made = MadeRun()
    journal = [made.record("journal", 0, encode(record)) for record in (first, early, *parts, after)]
    if indexed_before:
        with indexed(tmp_path, ListedLog(journal[:2])) as run:
            assert run.fate(RolloutPlace(0, 0)).name == DROPPED
    with indexed(tmp_path, ListedLog(journal[2:])) as run:
        assert {offset: run.fate(RolloutPlace(0, offset)).name for offset in (0, 1, 2, 3, 90, 99)} == {
            0: SETTLED,
            1: IN_FLIGHT,
            2: SETTLED,
            3: BATCHED,
            90: IN_FLIGHT,
            99: UNREAD,
        }


def test_an_unreadable_record_of_the_journal_is_refused_and_other_bytes_are_counted(tmp_path: Path) -> None:
    made = MadeRun()
    good = encode(initial_record(0, 1, "topic", GroupingConfig()))
    journal = [made.record("journal", 0, value) for value in (b"other bytes", good, good[:-3])]
    with indexed(tmp_path, ListedLog(journal)) as run:
        assert run.skipped.counts == {"made.journal": 1}
        assert run.fate(RolloutPlace(0, 0)).name == UNREAD
    with closing(sqlite_files.reader(tmp_path / "index.sqlite")) as db:
        [(refused,)] = db.execute("select error from refused")
    assert "every grouping process of a run must be able to read the whole journal" in refused

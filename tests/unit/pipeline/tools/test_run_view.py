"""Fates of offsets according to a journal."""

from collections.abc import Iterable
from dataclasses import replace

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.journal_splitting import split_record
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.pipeline.tools.run_view import IN_FLIGHT, SETTLED, UNREAD, Fate, fates_in, oldest_snapshot
from rollstream.topics.fates import BATCHED, DROPPED
from rollstream.topics.offset_ranges import to_ranges
from rollstream.topics.records import Drop, FinishedOffsets, JournalRecord


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

"""Fates of offsets according to a journal."""

from dataclasses import replace

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.journal_splitting import split_record
from rollstream.consumers.grouping.core.task_state import initial_record
from rollstream.pipeline.tools.run_view import Fate, fates_in
from rollstream.topics.fates import BATCHED, DROPPED
from rollstream.topics.offset_ranges import to_ranges
from rollstream.topics.records import Drop, FinishedOffsets


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

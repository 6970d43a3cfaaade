"""Reads the uses in a step's record: rows of batches that were trained on, skipped or left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rollstream.topics.records import BatchUse
from rollstream.topics.records.skip_reasons import ROW_CODES


def rows_of(uses: Sequence[BatchUse], use: str) -> int:
    """Number of rollouts with one kind of use; rollouts that had been trained on before are not counted."""
    return sum(item.rows for item in uses if item.use == use and not item.again)


def names_of(uses: Sequence[BatchUse]) -> str:
    """Return the batch id and the kind of each use as text."""
    return ", ".join(f"{use.batch_id} {use.use}" for use in uses) or "none"


def reused_share(uses: Sequence[BatchUse]) -> float:
    """Share of the rollouts of a step that had been trained on before."""
    trained = [use for use in uses if use.use == "trained"]
    return sum(use.rows for use in trained if use.again) / max(sum(use.rows for use in trained), 1)


def is_left_out(use: BatchUse) -> bool:
    """Whether a use lists single rows that could not be trained on, in a batch that was otherwise used."""
    return use.use == "skipped" and use.code in ROW_CODES


def left_out_rows(uses: Sequence[BatchUse]) -> Counter[str]:
    """Number of rows that could not be trained on, by code."""
    counts: Counter[str] = Counter()
    for use in uses:
        if is_left_out(use):
            counts[use.code] += use.rows
    return counts


def trained_rows(uses: Sequence[BatchUse]) -> dict[int, tuple[int, ...]]:
    """Rows that a step trains on, by the index offset of their batch; offsets and rows ascend."""
    rows: dict[int, list[int]] = {}
    for use in uses:
        if use.use == "trained":
            rows.setdefault(use.index_offset, []).extend(use.row_numbers or range(use.rows))
    return {offset: tuple(sorted(rows[offset])) for offset in sorted(rows)}


def taken_rows(uses: Sequence[BatchUse]) -> dict[int, tuple[int, ...]]:
    """Return `trained_rows`, with an empty entry for each batch of the step whose rows were all left out."""
    return {use.index_offset: () for use in uses if is_left_out(use)} | trained_rows(uses)


def without(uses: Sequence[BatchUse], left_out: Sequence[BatchUse]) -> tuple[BatchUse, ...]:
    """Split uses of whole batches: for each batch, first the rows that are trained on, then the rows left out."""
    by_batch: dict[int, list[BatchUse]] = {}
    for use in left_out:
        by_batch.setdefault(use.index_offset, []).append(use)
    remaining: list[BatchUse] = []
    for use in uses:
        skipped = sorted(by_batch.get(use.index_offset, ()), key=lambda left: left.reason)
        gone = {number for left in skipped for number in left.row_numbers or range(left.rows)}
        kept = tuple(number for number in range(use.rows) if number not in gone)
        if not skipped or kept:
            remaining.append(replace(use, rows=len(kept), row_numbers=kept) if skipped else use)
        remaining += skipped
    return tuple(remaining)

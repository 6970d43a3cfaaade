"""A journal record that would be too large, as several of consecutive sequences: whatever one transaction does, each
of its records stays far below the limit of any topic.

Lists go on from part to part, in order. Scalars are those after the transaction in every part, but `begin`: the second
part begins where the first leads, so each part follows from the one before as whole records do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from consumers.grouping.counts import text_bytes
from topics.records import FinishedOffsets, Int64, JournalRecord

PART_BYTES = 512 * 1024
"""What the lists of one part may take; counts and configuration come on top."""
LEAST_RECORD_BYTES = 1024 * 1024
"""What the record limit must be at least: a part, twice the counts, a configuration."""
_RUN_BYTES = 16
_NUMBERS_BYTES = 60
"""At most what the numbers of a drop or a finished group take."""
_RUNS = ("admitted", "unfinished", "delivered")

Item = tuple[str, Any, int]
"""Field, value, and at most the bytes it takes."""


def in_parts(record: JournalRecord, limit_bytes: int = PART_BYTES) -> tuple[JournalRecord, ...]:
    """The record by itself where its lists take at most `limit_bytes`, else its parts.

    An entry that is larger than the limit has a part of its own.
    """
    if sum(size for _name, _value, size in _items(record, 2**62)) <= limit_bytes:
        return (record,)
    parts: list[dict[str, list[Any]]] = [{}]
    room = limit_bytes
    for name, value, size in _items(record, max(1, limit_bytes // 4)):
        if size > room and parts[-1]:
            parts.append({})
            room = limit_bytes
        parts[-1].setdefault(name, []).append(value)
        room -= size
    return tuple(
        replace(
            record,
            sequence=record.sequence + number,
            begin=record.begin if number == 0 else record.position,
            part=number,
            parts=len(parts),
            **{name: _joined(name, part.get(name, [])) for name in _LISTS},
        )
        for number, part in enumerate(parts)
    )


_LISTS = (*_RUNS, "finished", "drops", "finished_groups", "batch_ids")


def _items(record: JournalRecord, piece_bytes: int) -> Iterator[Item]:
    """Everything in the record's lists; runs in pieces of about so many bytes."""
    for finished in record.finished:
        for piece in _pieces(finished.runs, piece_bytes):
            yield "finished", replace(finished, runs=piece), piece.nbytes + text_bytes(finished.fate)
    for name in _RUNS:
        for piece in _pieces(getattr(record, name), piece_bytes):
            yield name, piece, piece.nbytes
    for drop in record.drops:
        texts = (drop.reason, drop.detail, drop.uid, drop.environment)
        yield "drops", drop, _NUMBERS_BYTES + sum(map(text_bytes, texts))
    for group in record.finished_groups:
        names = (group.environment, group.example_id, group.group_id)
        yield "finished_groups", group, _NUMBERS_BYTES + sum(map(text_bytes, names))
    for batch_id in record.batch_ids:
        yield "batch_ids", batch_id, text_bytes(batch_id)


def _pieces(runs: Int64, piece_bytes: int) -> Iterable[Int64]:
    numbers = 2 * max(1, piece_bytes // _RUN_BYTES)
    return (runs[start : start + numbers] for start in range(0, len(runs), numbers))


def _joined(name: str, values: list[Any]) -> Any:
    if name in _RUNS:
        return np.concatenate(values) if values else np.empty(0, "<i8")
    if name != "finished":
        return tuple(values)
    by_fate: dict[str, list[Int64]] = {}
    for finished in values:
        by_fate.setdefault(finished.fate, []).append(finished.runs)
    return tuple(FinishedOffsets(fate=fate, runs=np.concatenate(runs)) for fate, runs in by_fate.items())

"""Splitting of a journal record that would be too large into parts with consecutive sequences.

Splitting keeps the records of any transaction far below the size limit of any topic. Lists continue from part to part,
in order. Every part holds the scalars as they are after the transaction. Only `begin` differs: in every part after
the first, it is the position after the transaction, so that each part follows the previous part as whole records do.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rollstream.consumers.grouping.core.fate_counts import text_bytes
from rollstream.topics.records import FinishedOffsets, Int64, JournalRecord

PART_BYTES = 512 * 1024
"""Maximum size of the lists of one part. Counts and configuration are not included."""
LEAST_RECORD_BYTES = 1024 * 1024
"""Minimum record limit: room for the lists of a part, the counts twice, and a configuration."""
_RANGE_BYTES = 16
_NUMBERS_BYTES = 60
"""Maximum number of bytes for the numbers of a drop or a finished group."""
_RANGE_FIELDS = ("admitted", "unfinished", "delivered")

Item = tuple[str, Any, int]
"""Field, value, and the maximum number of bytes that the value takes."""


def split_record(record: JournalRecord, limit_bytes: int = PART_BYTES) -> tuple[JournalRecord, ...]:
    """Return the record itself if its lists take at most `limit_bytes`, else its parts.

    An item that is larger than the limit gets a separate part.
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


_LISTS = (*_RANGE_FIELDS, "finished", "drops", "finished_groups", "batch_ids")


def _items(record: JournalRecord, piece_bytes: int) -> Iterator[Item]:
    """Yield the items of the record's lists; ranges are split into pieces of about `piece_bytes`."""
    for finished in record.finished:
        for piece in _pieces(finished.runs, piece_bytes):
            yield "finished", replace(finished, runs=piece), piece.nbytes + text_bytes(finished.fate)
    for name in _RANGE_FIELDS:
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


def _pieces(ranges: Int64, piece_bytes: int) -> Iterable[Int64]:
    numbers = 2 * max(1, piece_bytes // _RANGE_BYTES)
    return (ranges[start : start + numbers] for start in range(0, len(ranges), numbers))


def _joined(name: str, values: list[Any]) -> Any:
    if name in _RANGE_FIELDS:
        return np.concatenate(values) if values else np.empty(0, "<i8")
    if name != "finished":
        return tuple(values)
    by_fate: dict[str, list[Int64]] = {}
    for finished in values:
        by_fate.setdefault(finished.fate, []).append(finished.runs)
    return tuple(FinishedOffsets(fate=fate, runs=np.concatenate(pieces)) for fate, pieces in by_fate.items())

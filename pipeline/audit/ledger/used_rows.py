"""Rows of batches that a learner has used: batches used as a whole are kept by number, all others row by row."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from rollstream.pipeline.audit.packing import packed, unpacked
from rollstream.topics.records import batch_numbers
from rollstream.topics.records.offset_ranges import from_ranges, to_ranges

Use = Literal["trained", "skipped"]
USES: tuple[Use, ...] = ("trained", "skipped")
_MOST_BATCHES = 1 << 28


class UsedRows:
    """The rows that one learner trained on or skipped, by batch."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, set[int]]] = {}
        self._whole: dict[int, np.ndarray[Any, np.dtype[np.int32]]] = {}
        """By partition, the number of rows of each batch that was used as a whole, negative if they were skipped."""

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        rows = {batch_id: [to_ranges(used[use]).tolist() for use in USES] for batch_id, used in self._rows.items()}
        whole = [[partition, packed(np.trim_zeros(column, "b"))] for partition, column in self._whole.items()]
        return {"rows": rows, "whole": whole}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "UsedRows":
        """Return the rows of a saved state."""
        used = cls()
        for batch_id, ranges in state["rows"].items():
            used._rows[batch_id] = {use: set(from_ranges(part)) for use, part in zip(USES, ranges, strict=True)}
        for partition, column in state["whole"]:
            used._whole[partition] = unpacked(column).astype(np.int32)
        return used

    def of_batch(self, batch_id: str) -> dict[str, set[int]]:
        """Return the rows of a batch that were trained on, and the rows that were skipped."""
        rows = self._rows.get(batch_id)
        if rows is not None:
            return rows
        partition, number = batch_numbers(batch_id)
        whole = self._whole.get(partition)
        count = int(whole[number]) if whole is not None and number < len(whole) else 0
        return {"trained": set(range(max(count, 0))), "skipped": set(range(max(-count, 0)))}

    def add(self, batch_id: str, use: str, rows: set[int]) -> None:
        """Add rows of a batch."""
        used = self.of_batch(batch_id)
        used[use] |= rows
        self._rows[batch_id] = used

    def fold(self, batch_id: str, held: int) -> None:
        """Store a batch with `held` rows as a whole, if all of its rows had the same use."""
        rows = self._rows.get(batch_id)
        partition, number = batch_numbers(batch_id)
        if rows is None or not held or number >= _MOST_BATCHES:
            return
        counts = {use: len(rows[use]) for use in USES}
        alike = sum(counts.values()) == max(counts.values()) == held
        if alike and max(rows["trained"] | rows["skipped"]) == held - 1:
            whole = self._whole.get(partition, np.zeros(0, np.int32))
            if number >= len(whole):
                whole = np.concatenate((whole, np.zeros(max(number + 1 - len(whole), len(whole), 64), np.int32)))
            whole[number] = held if counts["trained"] else -held
            self._whole[partition] = whole
            del self._rows[batch_id]

    def skipping(self) -> Iterator[str]:
        """Yield the batches with skipped rows."""
        yield from (batch_id for batch_id, rows in self._rows.items() if rows["skipped"])
        for partition, whole in self._whole.items():
            yield from (f"{partition}-{number}" for number in np.flatnonzero(whole < 0))

"""Rows of batches that a learner has used: batches used as a whole are kept by number, all others row by row."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from rollstream.topics.records import batch_numbers

Use = Literal["trained", "skipped"]
USES: tuple[Use, ...] = ("trained", "skipped")
_MOST_BATCHES = 1 << 28


class UsedRows:
    """The rows that one learner trained on or skipped, by batch."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, set[int]]] = {}
        self._whole: dict[int, np.ndarray[Any, np.dtype[np.int32]]] = {}
        """By partition, the number of rows of each batch that was used as a whole, negative if they were skipped."""

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

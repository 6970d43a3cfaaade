"""The table of batches, by partition and number: the place of each batch, its rows, and its entry in the index."""

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rollstream.topics.records import batch_numbers

BatchPlace = tuple[int, int]
"""Partition and offset in `batches`."""
NONE = -1
_COLUMNS = ("expected", "partition", "place", "rows", "entry")
Column = npt.NDArray[np.int64]


class _Numbers:
    """Batches of one partition, with a column for each fact, which is `NONE` where it is unknown."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.expected, self.partition, self.place, self.rows, self.entry = (array("q") for _ in _COLUMNS)
        """1 if the journal names the batch; partition and offset in `batches`; number of rows; offset of its entry."""

    def at(self, number: int) -> int:
        """Return the index of a batch in the columns, which grow to hold it."""
        before, after = self.first - number, number - self.first - len(self.rows) + 1
        for name in _COLUMNS if before > 0 or after > 0 else ():
            column: array[int] = getattr(self, name)
            column.extend([NONE] * after) if after > 0 else setattr(self, name, array("q", [NONE] * before) + column)
        self.first = min(self.first, number)
        return number - self.first

    def column(self, name: str) -> Column:
        """Return a copy of a column."""
        return np.array(getattr(self, name), np.int64)


class BatchTable:
    """All batches of a run."""

    def __init__(self) -> None:
        self._partitions: dict[int, _Numbers] = {}

    def expect(self, partition: int, number: int) -> None:
        """Note a batch that the journal names."""
        numbers = self._of(partition, number)
        numbers.expected[numbers.at(number)] = 1

    def is_expected(self, partition: int, number: int) -> bool:
        """Whether the journal names a batch."""
        return self._get(partition, number, "expected") != NONE

    def found(self, partition: int, number: int, place: BatchPlace, rows: int) -> None:
        """Note a batch that `batches` holds."""
        numbers = self._of(partition, number)
        at = numbers.at(number)
        numbers.partition[at], numbers.place[at], numbers.rows[at] = *place, rows

    def place(self, partition: int, number: int) -> BatchPlace | None:
        """Return the place of a batch; None if `batches` does not hold it."""
        offset = self._get(partition, number, "place")
        return None if offset == NONE else (self._get(partition, number, "partition"), offset)

    def rows(self, batch_id: str) -> int | None:
        """Return the number of rows of a batch; None if `batches` does not hold it."""
        rows = self._get(*batch_numbers(batch_id), "rows")
        return None if rows == NONE else rows

    def missing(self) -> list[str]:
        """Return the batches that the journal names but `batches` does not hold."""
        return [
            f"{partition}-{number + numbers.first}"
            for partition, numbers in self._partitions.items()
            for number in np.flatnonzero((numbers.column("expected") != NONE) & (numbers.column("rows") == NONE))
        ]

    def lowest(self) -> Iterator[tuple[int, int]]:
        """Yield each partition that has batches in `batches`, with the number of its first batch there."""
        for partition, numbers in self._partitions.items():
            held = np.flatnonzero(numbers.column("rows") != NONE)
            if len(held):
                yield partition, numbers.first + int(held[0])

    def entry(self, partition: int, number: int) -> int | None:
        """Return the offset of the first entry that names a batch; None if there is none."""
        offset = self._get(partition, number, "entry")
        return None if offset == NONE else offset

    def enter(self, partition: int, number: int, offset: int) -> None:
        """Note the first entry of a batch."""
        numbers = self._of(partition, number)
        numbers.entry[numbers.at(number)] = offset

    def unnamed(self, partition: int, base: int, stop: int) -> list[int]:
        """Return the numbers below `stop` of batches without an entry.

        The range begins at `base`, or at the first batch with an entry if that is lower.
        """
        numbers = self._partitions.get(partition)
        named = np.empty(0, np.int64)
        if numbers is not None:
            named = np.flatnonzero(numbers.column("entry") != NONE) + numbers.first
        begin = min(int(named[0]), base) if len(named) else base
        unnamed: list[int] = np.setdiff1d(np.arange(begin, stop), named, assume_unique=True).tolist()
        return unnamed

    def _of(self, partition: int, number: int) -> _Numbers:
        return self._partitions.setdefault(partition, _Numbers(number))

    def _get(self, partition: int, number: int, name: str) -> int:
        numbers = self._partitions.get(partition)
        at = -1 if numbers is None else number - numbers.first
        return int(getattr(numbers, name)[at]) if numbers is not None and 0 <= at < len(numbers.rows) else NONE

"""A value for each offset of a partition, stored as runs of equal values: small where neighbours share their fate.

Offsets are written in dense chunks, which become runs again when the table is read.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Values = npt.NDArray[np.uint32]
_CHUNK = 1 << 13
"""Number of offsets in a chunk. No run crosses the border of a chunk."""
_MOST_DENSE = 512
"""Most chunks that are dense at the same time; each takes 32 KiB."""


class OffsetRuns(NamedTuple):
    """Runs of equal values other than 0, by ascending offset."""

    starts: Int64s
    stops: Int64s
    """One past the last offset of each run."""
    values: Values

    def where(self, chosen: npt.NDArray[np.bool_]) -> "OffsetRuns":
        """Return the chosen runs."""
        return OffsetRuns(self.starts[chosen], self.stops[chosen], self.values[chosen])

    def clipped(self, first: int, stop: int) -> "OffsetRuns":
        """Return the parts of the runs from `first` to before `stop`."""
        starts, stops = np.maximum(self.starts, first), np.minimum(self.stops, stop)
        return OffsetRuns(starts, stops, self.values).where(starts < stops)

    @property
    def total(self) -> int:
        """Number of offsets."""
        return int((self.stops - self.starts).sum())

    def offsets(self) -> Iterator[int]:
        """Yield every offset in ascending order."""
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            yield from range(start, stop)

    def counts(self) -> dict[int, int]:
        """Return the number of offsets by value."""
        values, places = np.unique(self.values, return_inverse=True)
        counts = np.bincount(places, weights=(self.stops - self.starts).astype(float), minlength=len(values))
        return dict(zip(values.tolist(), counts.astype(np.int64).tolist(), strict=True))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first and last offset of each range of consecutive offsets, whatever their values."""
        if not len(self.starts):
            return []
        breaks = np.flatnonzero(self.starts[1:] != self.stops[:-1]) + 1
        firsts = self.starts[np.concatenate(([0], breaks))]
        lasts = self.stops[np.concatenate((breaks - 1, [len(self.stops) - 1]))] - 1
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


_NO_RUNS = OffsetRuns(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32))


class OffsetTable:
    """The value of each offset, 0 unless set."""

    def __init__(self, runs: OffsetRuns = _NO_RUNS) -> None:
        """Create a table with the values in `runs`, which another table has returned."""
        self._runs = runs
        self._dense: dict[int, Values] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"_runs": self.runs(), "_dense": {}}

    def runs(self) -> OffsetRuns:
        """Return the runs of all offsets whose value is not 0."""
        if self._dense:
            chunks = np.array(sorted(self._dense))
            kept = self._runs.where(~np.isin(self._runs.starts // _CHUNK, chunks))
            pieces = [kept, *(_runs_of(number, self._dense[number]) for number in chunks.tolist())]
            starts, stops, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
            order = np.argsort(starts, kind="stable")
            self._runs = OffsetRuns(starts[order], stops[order], values[order])
            self._dense = {}
        return self._runs

    def __getitem__(self, offset: int) -> int:
        dense = self._dense.get(offset // _CHUNK)
        if dense is not None:
            return int(dense[offset % _CHUNK])
        at = int(np.searchsorted(self._runs.starts, offset, side="right")) - 1
        return int(self._runs.values[at]) if at >= 0 and offset < self._runs.stops[at] else 0

    def writable(self, first: int, stop: int) -> Iterator[tuple[int, Values]]:
        """Yield the values from `first` to before `stop` as writable arrays, each with its first offset."""
        while first < stop:
            number, begin = divmod(first, _CHUNK)
            end = min(stop - number * _CHUNK, _CHUNK)
            yield first, self._chunk(number)[begin:end]
            first = number * _CHUNK + end

    def set_bits(self, first: int, stop: int, bits: int) -> None:
        """Set bits of the values from `first` to before `stop`."""
        for _first, values in self.writable(first, stop):
            values |= np.uint32(bits)

    def set_bits_at(self, offset: int, bits: int) -> int:
        """Set bits of one value, and return the previous value."""
        values = self._chunk(offset // _CHUNK)
        before = int(values[offset % _CHUNK])
        values[offset % _CHUNK] = before | bits
        return before

    def _chunk(self, number: int) -> Values:
        dense = self._dense.get(number)
        if dense is None:
            if len(self._dense) >= _MOST_DENSE:
                self.runs()
            dense = self._dense[number] = self._as_dense(number)
        return dense

    def _as_dense(self, number: int) -> Values:
        dense = np.zeros(_CHUNK, np.uint32)
        begin = number * _CHUNK
        low, high = np.searchsorted(self._runs.starts, (begin, begin + _CHUNK))
        lengths = self._runs.stops[low:high] - self._runs.starts[low:high]
        if len(lengths):
            before = np.cumsum(lengths) - lengths
            at = np.repeat(self._runs.starts[low:high] - begin - before, lengths) + np.arange(lengths.sum())
            dense[at] = np.repeat(self._runs.values[low:high], lengths)
        return dense


def _runs_of(number: int, dense: Values) -> OffsetRuns:
    starts = np.concatenate(([0], np.flatnonzero(np.diff(dense)) + 1))
    stops = np.concatenate((starts[1:], [_CHUNK]))
    begin = number * _CHUNK
    return OffsetRuns((starts + begin).astype(np.int64), (stops + begin).astype(np.int64), dense[starts]).where(
        dense[starts] != 0
    )


def offsets_named(runs: OffsetRuns, most: int) -> Iterator[tuple[int, int]]:
    """Yield up to `most` offsets with their values, in ascending order."""
    for start, stop, value in zip(*runs, strict=True):
        for offset in range(int(start), int(stop)):
            if most <= 0:
                return
            most -= 1
            yield offset, int(value)

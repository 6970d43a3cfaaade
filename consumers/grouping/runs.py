"""Sets of offsets as runs: flattened (first, count) pairs, the form they take in the journal."""

from collections.abc import Iterable, Iterator

import numpy as np

from topics.records import Int64


def to_runs(offsets: Iterable[int]) -> Int64:
    """Runs of the distinct offsets given in any order; int64 [2k]."""
    ordered = np.unique(np.fromiter(offsets, "<i8"))
    if not len(ordered):
        return np.empty(0, "<i8")
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(ordered)])))
    return np.column_stack((ordered[starts], counts)).astype("<i8").reshape(-1)


def from_runs(runs: Int64) -> Iterator[int]:
    """The offsets in runs, in order."""
    for first, count in runs.reshape(-1, 2).tolist():
        yield from range(first, first + count)

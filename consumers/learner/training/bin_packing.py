"""Assignment of sequences to rows: first-fit decreasing over rows of a few lengths, deterministic (numpy only)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Layout = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""For each row length: items, and the row of each item; rows are numbered over all microbatches of that length."""


def layout(lengths: NDArray[np.int64], shapes: Mapping[int, int]) -> Layout:
    """Place items of `lengths` into rows. `shapes` gives the rows of a microbatch by row length, longest first.

    An item belongs in the shortest rows that it fits into, but room left in microbatches of longer rows is used first.
    """
    waiting = np.argsort(-lengths, kind="stable")
    placed: Layout = []
    for (length, rows), shorter in zip(shapes.items(), [*list(shapes)[1:], 0], strict=True):
        own = waiting[: np.count_nonzero(lengths[waiting] > shorter)]
        others = waiting[len(own) :]
        # No two items longer than half a row share one, so they need no search.
        alone = int(np.count_nonzero(2 * lengths[own] > length))
        room = np.full(len(own), length, np.int64)
        room[:alone] -= lengths[own[:alone]]
        bins, room = first_fit(lengths[own[alone:]], room, alone)
        own_bins = np.concatenate([np.arange(alone), bins])
        used = int(own_bins.max(initial=-1)) + 1
        # Includes empty rows of the last microbatch, which are computed anyway.
        room = np.concatenate([room[:used], np.full(-used % rows, length, np.int64)])
        bins, _room = first_fit(lengths[others], room, used)
        fits = bins >= 0
        placed.append((np.concatenate([own, others[fits]]), np.concatenate([own_bins, bins[fits]])))
        waiting = others[~fits]
    return placed


def first_fit(
    lengths: NDArray[np.int64], room: NDArray[np.int64], used: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first bin with room for each item, -1 if there is none, and the room left in each bin.

    `lengths` is descending, `room` is the free space of each bin; bins from `used` on are empty. Items of equal length
    are placed together; the result is the same as if they were placed one by one.
    """
    bins, room = np.full(len(lengths), -1, np.int64), room.copy()
    if not len(room):
        return bins, room
    values, counts = np.unique(lengths, return_counts=True)
    begin = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # At most `count` bins beyond those in use are needed.
        reach = min(len(room), used + count)
        if count == 1:
            # The common case if lengths vary much: one comparison for each item.
            first = int((room[:reach] >= length).argmax())
            if room[first] >= length:
                bins[begin] = first
                room[first] -= length
                used = max(used, first + 1)
        else:
            placed = np.minimum(np.cumsum(room[:reach] // length), count)
            taken = np.diff(placed, prepend=0)
            room[:reach] -= taken * length
            where = np.repeat(np.arange(reach), taken)
            bins[begin : begin + len(where)] = where
            used = max(used, int(where[-1]) + 1 if len(where) else 0)
        begin += count
    return bins, room

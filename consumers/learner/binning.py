"""Which sequence goes into which row: first-fit decreasing over rows of a few lengths, deterministic (numpy only)."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Layout = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""By row length the items there and the row of each, rows counted through all microbatches of that length."""


def layout(lengths: NDArray[np.int64], shapes: Mapping[int, int]) -> Layout:
    """Where items of `lengths` go. `shapes` are rows of a microbatch by row length; the first is the longest.

    An item belongs to the shortest rows that hold it, but first fills what room microbatches of longer rows have left.
    """
    waiting = np.argsort(-lengths, kind="stable")
    found: Layout = []
    for (length, rows), shorter in zip(shapes.items(), [*list(shapes)[1:], 0], strict=True):
        own = waiting[: np.count_nonzero(lengths[waiting] > shorter)]
        others = waiting[len(own) :]
        own_bins, room = first_fit(lengths[own], np.full(len(own), length, np.int64))
        used = int(own_bins.max(initial=-1)) + 1
        # With the empty rows of the last microbatch: they are computed whatever they hold.
        room = np.concatenate([room[:used], np.full(-used % rows, length, np.int64)])
        bins, _room = first_fit(lengths[others], room, used)
        fits = bins >= 0
        found.append((np.concatenate([own, others[fits]]), np.concatenate([own_bins, bins[fits]])))
        waiting = others[~fits]
    return found


def first_fit(
    lengths: NDArray[np.int64], room: NDArray[np.int64], used: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first bin with room for each item, -1 where none has any, and the room that is left.

    `lengths` is descending, `room` the free space of each bin; the bins from `used` on are empty. Items of one length
    are placed together, which gives what placing one after the other gives.
    """
    bins, room = np.full(len(lengths), -1, np.int64), room.copy()
    values, counts = np.unique(lengths, return_counts=True)
    begin = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # Beyond the bins in use, no more than these can be needed.
        reach = min(len(room), used + count)
        if count == 1:
            # Most items have a length of their own where lengths differ much: one comparison each.
            where = np.flatnonzero(room[:reach] >= length)[:1]
            room[where] -= length
        else:
            placed = np.minimum(np.cumsum(room[:reach] // length), count)
            taken = np.diff(placed, prepend=0)
            room[:reach] -= taken * length
            where = np.repeat(np.arange(reach), taken)
        bins[begin : begin + len(where)] = where
        begin += count
        used = max(used, int(where[-1]) + 1 if len(where) else 0)
    return bins, room

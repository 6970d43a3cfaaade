"""Draws slices: which episodes, from which starts, and what comes out of the files. Functions of what is held.

Uniform per episode, not per step, then per start: a long episode is drawn no more often than a short one.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.draws import generator_at
from consumers.buffers.slice_files import Moves, RingFiles
from consumers.buffers.slice_state import SliceState
from topics.errors import RollstreamError

LENGTHS, MASK = "lengths", "mask"


class NothingToDraw(RollstreamError):
    """No episode of a buffer is long enough for a slice."""


class Drawn(NamedTuple):
    """Where slices lie."""

    lengths: NDArray[np.int64]
    steps: list[tuple[int, int, int]]
    """Slice, counter of the first step, how many; slices in order, each in one or more of them."""

    @property
    def oldest(self) -> int:
        """Counter of the oldest step."""
        return min(at for _slice, at, _count in self.steps)


def check_drawable(state: SliceState, length: int, least: int) -> None:
    """Raises NothingToDraw where no episode has the least number of steps of a slice of `length`."""
    index = state.index
    if not len(index.with_length(least)):
        why = f"none of {index.episodes} episodes has {length} steps" if index.size else "it is empty"
        raise NothingToDraw(f"no slice of {length} steps can be drawn: {why}; add longer episodes first")


def draw(state: SliceState, seed: int, count: int, length: int, least: int) -> Drawn:
    """Where `count` slices of `length` steps lie; of episodes with at least `least` steps all there is.

    Counts as one draw of the state. Raises NothingToDraw.
    """
    check_drawable(state, length, least)
    rows = state.index.with_length(least)
    # By hand: numpy promises the stream of its uniform numbers, not that of its distributions (NEP 19).
    uniform = generator_at(seed, state.draws).random((2, count))
    state.draws += 1
    chosen = rows.select((uniform[0] * len(rows)).astype(np.int64))
    held = state.index.lengths(chosen)
    lengths = np.minimum(held, length)
    starts = (uniform[1] * (held - lengths + 1)).astype(np.int64)
    places = zip(chosen.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    steps = [
        (number, piece.at, piece.steps)
        for number, (row, start, taken) in enumerate(places)
        for piece in state.index.pieces(row, start, taken)
    ]
    return Drawn(lengths, steps)


def gather(files: RingFiles, drawn: Drawn, length: int, *, padded: bool) -> dict[str, NDArray[Any]]:
    """Arrays by path: [slices, length, ...], zero behind shorter ones, where `padded`; else [sum of lengths, ...]."""
    count = len(drawn.lengths)
    rows = count * length if padded else int(drawn.lengths.sum())
    moves, to, before = [], 0, -1
    for number, at, taken in drawn.steps:
        if padded and number != before:
            to, before = number * length, number
        moves.append((to, at, taken))
        to += taken
    planned = Moves(moves, files.capacity, rows)
    leaves = {}
    for spec in files.specs:
        array = files.gather(spec.path, planned, rows)
        leaves[spec.path] = array.reshape(count, length, *spec.shape) if padded else array
    return leaves


def mark_last(leaves: dict[str, NDArray[Any]], path: str, drawn: Drawn, length: int, *, padded: bool) -> None:
    """Have the last step of each slice True under a path, beside what is stored there."""
    count = len(drawn.lengths)
    if padded:
        last: tuple[Any, ...] = (np.arange(count), drawn.lengths - 1)
        shape: tuple[int, ...] = (count, length)
    else:
        last, shape = (np.cumsum(drawn.lengths) - 1,), (int(drawn.lengths.sum()),)
    leaves.setdefault(path, np.zeros(shape, np.bool_))[last] = True

"""Draws of slices: episodes, starts in them, and their rows in the files, as functions of the content.

Draws are uniform over episodes, then over starts: a long episode is drawn as often as a short one.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.slices.state import SliceSide
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.consumers.buffers.storage.segments import SegmentFiles
from rollstream.topics.errors import RollstreamError

LENGTHS, MASK = "lengths", "mask"


class NothingToDraw(RollstreamError):
    """No episode of a buffer is long enough for a slice."""


class SlicePlaces(NamedTuple):
    """Places of drawn slices in the ring."""

    lengths: NDArray[np.int64]
    steps: list[tuple[int, int, int]]
    """Ranges of steps (slice number, counter of the first step, number of steps), in order of slices."""


def check_drawable(side: SliceSide, length: int, least: int) -> None:
    """Raise NothingToDraw unless an episode has `least` steps, the minimum for a slice of `length`."""
    index = side.index
    if not len(index.with_length(least)):
        why = f"none of {index.episodes} episodes has {length} steps" if index.size else "it is empty"
        raise NothingToDraw(f"no slice of {length} steps can be drawn: {why}; add longer episodes first")


def draw(side: SliceSide, seed: int, count: int, length: int, least: int) -> SlicePlaces:
    """Draw `count` slices of `length` steps. A shorter episode with at least `least` steps gives all its steps.

    This counts as one draw of the side. Raises NothingToDraw.
    """
    check_drawable(side, length, least)
    rows = side.index.with_length(least)
    # Not generator.integers, because numpy guarantees only the stream of uniform numbers (NEP 19).
    uniform = generator_at(seed, side.draws).random((2, count))
    side.draws += 1
    chosen = rows.select((uniform[0] * len(rows)).astype(np.int64))
    held = side.index.lengths(chosen)
    lengths = np.minimum(held, length)
    starts = (uniform[1] * (held - lengths + 1)).astype(np.int64)
    places = zip(chosen.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    steps = [
        (number, steps_range.at, steps_range.steps)
        for number, (row, start, taken) in enumerate(places)
        for steps_range in side.index.ranges(row, start, taken)
    ]
    return SlicePlaces(lengths, steps)


def gather(files: SegmentFiles, drawn: SlicePlaces, length: int, *, padded: bool) -> dict[str, NDArray[Any]]:
    """Return arrays by path: [slices, length, ...] with zeros after short slices if `padded`, else [all steps, ...]."""
    count = len(drawn.lengths)
    rows = count * length if padded else int(drawn.lengths.sum())
    steps, to, before = [], 0, -1
    for number, at, taken in drawn.steps:
        if padded and number != before:
            to, before = number * length, number
        steps.append((to, at, taken))
        to += taken
    leaves = files.gather(steps, rows)
    if padded:
        return {path: leaf.reshape(count, length, *leaf.shape[1:]) for path, leaf in leaves.items()}
    return leaves


def mark_last(leaves: dict[str, NDArray[Any]], path: str, drawn: SlicePlaces, length: int, *, padded: bool) -> None:
    """Set the last step of each slice to True under a path; steps that are stored as True stay."""
    count = len(drawn.lengths)
    if padded:
        last: tuple[Any, ...] = (np.arange(count), drawn.lengths - 1)
        shape: tuple[int, ...] = (count, length)
    else:
        last, shape = (np.cumsum(drawn.lengths) - 1,), (int(drawn.lengths.sum()),)
    leaves.setdefault(path, np.zeros(shape, np.bool_))[last] = True

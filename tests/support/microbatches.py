"""Lays sequences into rows as a test says, apart from the packing that the learner uses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.learner.objective import LossConfig, token_weight

Floats = NDArray[np.floating]


@dataclass(kw_only=True)
class Sample:
    """One rollout; arrays are [tokens]. `mask` is False at the first token."""

    mask: NDArray[np.bool_]
    advantages: Floats
    generator: Floats
    learner: Floats
    entropy: Floats
    proximal: Floats
    reference: Floats
    tokens: NDArray[np.int32]
    temperature: float = 1.0
    teacher: Floats | None = None


def denominators(samples: Sequence[Sample], dtype: type = np.float32) -> dict[str, np.floating]:
    """Loss denominators of an update of `samples`."""
    counts = {"tokens": sum(s.mask.sum() for s in samples), "sequences": sum(s.mask.any() for s in samples)}
    return {name: dtype(max(1, count)) for name, count in counts.items()}


def microbatch(
    samples: Sequence[Sample],
    layout: Sequence[Sequence[int]],
    length: int,
    config: LossConfig,
    *,
    rubbish: float = 0.0,
    dtype: type = np.float32,
) -> dict[str, NDArray]:
    """The arrays of a microbatch whose row r holds the samples layout[r]; `rubbish` fills what is not trained."""
    shape = (len(layout), length)
    arrays = {
        "tokens": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, dtype),
        "temperatures": np.ones(shape, dtype),
    }
    values: tuple[str, ...] = ("advantages", "generator", "learner", "entropy", "proximal", "reference")
    if all(sample.teacher is not None for sample in samples):
        values += ("teacher",)
    arrays |= {name: np.full(shape, rubbish, dtype) for name in ("loss_weights", *values)}
    for row, members in enumerate(layout):
        start = 0
        for segment, index in enumerate(members, start=1):
            sample = samples[index]
            where = row, slice(start, start + len(sample.mask))
            arrays["tokens"][where] = sample.tokens
            arrays["positions"][where] = np.arange(len(sample.mask))
            arrays["segment_ids"][where] = segment
            arrays["loss_mask"][where] = sample.mask
            arrays["temperatures"][where] = sample.temperature
            weight = token_weight(config, max(1, int(sample.mask.sum())))
            arrays["loss_weights"][where] = np.where(sample.mask, weight, rubbish)
            for name in values:
                arrays[name][where] = np.where(sample.mask, getattr(sample, name), rubbish)
            start += len(sample.mask)
    log_probs = ("generator", "proximal", "reference", "teacher")
    return {f"{name}_log_probs" if name in log_probs else name: array for name, array in arrays.items()}


def row_by_row(samples: Sequence[Sample], length: int) -> list[list[int]]:
    """A layout that puts each sample into the current row if it fits, otherwise into the next."""
    layout: list[list[int]] = [[]]
    room = length
    for index, sample in enumerate(samples):
        if len(sample.mask) > room:
            layout.append([])
            room = length
        layout[-1].append(index)
        room -= len(sample.mask)
    return layout

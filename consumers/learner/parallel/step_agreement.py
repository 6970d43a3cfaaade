"""Agreement of a learner's processes before a step: the microbatches of each update, and the trained tokens.

Every process runs every microbatch of every update, with padding where its share has no rows, and divides by the
same denominators.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from rollstream.consumers.learner.input.packing import PackedStep


@dataclass(frozen=True, kw_only=True)
class AgreedUpdate:
    """One update over all processes."""

    microbatches: tuple[int, ...]
    """Number of microbatches, by row length in the given order."""
    trained_tokens: int
    """Sum of all loss masks."""
    trained_sequences: int
    """Sequences with a trained token."""
    tokens: int
    """Tokens that are not padding."""


@dataclass(frozen=True, kw_only=True)
class AgreedStep:
    """One step over all processes."""

    updates: tuple[AgreedUpdate, ...]
    """Updates in order."""
    too_long: int
    """Rollouts left out or cut because no row holds them."""


def agree(step: PackedStep, lengths: Sequence[int]) -> AgreedStep:
    """Return the counts of a packed step over all processes; `lengths` are the possible row lengths.

    If every process has the whole step, these are the counts of `step` itself. Otherwise the processes exchange the
    counts of their shares, so they must all call this together.
    """
    own = np.array(
        [
            [
                *(sum(batch.tokens.shape[1] == length for batch in update.microbatches) for length in lengths),
                update.trained_tokens,
                update.trained_sequences,
                update.tokens,
                step.too_long,
            ]
            for update in step.updates
        ],
        np.int32,
    )
    everyone = (
        own[None] if step.whole or jax.process_count() == 1 else np.asarray(multihost_utils.process_allgather(own))
    )
    most, total = everyone.max(axis=0).tolist(), everyone.sum(axis=0).tolist()
    return AgreedStep(
        updates=tuple(
            AgreedUpdate(
                microbatches=tuple(largest[: len(lengths)]),
                trained_tokens=summed[-4],
                trained_sequences=summed[-3],
                tokens=summed[-2],
            )
            for largest, summed in zip(most, total, strict=True)
        ),
        too_long=total[0][-1],
    )

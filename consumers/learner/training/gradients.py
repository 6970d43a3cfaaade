"""Sums of gradients over the microbatches of an update."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Sums = tuple[dict[str, jax.Array], dict[str, jax.Array]]
"""Gradients by parameter, and metrics."""


class Gradient(NamedTuple):
    """Jitted functions that sum gradients and metrics over microbatches."""

    zeros: Any
    """Initial sums, so that the first microbatch is computed like every other."""
    add: Any
    """Adds one microbatch to the sums so far, whose buffers it reuses."""

    def __call__(
        self,
        params: dict[str, jax.Array],
        microbatches: Sequence[dict[str, jax.Array]],
        denominators: dict[str, np.float32],
    ) -> Sums:
        sums: Sums = self.zeros(params)
        for batch in microbatches:
            sums = self.add(params, sums, batch, denominators)
        return sums

"""Compares a step executed again with its record: by bits, or within a tolerance where equal bits cannot be expected.

The digest of the parameters in the record shows only whether the bits differ; the MEASURES show by how much.
"""

import math
import sys
from collections.abc import Mapping

from rollstream.topics.errors import StateRefused
from rollstream.topics.records import BatchUse, LearnerStep
from rollstream.topics.records.batch_uses import names_of

MEASURES = ("loss", "entropy/mean", "optim/grad_norm")
"""Metrics of a step that are compared."""
_LEAST = 1e-3
"""Least divisor of a relative difference, because losses are close to 0."""


def difference_from(
    recorded: LearnerStep,
    digest: str,
    uses: tuple[BatchUse, ...],
    metrics: Mapping[str, float],
    same_bits: bool,
    tolerance: float,
) -> float:
    """Return the relative difference of a step from its record: 0 only for the same bits, or if a measure is missing.

    `same_bits` says whether the devices and the software are the same as on record. Raises StateRefused if the batches
    differ. With `same_bits`, it also raises if the bits differ, unless the tolerance is above 0 and the measures differ
    by at most the tolerance.
    """
    if (recorded.params_digest, recorded.uses) == (digest, uses):
        return 0.0
    difference = replay_difference(recorded.metrics, metrics)
    if recorded.uses == uses and (not same_bits or 0 < tolerance >= difference):
        # If only the bits differ, the result is above 0. If a measure is missing, there is no difference to return.
        return max(difference, sys.float_info.min) if math.isfinite(difference) else 0.0
    raise StateRefused(
        f"step {recorded.step} of learner {recorded.learner!r}, executed again, gives parameters {digest[:16]} from "
        f"batches {names_of(uses)}; on record are {recorded.params_digest[:16]} from {names_of(recorded.uses)}. Loss, "
        f"entropy or gradient norm differ by {difference:.3g} at a tolerance of {tolerance:g}. Restore the settings, "
        "software and thread count of the first execution, or start another learner.name with learner.take_over"
    )


def replay_difference(recorded: Mapping[str, float], again: Mapping[str, float]) -> float:
    """Largest relative difference between the measures of a step on record and of the step executed again.

    Infinite if a measure is missing or not finite.
    """
    return max(_difference(recorded.get(name, math.nan), again.get(name, math.nan)) for name in MEASURES)


def _difference(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), _LEAST)

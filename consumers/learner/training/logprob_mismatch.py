"""Check, from the metrics of a step, that recorded log-probabilities belong to the sampling policy; needs no JAX.

Samplers with another precision or kernel differ a little. Wrongly declared values differ a lot, but they train without
an error.
"""

import math
from collections.abc import Mapping

from rollstream.consumers.learner.objective import LossConfig


def mismatch_warning(metrics: Mapping[str, float], config: LossConfig) -> str | None:
    """Return a warning that names the likely cause, or None if sampler and learner agree within the limits.

    `metrics` are from one step: mismatch_kl/mean, mismatch_log_ratio/mean and off_policy/staleness. The first two
    are zero up to rounding for a policy compared with itself. For different policies the mean log ratio is minus their
    divergence, so negative, if the tokens were drawn with the recorded probabilities.
    """
    divergence, log_ratio = metrics.get("mismatch_kl/mean", 0.0), metrics.get("mismatch_log_ratio/mean", 0.0)
    staleness = metrics.get("off_policy/staleness", 0.0)
    fresh = staleness == 0.0
    limit = config.mismatch_limit + staleness * config.stale_mismatch_limit
    if divergence <= limit:  # False for NaN.
        return None
    if not math.isfinite(divergence):
        cause = "recorded log-probabilities or parameters of the learner that are not numbers"
    elif log_ratio > 0:
        cause = (
            "tokens that were likelier than recorded: log-probabilities from before temperature (raw) declared as "
            "processed, or sampling cut by top_p, top_k or min_p"
        )
    elif fresh:
        cause = (
            "log-probabilities from after temperature (processed) declared as raw, a temperature other than declared, "
            "weights or a model in the sampler other than the version it names, or the precision of the sampler"
        )
    else:
        cause = (
            "rollouts too old for how fast the policy moves (learner.max_policy_lag, learner.optimizer.learning_rate), "
            "or wrong recorded values: check whether this also occurs at staleness 0"
        )
    return (
        f"mismatch_kl/mean {divergence:.3g} at staleness {staleness:.3g} is above the limit {limit:.3g}: "
        f"learner.loss.mismatch_limit {config.mismatch_limit:g} plus stale_mismatch_limit "
        f"{config.stale_mismatch_limit:g} per step of staleness (mean log ratio {log_ratio:.3g}); likely cause: {cause}"
    )

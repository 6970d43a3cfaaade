"""Off-policy corrections: importance weights and divergences, as pure functions of log-probabilities.

Results are float32 of the shape of the arguments, and finite for all arguments but NaN.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from rollstream.consumers.learner.training.objective import LossConfig
from rollstream.consumers.learner.training.surrogates import sequence_means, sequence_sums

LARGEST_LOG_RATIO = 20.0
"""Bound of differences of log-probabilities: e^20 is beyond any clip bound, and its square is finite."""


def log_ratio(log_probs: jax.Array, against: jax.Array, mask: jax.Array) -> jax.Array:
    """`log_probs` - `against`, within +-LARGEST_LOG_RATIO; 0 where `mask` is 0, whatever the values there."""
    difference = jnp.where(mask > 0, log_probs, 0.0) - jnp.where(mask > 0, against, 0.0)
    return jnp.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def importance_weights(
    config: LossConfig, log_ratios: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Weights, and which were limited, both [rows, tokens], for `log_ratios` of proximal over generating policy.

    Truncated weights are min(w, importance_high) (V-trace, arXiv:1802.01561); masked ones w within importance_low and
    importance_high and 0 outside (IcePop, arXiv:2510.18855). w is the ratio of the token, the product of ratios over
    the trained tokens of its sequence, or their geometric mean. No gradient flows through the weights.
    """
    recipe = config.recipe
    log_weights = jax.lax.stop_gradient(log_ratios)
    if recipe.importance_level == "sequence":
        sums = sequence_sums(log_weights * mask, segment_ids)
        log_weights = jnp.clip(sums, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    elif recipe.importance_level == "geometric":
        log_weights = sequence_means(log_weights, mask, segment_ids)
    weights = jnp.exp(log_weights)
    above = weights > config.importance_high
    if recipe.importance_sampling == "truncated":
        return jnp.minimum(weights, config.importance_high), above
    outside = above | (weights < config.importance_low)
    return jnp.where(outside, 0.0, weights), outside


def off_policy_mask(
    config: LossConfig, log_ratios: jax.Array, advantages: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Tokens that off-policy sequence masking leaves out, bool [rows, tokens] (DeepSeek-V3.2, arXiv:2512.02556, 3.1).

    Those with a negative advantage in sequences whose mean of -`log_ratios`, of the learner over the generator, is
    above sequence_mask_limit: bad answers that the policy has left behind teach nothing about it.
    """
    means = sequence_means(jax.lax.stop_gradient(-log_ratios), mask, segment_ids)
    return (advantages < 0) & (means > config.sequence_mask_limit) & (mask > 0)


def divergence(estimator: Literal["k1", "k2", "k3"], log_ratios: jax.Array) -> jax.Array:
    """Estimates of KL(p || q) from `log_ratios` = log q(x) - log p(x) at samples x of p.

    k1 = -log r is unbiased; k2 = (log r)^2 / 2 has less variance; k3 = r - 1 - log r has both properties
    (http://joschu.net/blog/kl-approx.html; k3 is GRPO's, arXiv:2402.03300).
    """
    if estimator == "k1":
        return -log_ratios
    return jnp.square(log_ratios) / 2 if estimator == "k2" else jnp.expm1(log_ratios) - log_ratios

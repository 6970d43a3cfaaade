"""Off-policy corrections: importance weights and divergences, as pure functions of log-probabilities.

Results are float32 of the shape of the arguments, and finite for all arguments but NaN.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rollstream.consumers.learner.objective import LossConfig
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
    """Weights, and which of them are limited, both [rows, tokens], for `log_ratios` of proximal to generating policy.

    Truncated weights are min(w, importance_high) (V-trace, arXiv:1802.01561); masked weights are w within
    importance_low and importance_high, and 0 outside (IcePop, arXiv:2510.18855). w is the ratio of the token, the
    product of ratios over the trained tokens of its sequence, or their geometric mean. No gradient flows through the
    weights.
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


def rejected(
    config: LossConfig, log_ratios: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> dict[str, jax.Array]:
    """Tokens beyond the bounds of each configured level, bool [rows, tokens], for `log_ratios` of learner over
    generator.

    A level bounds the ratio of the token itself, or of its sequence: the product over its trained tokens, or their
    geometric mean. Unlike with masked importance weights, tokens that are kept are not weighted (hard trust region,
    richardli.xyz/rl-collapse-3).
    """
    held = jax.lax.stop_gradient(log_ratios) * mask
    beyond = {}
    for level, (low, high) in config.rejections.items():
        values = held
        if level == "sequence":
            values = sequence_sums(held, segment_ids)
        elif level == "geometric":
            values = sequence_means(held, mask, segment_ids)
        # Compared as logarithms: a product of many ratios may not be a finite number.
        beyond[level] = ((values > math.log(high)) | (values < (math.log(low) if low else -math.inf))) & (mask > 0)
    return beyond


def returns(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """For each token, the sum of `values` [rows, tokens] over the trained tokens of its sequence from this token on."""

    def joined(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]) -> Any:
        (sum_later, ends_later), (sum_earlier, ends_earlier) = later, earlier
        return jnp.where(ends_earlier, sum_earlier, sum_earlier + sum_later), ends_later | ends_earlier

    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    ends = following != segment_ids
    sums: jax.Array = jax.lax.associative_scan(joined, (values * mask, ends), reverse=True, axis=1)[0]
    return sums


def off_policy_mask(
    config: LossConfig, log_ratios: jax.Array, advantages: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Tokens that off-policy sequence masking leaves out, bool [rows, tokens] (DeepSeek-V3.2, arXiv:2512.02556, 3.1).

    These tokens have a negative advantage, and the mean of -`log_ratios` (learner over generator) over their sequence
    is above sequence_mask_limit. The policy learns nothing from bad answers that it no longer gives.
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

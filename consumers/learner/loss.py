"""The losses of the learner as pure JAX functions over one packed microbatch.

Sums are divided by denominators given from outside, counted over the whole update, so that microbatches and processes
add up to the same gradient however an update is split.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from consumers.learner.objective import LossConfig, denominator_of
from consumers.models.config import Compute, DecoderConfig
from consumers.models.decoder import Params, hidden, token_logprobs

Arrays = Mapping[str, jax.Array]

SUPERVISED_METRICS = ("loss",)


def policy_loss(
    params: Params, model: DecoderConfig, compute: Compute, config: LossConfig, batch: Arrays, denominators: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped objective with an entropy bonus, to be minimised.

    With r the ratio of the learner's to the generator's probability of a token and A its advantage, a token adds
    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), for A < 0 at most -ratio_cap A (PPO arXiv:1707.06347, clip-higher
    arXiv:2503.14476, dual clip arXiv:1912.09729). `batch` holds the arrays of a PackedBatch; `denominators` are the
    numbers of trained "tokens" and of "sequences" with any, of the whole update over all processes.

    Returns the loss, sum(loss_weights * token loss) / denominators[denominator_of(config)], and metrics, means over
    trained tokens; both already divided, so that summing over microbatches gives the update's. `mismatch_kl/mean`
    estimates KL(generator || learner) per token by k3 (http://joschu.net/blog/kl-approx.html).
    """
    learner_logprobs, entropy = _next_token_logprobs(params, model, compute, batch)
    mask = batch["loss_mask"][:, 1:]
    weights = batch["loss_weights"][:, 1:] * mask
    advantages = batch["advantages"][:, 1:]
    # Where nothing is trained the difference is set to 0: rubbish there must not overflow to inf, for inf * 0 is NaN.
    log_ratio = jnp.where(mask > 0, learner_logprobs - batch["generator_log_probs"][:, 1:], 0.0)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    objective = jnp.where(advantages < 0, jnp.maximum(objective, config.ratio_cap * advantages), objective)

    def mean(values: jax.Array) -> jax.Array:
        return jnp.sum(values * mask) / denominators["tokens"]

    token_loss = -objective - config.entropy_coefficient * entropy
    loss = jnp.sum(weights * token_loss) / denominators[denominator_of(config)]
    metrics = {
        "loss": loss,
        "entropy/mean": mean(entropy),
        "mismatch_kl/mean": mean(ratio - 1.0 - log_ratio),
        "clip_ratio/low_mean": mean((advantages < 0) & (ratio < 1.0 - config.clip_low)),
        "clip_ratio/high_mean": mean((advantages > 0) & (ratio > 1.0 + config.clip_high)),
        "clip_ratio/cap_mean": mean((advantages < 0) & (ratio > config.ratio_cap)),
    }
    return loss, metrics


def supervised_loss(
    params: Params, model: DecoderConfig, compute: Compute, batch: Arrays, denominators: Arrays
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean negative log-probability of the trained tokens; arguments and results as for `policy_loss`."""
    logprobs, _ = _next_token_logprobs(params, model, compute, batch)
    loss = -jnp.sum(logprobs * batch["loss_mask"][:, 1:]) / denominators["tokens"]
    return loss, {"loss": loss}


def log_probs(params: Params, model: DecoderConfig, compute: Compute, batch: Arrays) -> jax.Array:
    """Log-probability of every token given those before it in its segment, float32 [rows, sequence_length].

    Meaningless at the first token of a segment, and 0 at the first of a row.
    """
    logprobs, _ = _next_token_logprobs(params, model, compute, batch)
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def _next_token_logprobs(
    params: Params, model: DecoderConfig, compute: Compute, batch: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy [rows, sequence_length - 1] of tokens 1 onwards given those before."""
    dtype = jnp.dtype(compute.dtype)
    params = {name: value.astype(dtype) for name, value in params.items()}
    states = hidden(params, model, batch["tokens"], batch["positions"], batch["segment_ids"], remat=compute.remat)
    return token_logprobs(
        params,
        model,
        states[:, :-1],
        batch["tokens"][:, 1:],
        batch["temperatures"][:, 1:],
        chunk=compute.vocabulary_chunk,
    )

"""Choice of the next token from logits: temperature, min_p, top_k and top_p, with separate noise for each row.

A token depends on its row's logits, seed and index only. Its log-probability is under the distribution it was drawn
from.
"""

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Array = TypeVar("Array")
"""A numpy array on the host, a JAX array in compiled functions."""


class SamplingArrays(NamedTuple, Generic[Array]):
    """Sampling parameters of B rows."""

    seeds: Array
    """uint32 [B, 2]: high and low word."""
    temperatures: Array
    """float32 [B]; 0 takes the likeliest token."""
    top_k: Array
    """int32 [B]: number of likeliest tokens kept; 0 keeps all."""
    top_p: Array
    """float32 [B]: the likeliest tokens that together reach this probability are kept; 1 keeps all."""
    min_p: Array
    """float32 [B]: tokens of at least this share of the highest probability are kept; 0 keeps all."""


def choose(
    logits: jax.Array, sampling: SamplingArrays[jax.Array], indices: jax.Array, *, filtering: bool
) -> tuple[jax.Array, jax.Array]:
    """Return a token, int32 [B], and its log-probability, float32 [B], for every row.

    `logits` are float32 [B, vocabulary]; `indices` int32 [B] count the tokens that a row sampled before. top_k, top_p
    and min_p are applied only with `filtering`, because they sort the vocabulary. Log-probabilities are at the sampling
    temperature and after the filters; for greedy rows, at temperature 1 and without filters.
    """
    greedy = sampling.temperatures == 0.0
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperatures)[:, None]
    if filtering:
        scaled = jnp.where(_kept(scaled, sampling) | greedy[:, None], scaled, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(sampling.seeds, impl="threefry2x32"), indices)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    tokens = jnp.argmax(jnp.where(greedy[:, None], scaled, scaled + noise), axis=-1).astype(jnp.int32)
    return tokens, jnp.take_along_axis(jax.nn.log_softmax(scaled), tokens[:, None], axis=-1)[:, 0]


def _kept(scaled: jax.Array, sampling: SamplingArrays[jax.Array]) -> jax.Array:
    """Tokens that the filters keep, bool [B, vocabulary], in vLLM's order: min_p, then top_k, then top_p."""
    order = jnp.argsort(scaled, axis=-1, descending=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    ranks = jnp.arange(scaled.shape[-1])
    # The ratio of a probability to the highest is the exponential of the difference of their logits.
    allowed = (ranked - ranked[:, :1]) >= jnp.log(sampling.min_p)[:, None]
    allowed &= (sampling.top_k[:, None] <= 0) | (ranks < sampling.top_k[:, None])
    probabilities = jax.nn.softmax(jnp.where(allowed, ranked, -jnp.inf))
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    allowed &= (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1.0)
    allowed |= ranks == 0
    return jnp.zeros_like(allowed).at[jnp.arange(len(scaled))[:, None], order].set(allowed)

"""Log-probability and entropy of tokens, without holding logits of all positions and vocabulary entries at once.

One forward and one backward pass over chunks of the vocabulary give the results of the whole softmax. Logits, sums and
results are float32 for every dtype of states and weights.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_NEVER = -1e30
"""Logit of padding and of removed entries: finite, so that probability 0 times the logit is 0."""


class Kept(NamedTuple):
    """Entries to which the distributions of positions [R, T] are limited, each of them once, with any padding."""

    positions: jax.Array
    """int32 [R, M]: position in its row; T or more in padding."""
    entries: jax.Array
    """int32 [R, M]: vocabulary entry. A position without any is not limited; the target of a position always stays."""


def whole(
    states: jax.Array, weight: jax.Array, targets: jax.Array, temperatures: jax.Array, kept: Kept | None = None
) -> tuple[jax.Array, jax.Array]:
    """The results of `chunked`, computed from all logits [..., V] at once."""
    logits = jnp.matmul(states, weight.T, preferred_element_type=jnp.float32)
    scaled = logits / temperatures[..., None]
    if kept is not None:
        scaled = jnp.where(_allowed(kept, targets, jnp.arange(weight.shape[0]), 1, 0), scaled, _NEVER)
    log_probabilities = jax.nn.log_softmax(scaled)
    chosen = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def chunked(
    states: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    temperatures: jax.Array,
    kept: Kept | None,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and entropy, both float32 [...], holding logits for at most `chunk` entries.

    `states` [..., H] and `weight` [V, H] have the same dtype; `targets` int32 [...]; `temperatures` float32 [...]
    divide the logits. With `kept`, for states [R, T, H], both are of the distribution limited to these entries. The
    log-sum-exp is accumulated over the chunks (arXiv:1805.02867); the backward pass recomputes the logits of each
    chunk, and casts gradients to the dtype of states and weights.
    """
    return _forward(states, weight, targets, temperatures, kept, chunk)[0]


def _forward(
    states: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    temperatures: jax.Array,
    kept: Kept | None,
    chunk: int,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    count = chunks_of(weight.shape[0], chunk)
    view = _view(weight, count)

    def add(carry: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        """Add a chunk to the running max m, z = sum exp(s - m), t = sum exp(s - m) (s - m) of all scaled logits s."""
        m, z, t, chosen = carry
        scaled, ours = _chunk(states, view, index, temperatures, targets, kept, weight.shape[0])
        highest = jnp.maximum(m, jnp.max(scaled, axis=-1))
        shift, centred = m - highest, scaled - highest[..., None]
        exponentials = jnp.exp(centred)
        t = jnp.exp(shift) * (t + z * shift) + jnp.sum(exponentials * centred, axis=-1)
        z = jnp.exp(shift) * z + jnp.sum(exponentials, axis=-1)
        return (highest, z, t, chosen + jnp.sum(jnp.where(ours, scaled, 0.0), axis=-1)), None

    nothing = jnp.zeros(targets.shape, jnp.float32)
    start: tuple[jax.Array, ...] = (nothing + _NEVER, nothing, nothing, nothing)
    (m, z, t, chosen), _ = jax.lax.scan(add, start, jnp.arange(count))
    normaliser = m + jnp.log(z)
    entropy = jnp.log(z) - t / z
    return (chosen - normaliser, entropy), (states, weight, targets, temperatures, kept, normaliser, entropy)


def _backward(
    chunk: int, saved: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, jax.Array, None]:
    states, weight, targets, temperatures, kept, normaliser, entropy = saved
    to_chosen, to_entropy = (cotangent[..., None] for cotangent in cotangents)
    count = chunks_of(weight.shape[0], chunk)
    view = _view(weight, count)
    leading = tuple(range(targets.ndim))

    def add(carry: tuple[jax.Array, ...], index: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        """With p the probabilities: d chosen / d s = [target] - p and d entropy / d s = -p (log p + entropy)."""
        d_states, d_view, d_temperatures = carry
        scaled, ours = _chunk(states, view, index, temperatures, targets, kept, weight.shape[0])
        log_p = scaled - normaliser[..., None]
        p = jnp.exp(log_p)
        d_scaled = to_chosen * (ours - p) - to_entropy * p * (log_p + entropy[..., None])
        d_temperatures -= jnp.sum(d_scaled * scaled, axis=-1) / temperatures
        d_logits = (d_scaled / temperatures[..., None]).astype(weight.dtype)
        part = jax.lax.dynamic_index_in_dim(view, index, 1, keepdims=False)
        d_states += jnp.matmul(d_logits, part, preferred_element_type=jnp.float32)
        d_part = jnp.tensordot(d_logits, states, (leading, leading), preferred_element_type=jnp.float32)
        d_view = jax.lax.dynamic_update_index_in_dim(d_view, d_part.astype(weight.dtype), index, 1)
        return (d_states, d_view, d_temperatures), None

    nothing = jnp.zeros(targets.shape, jnp.float32)
    start: tuple[jax.Array, ...] = (jnp.zeros(states.shape, jnp.float32), jnp.zeros_like(view), nothing)
    (d_states, d_view, d_temperatures), _ = jax.lax.scan(add, start, jnp.arange(count))
    d_weight = d_view.reshape(-1, weight.shape[1])[: weight.shape[0]]
    return d_states.astype(states.dtype), d_weight, None, d_temperatures, None


chunked.defvjp(_forward, _backward)


def chunks_of(entries: int, chunk: int) -> int:
    """Number of chunks of at most `chunk` vocabulary entries: the least number that divides the vocabulary, if it is
    below twice the least possible number; otherwise the latter, with padding."""
    least = -(-entries // chunk)
    return next((count for count in range(least, 2 * least) if entries % count == 0), least)


def _view(weight: jax.Array, count: int) -> jax.Array:
    """[V, H] as [chunk, count, H]: chunk `index` is `[:, index]`, every count-th entry.

    Chunks are interleaved, so that entries split over devices stay in place during the loop over chunks.
    """
    entries, width = weight.shape
    size = -(-entries // count)
    return jnp.pad(weight, ((0, size * count - entries), (0, 0))).reshape(size, count, width)


def _chunk(
    states: jax.Array,
    view: jax.Array,
    index: jax.Array,
    temperatures: jax.Array,
    targets: jax.Array,
    kept: Kept | None,
    entries: int,
) -> tuple[jax.Array, jax.Array]:
    """Scaled logits float32 [..., chunk] of one chunk, and a mask of the target's position."""
    part = jax.lax.dynamic_index_in_dim(view, index, 1, keepdims=False)
    size, count, _ = view.shape
    numbers = jnp.arange(size) * count + index
    scaled = jnp.matmul(states, part.T, preferred_element_type=jnp.float32) / temperatures[..., None]
    if size * count > entries:
        scaled = jnp.where(numbers < entries, scaled, _NEVER)
    if kept is not None:
        scaled = jnp.where(_allowed(kept, targets, numbers, count, index), scaled, _NEVER)
    return scaled, targets[..., None] == numbers


def _allowed(kept: Kept, targets: jax.Array, numbers: jax.Array, count: int, index: jax.Array | int) -> jax.Array:
    """Whether the entries `numbers`, every `count`-th from `index` on, stay at each position, bool [R, T, chunk]."""
    rows, size = jnp.arange(len(targets))[:, None], len(numbers)
    # Indices beyond the end are dropped.
    columns = jnp.where(kept.entries % count == index, kept.entries // count, size)
    mask = jnp.zeros((*targets.shape, size), bool).at[rows, kept.positions, columns].set(True, mode="drop")
    limited = jnp.zeros(targets.shape, bool).at[rows, kept.positions].set(True, mode="drop")
    return mask | ~limited[..., None] | (targets[..., None] == numbers)

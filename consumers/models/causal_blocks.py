"""Causal attention in blocks of queries and keys, forward and backward, that computes only blocks in which tokens meet.

Memory is linear in the length of rows (FlashAttention-2, arXiv:2307.08691): scores of one block pair are held at once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def causal_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int, window: int = 0
) -> jax.Array:
    """Attention of q [B, T, heads, head_dim] over k and v [B, T, kv heads, head_dim], in q's shape and dtype.

    A token attends to itself and to earlier tokens of its own segment; segments are contiguous. With a `window` it
    attends to that many at most. Blocks of keys after a block of queries are skipped, and so are those before the first
    token that one of its rows sees.
    """
    return _forward(q, k, v, segment_ids, block, window)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int, window: int
) -> tuple[jax.Array, Any]:
    rows, length, heads, head_dim = q.shape
    queries, keys, values, ids = _in_blocks(q, k, v, segment_ids, block)
    first = _first_blocks(ids, window)

    def of_queries(number: jax.Array) -> Pair:
        query = queries[number]
        shape = query.shape[:-1]

        def with_keys(other: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            total, norm, highest = sums
            scores = _scores(query, keys[other], ids, number, other, window)
            now = jnp.maximum(highest, scores.max(-1))
            weights, scale = jnp.exp(scores - now[..., None]), jnp.exp(highest - now)
            added = jnp.einsum(
                "bgrqk,bgkd->bgrqd", weights.astype(v.dtype), values[other], preferred_element_type=jnp.float32
            )
            return total * scale[..., None] + added, norm * scale + weights.sum(-1), now

        begin = (jnp.zeros(query.shape, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.full(shape, _LOWEST))
        # The diagonal comes first, so that every query has met a key.
        begin = with_keys(number, begin)
        total, norm, highest = jax.lax.fori_loop(first[number], number, with_keys, begin)
        return (total / norm[..., None]).astype(q.dtype), highest + jnp.log(norm)

    attended, log_norms = jax.lax.map(of_queries, jnp.arange(len(queries)))
    output = _joined(attended, rows, heads, head_dim)[:, :length]
    return output, (q, k, v, segment_ids, output, log_norms)


def _backward(block: int, window: int, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segment_ids, output, log_norms = kept
    rows, length, heads, head_dim = q.shape
    queries, keys, values, ids = _in_blocks(q, k, v, segment_ids, block)
    gradients, outputs = (_query_blocks(x, k.shape[2], block) for x in (gradient, output))
    first, scale = _first_blocks(ids, window), head_dim**-0.5

    def of_queries(sums: Pair, number: jax.Array) -> tuple[Pair, jax.Array]:
        query, upstream = queries[number], gradients[number]
        inner = jnp.sum(upstream.astype(jnp.float32) * outputs[number].astype(jnp.float32), -1, keepdims=True)

        def with_keys(other: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            of_query, of_keys, of_values = sums
            weights = jnp.exp(_scores(query, keys[other], ids, number, other, window) - log_norms[number][..., None])
            product = partial(jnp.einsum, preferred_element_type=jnp.float32)
            more_values = product("bgrqk,bgrqd->bgkd", weights.astype(v.dtype), upstream)
            of_weights = product("bgrqd,bgkd->bgrqk", upstream, values[other])
            of_scores = (weights * (of_weights - inner) * scale).astype(q.dtype)
            return (
                of_query + product("bgrqk,bgkd->bgrqd", of_scores, keys[other]),
                of_keys.at[other].add(product("bgrqk,bgrqd->bgkd", of_scores, query)),
                of_values.at[other].add(more_values),
            )

        begin = (jnp.zeros(query.shape, jnp.float32), *sums)
        of_query, of_keys, of_values = jax.lax.fori_loop(first[number], number + 1, with_keys, begin)
        return (of_keys, of_values), of_query.astype(q.dtype)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    by_key, by_query = jax.lax.scan(of_queries, (zeros, zeros), jnp.arange(len(queries)))
    of_keys, of_values = (_joined(x[:, :, :, None], rows, k.shape[2], head_dim)[:, :length] for x in by_key)
    of_query = _joined(by_query, rows, heads, head_dim)[:, :length]
    return of_query, of_keys.astype(k.dtype), of_values.astype(v.dtype), None


causal_blocks.defvjp(_forward, _backward)

_LOWEST = np.float32(-1e30)
"""Score of keys that a query does not see: finite, so that differences are no NaN."""


def _scores(
    query: jax.Array, keys: jax.Array, ids: jax.Array, number: jax.Array, other: jax.Array, window: int
) -> jax.Array:
    """Scaled scores, float32 [B, kv heads, heads / kv heads, block, block], of block `number` over block `other`."""
    scores = jnp.einsum("bgrqd,bgkd->bgrqk", query, keys, preferred_element_type=jnp.float32)
    block = query.shape[-2]
    at, before = number * block + jnp.arange(block)[:, None], other * block + jnp.arange(block)
    causal = at >= before
    if window:
        causal &= at - before < window
    seen = (ids[number][:, :, None] == ids[other][:, None, :]) & causal
    return jnp.where(seen[:, None, None], scores * query.shape[-1] ** -0.5, _LOWEST)


def _first_blocks(ids: jax.Array, window: int) -> jax.Array:
    """First block of keys that each block of queries meets, int32 [blocks]; `ids` are [blocks, B, block]."""
    blocks, rows, block = ids.shape
    row = jnp.moveaxis(ids, 0, 1).reshape(rows, -1)
    place = jnp.broadcast_to(jnp.arange(row.shape[1]), row.shape)
    begins = jnp.concatenate([jnp.ones_like(row[:, :1], bool), row[:, 1:] != row[:, :-1]], axis=1)
    starts = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    first = starts.reshape(rows, blocks, block)[:, :, 0].min(0)
    if window:
        first = jnp.maximum(first, block * jnp.arange(blocks) - window + 1)
    return (first // block).astype(jnp.int32)


def _in_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries [blocks, B, kv heads, heads / kv heads, block, head_dim], keys and values without the fourth dimension,
    and segment ids [blocks, B, block]; rows are padded to whole blocks."""
    keys, values = (_query_blocks(x, k.shape[2], block)[:, :, :, 0] for x in (k, v))
    rows, length = segment_ids.shape
    ids = jnp.pad(segment_ids, ((0, 0), (0, -length % block))).reshape(rows, -1, block)
    return _query_blocks(q, k.shape[2], block), keys, values, jnp.moveaxis(ids, 1, 0)


def _query_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """[B, T, heads, head_dim] as [blocks, B, kv heads, heads / kv heads, block, head_dim]."""
    rows, length, heads, head_dim = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    split = padded.reshape(rows, -1, block, kv_heads, heads // kv_heads, head_dim)
    return jnp.transpose(split, (1, 0, 3, 4, 2, 5))


def _joined(blocks: jax.Array, rows: int, heads: int, head_dim: int) -> jax.Array:
    """The opposite of `_query_blocks`, with the padding of the last block."""
    return jnp.transpose(blocks, (1, 0, 4, 2, 3, 5)).reshape(rows, -1, heads, head_dim)

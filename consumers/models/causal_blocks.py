"""Causal attention in blocks of queries and keys, forward and backward, that skips blocks in which no query sees a key.

Memory is linear in the length of rows (FlashAttention-2, arXiv:2307.08691): only the scores of one pair of blocks are
held at once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def causal_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    start: jax.Array | int,
    block: int,
    window: int = 0,
) -> jax.Array:
    """Attention of q [B, T, heads, head_dim] over k and v [B, S, kv heads, head_dim], in q's shape and dtype.

    Rows have S tokens, with `segment_ids` int32 [B, S]; the queries are the T tokens from token `start` on. A token
    attends to itself and to earlier tokens of its own segment; segments are contiguous. With a `window`, it attends to
    at most that many tokens. Blocks of keys after a block of queries are skipped, and so are blocks before the first
    token that any of the queries sees.
    """
    return _forward(q, k, v, segment_ids, start, block, window)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, start: jax.Array | int, block: int, window: int
) -> tuple[jax.Array, Any]:
    rows, length, heads, head_dim = q.shape
    queries, keys, values = _in_blocks(q, k, v, block)
    places = _places(segment_ids, start, len(queries), block, window)

    def of_queries(number: jax.Array) -> Pair:
        query = queries[number]
        shape = query.shape[:-1]

        def with_keys(other: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            total, norm, highest = sums
            scores = _scores(query, keys[other], places, number, other, window)
            now = jnp.maximum(highest, scores.max(-1))
            weights, scale = jnp.exp(scores - now[..., None]), jnp.exp(highest - now)
            added = jnp.einsum(
                "bgrqk,bgkd->bgrqd", weights.astype(v.dtype), values[other], preferred_element_type=jnp.float32
            )
            return total * scale[..., None] + added, norm * scale + weights.sum(-1), now

        begin = (jnp.zeros(query.shape, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.full(shape, _LOWEST))
        # The block on the diagonal is processed first. If a query sees no key in it, the query's sums are meaningless;
        # they are multiplied by 0 when the loop reaches a block with a key that the query sees.
        begin = with_keys(places.last[number], begin)
        total, norm, highest = jax.lax.fori_loop(places.first[number], places.last[number], with_keys, begin)
        return (total / norm[..., None]).astype(q.dtype), highest + jnp.log(norm)

    attended, log_norms = jax.lax.map(of_queries, jnp.arange(len(queries)))
    output = _joined(attended, rows, heads, head_dim)[:, :length]
    return output, (q, k, v, segment_ids, start, output, log_norms)


def _backward(
    block: int, window: int, kept: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    q, k, v, segment_ids, start, output, log_norms = kept
    rows, length, heads, head_dim = q.shape
    queries, keys, values = _in_blocks(q, k, v, block)
    gradients, outputs = (_query_blocks(x, k.shape[2], block) for x in (gradient, output))
    places, scale = _places(segment_ids, start, len(queries), block, window), head_dim**-0.5

    def of_queries(sums: Pair, number: jax.Array) -> tuple[Pair, jax.Array]:
        query, upstream = queries[number], gradients[number]
        inner = jnp.sum(upstream.astype(jnp.float32) * outputs[number].astype(jnp.float32), -1, keepdims=True)

        def with_keys(other: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
            of_query, of_keys, of_values = sums
            weights = jnp.exp(_scores(query, keys[other], places, number, other, window) - log_norms[number][..., None])
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
        of_query, of_keys, of_values = jax.lax.fori_loop(
            places.first[number], places.last[number] + 1, with_keys, begin
        )
        return (of_keys, of_values), of_query.astype(q.dtype)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    by_key, by_query = jax.lax.scan(of_queries, (zeros, zeros), jnp.arange(len(queries)))
    of_keys, of_values = (_joined(x[:, :, :, None], rows, *k.shape[2:])[:, : k.shape[1]] for x in by_key)
    of_query = _joined(by_query, rows, heads, head_dim)[:, :length]
    return of_query, of_keys.astype(k.dtype), of_values.astype(v.dtype), None, None


causal_blocks.defvjp(_forward, _backward)

_LOWEST = np.float32(-1e30)
"""Score of keys that a query does not see: finite, so that differences are not NaN."""


class _Places(NamedTuple):
    """Places of blocks of queries in their rows, and the blocks of keys that they attend to."""

    start: jax.Array | int
    """Token of the first query."""
    query_ids: jax.Array
    """Segments of queries, [blocks, B, block]."""
    key_ids: jax.Array
    """Segments of keys, [blocks, B, block]."""
    first: jax.Array
    """First block of keys that each block of queries attends to, int32 [blocks]."""
    last: jax.Array
    """Last block of keys that each block of queries attends to, int32 [blocks]."""


def _places(segment_ids: jax.Array, start: jax.Array | int, blocks: int, block: int, window: int) -> _Places:
    """Places of the given number of `blocks` of queries, which begin at token `start` of the rows."""
    rows, length = segment_ids.shape
    padded = jnp.pad(segment_ids, ((0, 0), (0, -length % block)))
    of_queries = jax.lax.dynamic_slice_in_dim(jnp.pad(padded, ((0, 0), (0, blocks * block))), start, blocks * block, 1)
    key_ids, query_ids = (jnp.moveaxis(ids.reshape(rows, -1, block), 1, 0) for ids in (padded, of_queries))
    place = jnp.broadcast_to(jnp.arange(length), segment_ids.shape)
    begins = segment_ids != jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    segment_starts = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    tokens = start + block * jnp.arange(blocks)
    first = segment_starts[:, tokens].min(0)
    if window:
        first = jnp.maximum(first, tokens - window + 1)
    last = jnp.minimum((tokens + block - 1) // block, len(key_ids) - 1)
    return _Places(start, query_ids, key_ids, (first // block).astype(jnp.int32), last.astype(jnp.int32))


def _scores(
    query: jax.Array, keys: jax.Array, places: _Places, number: jax.Array, other: jax.Array, window: int
) -> jax.Array:
    """Scaled scores, float32 [B, kv heads, heads / kv heads, block, block], of block `number` over block `other`."""
    scores = jnp.einsum("bgrqd,bgkd->bgrqk", query, keys, preferred_element_type=jnp.float32)
    block = query.shape[-2]
    at, before = places.start + number * block + jnp.arange(block)[:, None], other * block + jnp.arange(block)
    causal = at >= before
    if window:
        causal &= at - before < window
    seen = (places.query_ids[number][:, :, None] == places.key_ids[other][:, None, :]) & causal
    return jnp.where(seen[:, None, None], scores * query.shape[-1] ** -0.5, _LOWEST)


def _in_blocks(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [blocks, B, kv heads, heads / kv heads, block, head_dim], and keys and values without the fourth
    dimension; rows are padded to whole blocks."""
    queries, keys, values = (_query_blocks(x, k.shape[2], block) for x in (q, k, v))
    return queries, keys[:, :, :, 0], values[:, :, :, 0]


def _query_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """[B, T, heads, head_dim] as [blocks, B, kv heads, heads / kv heads, block, head_dim]."""
    rows, length, heads, head_dim = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    split = padded.reshape(rows, -1, block, kv_heads, heads // kv_heads, head_dim)
    return jnp.transpose(split, (1, 0, 3, 4, 2, 5))


def _joined(blocks: jax.Array, rows: int, heads: int, head_dim: int) -> jax.Array:
    """The inverse of `_query_blocks`, except that the padding of the last block is kept."""
    return jnp.transpose(blocks, (1, 0, 4, 2, 3, 5)).reshape(rows, -1, heads, head_dim)

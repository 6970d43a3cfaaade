"""Causal attention within the segments of packed rows, in three implementations that agree up to rounding.

`plain` holds scores [T, T]; `blocks` and `splash` do not, forward or backward, and skip blocks that no token sees. Rows
may consist of padding only.

The memory of `blocks` is linear in the length of rows (FlashAttention-2, arXiv:2307.08691): only the scores of one pair
of blocks are held at once.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rollstream.consumers.models.sharding import SEQUENCE, sequence_parts

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


PLAIN_TOKENS = 1024
"""Longest rows that `auto` gives to `plain`: at most four blocks of queries."""
QUERY_BLOCK = 256
"""Number of queries, and of keys, whose scores `blocks` holds at once."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    implementation: str = "auto",
    *,
    window: int = 0,
) -> jax.Array:
    """Attention of q [B, T, heads, head_dim] over k and v [B, T, kv heads, head_dim], in q's shape and dtype.

    A token attends to itself and to earlier tokens of its own segment (`segment_ids` int32 [B, T]); with a `window`,
    to at most that many (arXiv:2310.06825). Scores and their softmax are float32. `auto` is `plain` for short rows, or
    else `splash` if JAX's default backend is a TPU and the shape allows it, or else `blocks`. The choice is made when
    the function is traced: to compile for a device other than the default one, name the implementation.

    On a mesh that splits tokens, each device gathers keys and values of whole rows, and attends with its own queries.
    """
    if implementation == "auto":
        implementation = choose_implementation(q.shape[1])
    if sequence_parts(q.shape[1]) > 1:
        return _over_sequence(q, k, v, segment_ids, implementation == "plain", window)
    if implementation == "plain":
        return masked(q, k, v, _mask(segment_ids, segment_ids, 0, window))
    if implementation == "blocks":
        return causal_blocks(q, k, v, segment_ids, 0, QUERY_BLOCK, window)
    if implementation == "splash":
        return splash_attention(q, k, v, segment_ids, window=window)
    raise ValueError(f"attention {implementation!r}: use auto, plain, blocks or splash")


def masked(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of q [B, T, heads, head_dim] over k and v [B, S, kv heads, head_dim] where mask [B, T, S] is true."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def attend_once(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, window: int = 0) -> jax.Array:
    """Attention of one query per row, q [B, heads, head_dim], over the first `positions` + 1 of k and v
    [B, S, kv heads, head_dim], or the last `window` of these; `positions` are int32 [B]. The result has q's shape and
    dtype; scores and their softmax are float32."""
    rows, heads, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    visible = jnp.arange(k.shape[1]) <= positions[:, None]
    if window:
        visible &= jnp.arange(k.shape[1]) > positions[:, None] - window
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf)).astype(v.dtype)
    return jnp.einsum("bkgs,bskd->bkgd", weights, v).reshape(rows, heads, head_dim)


def choose_implementation(length: int) -> str:
    """Return the implementation that "auto" chooses for rows of `length` tokens on this backend."""
    if length <= PLAIN_TOKENS:
        return "plain"
    return "splash" if jax.default_backend() == "tpu" and length % 128 == 0 else "blocks"


def _mask(query_ids: jax.Array, key_ids: jax.Array, start: jax.Array | int, window: int) -> jax.Array:
    """Keys [B, S] visible to queries [B, T] that begin at token `start` of the row: bool [B, T, S]."""
    queries, keys = start + jnp.arange(query_ids.shape[1])[:, None], jnp.arange(key_ids.shape[1])
    causal = queries >= keys
    if window:
        causal &= queries - keys < window
    return (query_ids[:, :, None] == key_ids[:, None, :]) & causal


def _over_sequence(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, plain: bool, window: int
) -> jax.Array:
    """Attention of tokens that are split over devices in contiguous parts."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        length = q.shape[1]
        start = jax.lax.axis_index(SEQUENCE) * length
        k, v = _gathered(k), _gathered(v)
        if plain:
            return masked(q, k, v, _mask(jax.lax.dynamic_slice_in_dim(ids, start, length, 1), ids, start, window))
        return causal_blocks(q, k, v, ids, start, min(QUERY_BLOCK, length), window)

    tokens, everything = PartitionSpec(None, SEQUENCE), PartitionSpec()  # type: ignore[no-untyped-call]
    split = jax.shard_map(
        local,
        in_specs=(tokens, tokens, tokens, everything),
        out_specs=tokens,
        axis_names={SEQUENCE},
        check_vma=False,
    )
    return split(q, k, v, segment_ids)


@jax.custom_vjp
def _gathered(part: jax.Array) -> jax.Array:
    """Whole rows of keys or values, whose gradients are summed over devices in float32."""
    whole: jax.Array = jax.lax.all_gather(part, SEQUENCE, axis=1, tiled=True)
    return whole


def _gathered_forward(part: jax.Array) -> tuple[jax.Array, None]:
    return _gathered(part), None


def _gathered_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    sums = gradient.astype(jnp.float32)
    own: jax.Array = jax.lax.psum_scatter(sums, SEQUENCE, scatter_dimension=1, tiled=True)  # type: ignore[no-untyped-call]
    return (own.astype(gradient.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, window: int = 0, interpret: bool = False
) -> jax.Array:
    """Attend with the TPU kernel of JAX; rows must be a multiple of 128 tokens long.

    The compiler cannot split a kernel. If a mesh is set (jax.set_mesh), rows are split explicitly over its axes data
    and fsdp, and heads over tensor if it divides the key and value heads. Axes of an enclosing jax.shard_map are left
    out.
    """
    if q.shape[1] % 128:
        raise ValueError(f"splash attention needs rows of a multiple of 128 tokens, not {q.shape[1]}: use blocks")

    def local(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return _splash_kernel(q, k, v, ids, window, interpret)

    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}
    if not sizes:
        return local(q, k, v, segment_ids)
    rows = tuple(axis for axis in ("data", "fsdp") if axis in sizes) or None
    heads = "tensor" if "tensor" in sizes and k.shape[2] % sizes["tensor"] == 0 else None
    activations = PartitionSpec(rows, None, heads, None)  # type: ignore[no-untyped-call]
    ids = PartitionSpec(rows, None)  # type: ignore[no-untyped-call]
    split = jax.shard_map(
        local, in_specs=(activations, activations, activations, ids), out_specs=activations, check_vma=False
    )
    return split(q, k, v, segment_ids)


def _splash_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, window: int, interpret: bool
) -> jax.Array:
    # Imported here because the module compiles TPU helpers at import.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, heads, head_dim = q.shape[1:]
    block = next(size for size in (512, 256, 128) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    shape = (length, length)
    one = splash.LocalMask(shape, (window - 1, 0), 0) if window else splash.CausalMask(shape)
    mask = splash.MultiHeadMask([one] * heads)
    kernel = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret)

    def row(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        attended: jax.Array = kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids))
        return attended

    queries, keys, values = (jnp.swapaxes(x, 1, 2) for x in (q * head_dim**-0.5, k, v))
    return jnp.swapaxes(jax.vmap(row)(queries, keys, values, segment_ids), 1, 2)

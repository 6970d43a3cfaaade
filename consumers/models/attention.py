"""Causal attention within the segments of packed rows, in three implementations that agree up to rounding.

`plain` holds scores [T, T]; `blocks` and `splash` do not, forward or backward, and skip blocks that no token sees. Rows
may consist of padding only.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rollstream.consumers.models.activations import SEQUENCE, sequence_parts
from rollstream.consumers.models.causal_blocks import causal_blocks

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

"""Derives the arrays of a microbatch on the devices from its packed rows: the same bits as `PackedBatch.arrays`."""

import jax
import jax.numpy as jnp

from rollstream.consumers.learner.training.packing import parts

_TOGETHER = 4
"""Segments that each pass over the positions looks at."""


def unpacked(words: jax.Array, segments: jax.Array, length: int) -> dict[str, jax.Array]:
    """Return the arrays [rows, length] of packed rows with up to `segments` segments, without `PackedBatch.own`.

    Each position is compared with the first position of every segment: on a CPU, a gather costs several times as much.
    """
    tokens, log_probs, mask, table = parts(words, length)
    positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)

    def reach(step: jax.Array, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The last slice may begin earlier, to end with the table: segments that are looked at again change nothing.
        few = jax.lax.dynamic_slice_in_dim(table, step * _TOGETHER, _TOGETHER, 2)
        for number in range(_TOGETHER):
            reached = positions >= few[:, 0, number, None]
            values = tuple(jnp.where(reached, few[:, part, number, None], value) for part, value in enumerate(values))
        return values

    nothing = (jnp.zeros_like(tokens),) * table.shape[1]
    begin, number, advantage, weight, temperature = jax.lax.fori_loop(0, -(-segments // _TOGETHER), reach, nothing)
    shifts = 8 * jnp.arange(4)
    loss_mask = ((mask[:, :, None] >> shifts) & 1).reshape(len(mask), -1)[:, :length].astype(jnp.float32)
    return {
        "tokens": tokens,
        "positions": jnp.where(number > 0, positions - begin, 0),
        "segment_ids": number,
        "loss_mask": loss_mask,
        "loss_weights": loss_mask * _floats(weight),
        "advantages": _floats(advantage),
        "generator_log_probs": _floats(log_probs),
        "temperatures": _floats(temperature),
    }


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

"""A mixture of experts in place of a block's feed-forward layer, as in Qwen3-MoE: a few experts compute each token.

Every expert has separate tensors, under Hugging Face's names, so they are split, gathered, published and exported like
all other parameters. No token is dropped, whatever an expert's load.
"""

import jax
import jax.numpy as jnp

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.sharded import Params


def mixture(params: Params, mlp: str, config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Output of the experts under the name `mlp` for `x` [B, T, width], weighted by the router.

    Rows are sorted by expert, so that each expert multiplies only its own rows.
    """
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = routed(tokens, params[f"{mlp}.gate.weight"], config)
    several = config.num_experts_per_tok
    # Sorting is stable, and every sum below is over an axis: the same tokens give the same bits.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    places = jnp.argsort(order, stable=True)
    rows = jnp.repeat(tokens, several, axis=0).at[order].get(unique_indices=True)
    loads = jnp.sum(chosen.reshape(-1, 1) == jnp.arange(config.num_experts), axis=0, dtype=jnp.int32)

    def projected(rows: jax.Array, name: str) -> jax.Array:
        experts = [params[f"{mlp}.experts.{expert}.{name}.weight"].T for expert in range(config.num_experts)]
        return jax.lax.ragged_dot(rows, jnp.stack(experts), loads)

    computed = projected(jax.nn.silu(projected(rows, "gate_proj")) * projected(rows, "up_proj"), "down_proj")
    own = computed.at[places].get(unique_indices=True).reshape(-1, several, x.shape[-1])
    return jnp.sum(own * weights[..., None].astype(x.dtype), axis=1).reshape(x.shape)


def routed(tokens: jax.Array, router: jax.Array, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers [N, num_experts_per_tok] of the experts of each token [N, width], the heaviest first."""
    shares = jax.nn.softmax((tokens @ router.T).astype(jnp.float32))
    weights, chosen = jax.lax.top_k(shares, config.num_experts_per_tok)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen

"""One plain-JAX decoder for the demo model and for dense Llama, Qwen2 and Qwen3 checkpoints.

Parameters are a flat dict under Hugging Face's names and in its layout (projections are [out, in]), so loading and
publishing weights need no renaming. All functions are pure; packed sequences never see each other's tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from consumers.models import vocabulary
from consumers.models.activations import split_rows
from consumers.models.attention import attend, masked
from consumers.models.config import DecoderConfig
from consumers.models.parameters import EMBEDDING, FINAL_NORM, HEAD
from consumers.models.parameters import shapes as shapes

Params = Mapping[str, jax.Array]

_ROW_SPLIT = ("o_proj", "down_proj")
"""Projections whose input is split over `tensor`; of all others the output is."""


class KeyValueCache(NamedTuple):
    """Keys after RoPE, and values, of every position so far; slot s of a row holds its position s."""

    keys: jax.Array
    """[layers, rows, slots, kv heads, head_dim]"""
    values: jax.Array
    """[layers, rows, slots, kv heads, head_dim]"""


def init(key: jax.Array, config: DecoderConfig) -> dict[str, jax.Array]:
    """Random float32 parameters.

    Projections are normal with variance 1/fan-in, those that write to the residual stream divided by the root of
    their number (GPT-2); embeddings have standard deviation 0.02; norms are one and biases zero.
    """
    residual_scale = (2 * config.num_hidden_layers) ** -0.5
    params = {}
    for index, (name, shape) in enumerate(shapes(config).items()):
        if name.endswith("norm.weight"):
            params[name] = jnp.ones(shape, jnp.float32)
        elif name.endswith("bias"):
            params[name] = jnp.zeros(shape, jnp.float32)
        else:
            scale = 0.02 if name in (EMBEDDING, HEAD) else shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= residual_scale
            params[name] = scale * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
    return params


def pspecs(params: Mapping[str, Any], axis_sizes: Mapping[str, int] | None = None) -> dict[str, PartitionSpec]:
    """How each parameter is split over the mesh axes `fsdp` and `tensor` (Megatron's column and row split).

    `params` are arrays or anything else with a shape. Of the mesh's `axis_sizes` an axis that does not divide a
    dimension is left out for it; without them no dimension is looked at.
    """

    def axes(name: str) -> tuple[str, ...]:
        module, kind = name.rsplit(".", 2)[-2:]
        if kind == "bias":
            return ("tensor",) if module not in _ROW_SPLIT else ()
        if name.endswith("norm.weight"):
            return ()
        return ("fsdp", "tensor") if module in _ROW_SPLIT else ("tensor", "fsdp")

    def fitting(name: str) -> list[str | None]:
        wanted = axes(name)
        if axis_sizes is None:
            return list(wanted)
        lengths = params[name].shape
        return [
            axis if axis in axis_sizes and length % axis_sizes[axis] == 0 else None
            for axis, length in zip(wanted, lengths, strict=False)
        ]

    return {name: PartitionSpec(*fitting(name)) for name in params}  # type: ignore[no-untyped-call]


def hidden(
    params: Params,
    config: DecoderConfig,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    *,
    remat: bool = False,
    attention: str = "auto",
) -> jax.Array:
    """Final normalised states [B, T, hidden_size] of packed sequences.

    `tokens`, `positions` and `segment_ids` are int32 [B, T]. A token attends to earlier tokens of its own segment.
    With `remat` only the residual stream between blocks is kept for the backward pass; `attention` is the
    implementation (consumers.models.attention).
    """
    x = split_rows(_embedded(params[EMBEDDING], tokens))
    for layer in range(config.num_hidden_layers):

        def block(params: Params, x: jax.Array, layer: int = layer) -> jax.Array:
            return _block(params, config, layer, x, positions, lambda q, k, v: attend(q, k, v, segment_ids, attention))

        x = (jax.checkpoint(block) if remat else block)(params, x)
    return _rms_norm(x, params[FINAL_NORM], config.rms_norm_eps)


def logits(
    params: Params, config: DecoderConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Next-token logits, float32 [B, T, vocab_size], of packed sequences; arguments as for `hidden`."""
    return head(params, config, hidden(params, config, tokens, positions, segment_ids))


def head_weight(params: Params, config: DecoderConfig) -> jax.Array:
    """The output head [vocab_size, hidden_size]: the embedding where they are tied."""
    return params[EMBEDDING if config.tie_word_embeddings else HEAD]


def head(params: Params, config: DecoderConfig, states: jax.Array) -> jax.Array:
    """Logits, float32 [..., vocab_size], of final states [..., hidden_size]."""
    return jnp.matmul(states, head_weight(params, config).T, preferred_element_type=jnp.float32)


def token_logprobs(
    params: Params,
    config: DecoderConfig,
    states: jax.Array,
    targets: jax.Array,
    temperatures: jax.Array,
    *,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and entropy of the distribution, float32 [...].

    `states` are final states [..., hidden_size]; `temperatures` [...] divide the logits. `chunk` is the number of
    vocabulary entries whose logits are held at once, forward and backward; 0 holds all.
    """
    weight = head_weight(params, config)
    if 0 < chunk < config.vocab_size:
        return vocabulary.chunked(states, weight, targets, temperatures, chunk)
    return vocabulary.whole(states, weight, targets, temperatures)


def empty_cache(config: DecoderConfig, rows: int, slots: int, dtype: jnp.dtype) -> KeyValueCache:
    """A cache for `rows` sequences of at most `slots` positions."""
    shape = (config.num_hidden_layers, rows, slots, config.num_key_value_heads, config.head_dim)
    return KeyValueCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def prefill(
    params: Params, config: DecoderConfig, tokens: jax.Array, lengths: jax.Array, slots: int
) -> tuple[jax.Array, KeyValueCache]:
    """Run prompts and keep their keys and values.

    `tokens` is int32 [B, P], each row its prompt followed by anything; `lengths` int32 [B], at least 1. Returns the
    logits float32 [B, vocab_size] after each prompt's last token and a cache of `slots` >= P positions. Slots past a
    prompt hold rubbish that `decode_step` overwrites before it looks at them.
    """
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    one_segment = jnp.zeros_like(tokens)
    cache = empty_cache(config, rows, slots, params[EMBEDDING].dtype)
    x = params[EMBEDDING][tokens]
    for layer in range(config.num_hidden_layers):

        def remember(q: jax.Array, k: jax.Array, v: jax.Array, layer: int = layer) -> jax.Array:
            nonlocal cache
            cache = KeyValueCache(cache.keys.at[layer, :, :width].set(k), cache.values.at[layer, :, :width].set(v))
            return attend(q, k, v, one_segment)

        x = _block(params, config, layer, x, positions, remember)
    last = x[jnp.arange(rows), lengths - 1]
    return head(params, config, _rms_norm(last, params[FINAL_NORM], config.rms_norm_eps)), cache


def decode_step(
    params: Params, config: DecoderConfig, cache: KeyValueCache, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, KeyValueCache]:
    """Append one token to each row: `tokens` and `positions` int32 [B]. Returns logits float32 [B, vocab_size]."""
    rows = jnp.arange(tokens.shape[0])
    slots = cache.keys.shape[2]
    mask = (jnp.arange(slots) <= positions[:, None])[:, None, :]
    x = params[EMBEDDING][tokens][:, None, :]
    for layer in range(config.num_hidden_layers):

        def remember(q: jax.Array, k: jax.Array, v: jax.Array, layer: int = layer) -> jax.Array:
            nonlocal cache
            cache = KeyValueCache(
                cache.keys.at[layer, rows, positions].set(k[:, 0]), cache.values.at[layer, rows, positions].set(v[:, 0])
            )
            return masked(q, cache.keys[layer], cache.values[layer], mask)

        x = _block(params, config, layer, x, positions[:, None], remember)
    return head(params, config, _rms_norm(x[:, 0], params[FINAL_NORM], config.rms_norm_eps)), cache


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _block(
    params: Params, config: DecoderConfig, layer: int, x: jax.Array, positions: jax.Array, attention: Attention
) -> jax.Array:
    """One transformer block; `attention` maps q, k and v [B, T, heads, head_dim] to q's shape."""
    block, projections = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
    normed = _rms_norm(x, params[f"{block}.input_layernorm.weight"], config.rms_norm_eps)

    def heads(name: str) -> jax.Array:
        projected = _linear(params, f"{projections}.{name}_proj", normed)
        projected = projected.reshape(*projected.shape[:-1], -1, config.head_dim)
        if name == "v":
            return projected
        if config.qk_norm:
            projected = _rms_norm(projected, params[f"{projections}.{name}_norm.weight"], config.rms_norm_eps)
        return _rope(projected, positions, config)

    attended = attention(heads("q"), heads("k"), heads("v"))
    x = x + _linear(params, f"{projections}.o_proj", attended.reshape(*attended.shape[:-2], -1))
    normed = _rms_norm(x, params[f"{block}.post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = jax.nn.silu(_linear(params, f"{block}.mlp.gate_proj", normed))
    return x + _linear(params, f"{block}.mlp.down_proj", gate * _linear(params, f"{block}.mlp.up_proj", normed))


def _embedded(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """`weight[tokens]`, whose gradient adds up in float32: in bfloat16 a sum of ones ends at 256."""
    return weight.astype(jnp.float32)[tokens].astype(weight.dtype)


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """A projection, with a bias where the model has one."""
    projected = split_rows(x @ params[f"{name}.weight"].T, columns=name.rsplit(".", 1)[1] not in _ROW_SPLIT)
    bias = params.get(f"{name}.bias")
    return projected if bias is None else projected + bias


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (arXiv:1910.07467), computed in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rope_frequencies(config: DecoderConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Radians per position of each of the head_dim / 2 pairs, the slow ones stretched as in Llama 3.1's release."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    if config.rope_scaling_factor != 1.0:
        turns = config.rope_original_positions * frequencies / (2 * np.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / config.rope_scaling_factor)
    return frequencies.astype(np.float32)


def _rope(x: jax.Array, positions: jax.Array, config: DecoderConfig) -> jax.Array:
    """Rotary embedding (arXiv:2104.09864) of x [B, T, heads, head_dim], halves paired as Hugging Face does."""
    angles = positions[:, :, None, None].astype(jnp.float32) * rope_frequencies(config)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

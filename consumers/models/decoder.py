"""One plain-JAX decoder for the demo model and for Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE checkpoints.

Parameters are a flat dict under Hugging Face's names and in its layout (projections are [out, in]), so loading and
publishing weights need no renaming. All functions are pure; packed sequences never see each other's tokens.

In a mixture of experts every expert has separate tensors, under Hugging Face's names, so they are split, gathered,
published and exported like all other parameters. No token is dropped, whatever an expert's load.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rollstream.consumers.models import vocabulary
from rollstream.consumers.models.attention import attend, attend_once
from rollstream.consumers.models.config import DecoderConfig, expert_dtype
from rollstream.consumers.models.parameters import ADAPTER_A, ADAPTER_B, EMBEDDING, FINAL_NORM, HEAD, is_adapter
from rollstream.consumers.models.parameters import shapes as shapes
from rollstream.consumers.models.sharding import Params as Params
from rollstream.consumers.models.sharding import Whole, as_given, keep_all_but_gathered, sequence_parts, split_rows

Routing = Callable[[jax.Array, jax.Array, DecoderConfig], tuple[jax.Array, jax.Array]]
"""A function with the arguments and results of `routed`."""


def mixture(params: Params, mlp: str, config: DecoderConfig, x: jax.Array, routing: Routing | None = None) -> jax.Array:
    """Output of the experts under the name `mlp` for `x` [B, T, width], weighted by the router.

    Rows are sorted by expert, so that each expert multiplies only its own rows. `routing` replaces `routed`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = (routing or routed)(tokens, params[f"{mlp}.gate.weight"], config)
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


def routed(
    tokens: jax.Array, router: jax.Array, config: DecoderConfig, forced: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers [N, num_experts_per_tok] of the experts of each token [N, width], the heaviest first.

    `forced`, integers of the same shape, names the experts of tokens whose numbers all belong to experts; the router
    only weighs these (rollout routing replay, arXiv:2510.11370). It also chooses the experts of the other tokens.
    """
    shares = jax.nn.softmax((tokens @ router.T).astype(jnp.float32))
    weights, chosen = jax.lax.top_k(shares, config.num_experts_per_tok)
    if forced is not None:
        known = jnp.all(forced < config.num_experts, axis=-1, keepdims=True)
        chosen = jnp.where(known, forced.astype(chosen.dtype), chosen)
        weights = jnp.take_along_axis(shares, chosen, axis=-1)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


BLOCKS = "model.layers."
"""Beginning of the names of the parameters of blocks."""

_ROW_SPLIT = ("o_proj", "down_proj")
"""Projections whose input is split over `tensor`; all others have their output split."""


class KeyValueCache(NamedTuple):
    """Keys after RoPE, and values, of every position so far: one array per layer, [rows, slots, kv heads, head_dim].

    Slot s of a row holds position s of the sequence.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    experts: tuple[jax.Array, ...] = ()
    """In a mixture of experts, the numbers of the experts that computed each position: one array per layer, [rows,
    slots, 1, num_experts_per_tok] of `expert_dtype`."""


def init(key: jax.Array, config: DecoderConfig) -> dict[str, jax.Array]:
    """Random float32 parameters.

    Projections are normal with variance 1/fan-in, and those that write to the residual stream are divided by the root
    of their number (GPT-2); the embedding and the head have standard deviation 0.02; norms are one and biases zero.
    Adapters begin as in PEFT: A is uniform within the inverse root of its fan-in and B is zero, so that they change
    nothing.
    """
    residual_scale = (2 * config.num_hidden_layers) ** -0.5
    params = {}
    for index, (name, shape) in enumerate(shapes(config).items()):
        if name.endswith("norm.weight"):
            params[name] = jnp.ones(shape, jnp.float32)
        elif name.endswith(ADAPTER_A):
            bound = shape[1] ** -0.5
            params[name] = jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32, -bound, bound)
        elif name.endswith(("bias", ADAPTER_B)):
            params[name] = jnp.zeros(shape, jnp.float32)
        else:
            scale = 0.02 if name in (EMBEDDING, HEAD) else shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= residual_scale
            params[name] = scale * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
    return params


def init_from_data(key: jax.Array, config: DecoderConfig) -> dict[str, jax.Array]:
    """`init` with a key's data, uint32 [2], which a compiled function takes as an argument.

    XLA may compute a function without arguments while it compiles it, which would take long for large models.
    """
    return init(jax.random.wrap_key_data(key), config)


def pspecs(params: Mapping[str, Any], axis_sizes: Mapping[str, int] | None = None) -> dict[str, PartitionSpec]:
    """Partition of each parameter over the mesh axes `fsdp` and `tensor` (Megatron's column and row split).

    `params` are arrays or other objects with a shape. With `axis_sizes`, an axis that does not divide a dimension is
    not used for it.
    """

    def axes(name: str) -> tuple[str, ...]:
        if is_adapter(name):
            return ()
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
    scanned: bool = False,
    whole: Whole = as_given,
    experts: jax.Array | None = None,
) -> jax.Array:
    """Final normalized states [B, T, hidden_size] of packed sequences.

    `tokens`, `positions` and `segment_ids` are int32 [B, T]. A token attends to itself and to earlier tokens of its own
    segment. With `remat`, only the residual stream between blocks is kept for the backward pass; `attention` is the
    implementation (rollstream.consumers.models.attention). Blocks that are `scanned` are compiled once for all layers;
    their parameters are stacked for this, which copies them. The parameters of blocks may be shares, from which `whole`
    makes whole parameters; parameters outside of blocks are whole. Adapters are applied in addition to their
    projections; `prefill` and `decode_step` take parameters into which the adapters are merged. `experts`, integers
    [B, T, layers, num_experts_per_tok], are forced as `routed` describes.
    """
    if config.lora.rank:
        params = {n: config.lora.scale * value if n.endswith(ADAPTER_B) else value for n, value in params.items()}
    x = split_rows(_embedded(params[EMBEDDING], tokens))

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, segment_ids, attention, window=config.sliding_window)

    def block(params: Params, x: jax.Array, forced: jax.Array | None, layer: int = 0) -> jax.Array:
        own = {name: value for name, value in params.items() if name.startswith(f"{BLOCKS}{layer}.")}
        flat = None if forced is None else forced.reshape(-1, forced.shape[-1])
        return _block(whole(own), config, layer, x, positions, attended, partial(routed, forced=flat))

    def kept(block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        if remat:
            return jax.checkpoint(block)
        return block if whole is as_given else jax.checkpoint(block, policy=keep_all_but_gathered)

    if scanned:
        once = kept(block)
        by_layer = None if experts is None else jnp.moveaxis(experts, 2, 0)
        layers = _stacked(params, config), by_layer
        x, _ = jax.lax.scan(lambda x, layer: (split_rows(once(layer[0], x, layer[1])), None), x, layers)
    else:
        for layer in range(config.num_hidden_layers):
            forced = None if experts is None else experts[:, :, layer]
            x = kept(partial(block, layer=layer))(params, x, forced)
    return _rms_norm(x, params[FINAL_NORM], config.rms_norm_eps)


def logits(
    params: Params, config: DecoderConfig, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Next-token logits, float32 [B, T, vocab_size], of packed sequences; arguments as for `hidden`."""
    return head(params, config, hidden(params, config, tokens, positions, segment_ids))


def head_weight(params: Params, config: DecoderConfig) -> jax.Array:
    """The output head [vocab_size, hidden_size]: the embedding if the two are tied."""
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
    kept: vocabulary.Kept | None = None,
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and entropy of the distribution, float32 [...].

    `states` are final states [..., hidden_size]; `temperatures` [...] divide the logits; `kept` limits the distribution
    of each position. `chunk` is the number of
    vocabulary entries whose logits are held at once, forward and backward; 0 holds all.
    """
    weight = head_weight(params, config)
    at_once = not 0 < chunk < config.vocab_size
    # XLA crashes if it gathers from logits split over tokens and over the vocabulary; `chunked` does not gather.
    if at_once and sequence_parts(states.shape[1]) == 1:
        return vocabulary.whole(states, weight, targets, temperatures, kept)
    return vocabulary.chunked(states, weight, targets, temperatures, kept, config.vocab_size if at_once else chunk)


def empty_cache(config: DecoderConfig, rows: int, slots: int, dtype: jnp.dtype) -> KeyValueCache:
    """A cache for `rows` sequences of at most `slots` positions."""
    shape = (rows, slots, config.num_key_value_heads, config.head_dim)
    keys, values = ([jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers)] for _ in range(2))
    chosen = (rows, slots, 1, config.num_experts_per_tok)
    experts = [jnp.zeros(chosen, expert_dtype(config)) for _ in range(config.num_hidden_layers)]
    return KeyValueCache(tuple(keys), tuple(values), tuple(experts) if config.num_experts else ())


def prefill(params: Params, config: DecoderConfig, tokens: jax.Array) -> tuple[jax.Array, KeyValueCache]:
    """Run prompts and keep their keys and values.

    `tokens` is int32 [B, P], each row a prompt followed by arbitrary ids. Returns the states [B, P, hidden_size]
    before the final norm, and a cache of P positions. Positions past a prompt hold arbitrary values, which
    `decode_step` overwrites before it reads them.
    """
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    one_segment = jnp.zeros_like(tokens)
    keys, values, experts = [], [], []
    x = params[EMBEDDING][tokens]

    def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        keys.append(k)
        values.append(v)
        return attend(q, k, v, one_segment, window=config.sliding_window)

    def cached_routing(*inputs: Any) -> tuple[jax.Array, jax.Array]:
        weights, chosen = routed(*inputs)
        experts.append(chosen.reshape(rows, width, 1, -1).astype(expert_dtype(config)))
        return weights, chosen

    for layer in range(config.num_hidden_layers):
        x = _block(params, config, layer, x, positions, cached_attention, cached_routing)
    return x, KeyValueCache(tuple(keys), tuple(values), tuple(experts))


def decode_step(
    params: Params, config: DecoderConfig, cache: KeyValueCache, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, KeyValueCache]:
    """Append one token to each row: `tokens` and `positions` int32 [B]. Returns logits float32 [B, vocab_size].

    A row whose position is past the cache is computed without effect on the cache.
    """
    rows = jnp.arange(tokens.shape[0])
    keys, values, experts = list(cache.keys), list(cache.values), list(cache.experts)
    x = params[EMBEDDING][tokens][:, None, :]
    for layer in range(config.num_hidden_layers):

        def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, layer: int = layer) -> jax.Array:
            # Each row writes only its own slot. XLA need not order these writes to make them deterministic.
            keys[layer] = keys[layer].at[rows, positions].set(k[:, 0], mode="drop", unique_indices=True)
            values[layer] = values[layer].at[rows, positions].set(v[:, 0], mode="drop", unique_indices=True)
            return attend_once(q[:, 0], keys[layer], values[layer], positions, config.sliding_window)[:, None]

        def cached_routing(*inputs: Any, layer: int = layer) -> tuple[jax.Array, jax.Array]:
            weights, chosen = routed(*inputs)
            own = chosen[:, None].astype(experts[layer].dtype)
            experts[layer] = experts[layer].at[rows, positions].set(own, mode="drop", unique_indices=True)
            return weights, chosen

        x = _block(params, config, layer, x, positions[:, None], cached_attention, cached_routing)
    return final_logits(params, config, x[:, 0]), KeyValueCache(tuple(keys), tuple(values), tuple(experts))


def final_logits(params: Params, config: DecoderConfig, states: jax.Array) -> jax.Array:
    """Logits, float32 [..., vocab_size], of states [..., hidden_size] before the final norm."""
    return head(params, config, _rms_norm(states, params[FINAL_NORM], config.rms_norm_eps))


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _block(
    params: Params,
    config: DecoderConfig,
    layer: int,
    x: jax.Array,
    positions: jax.Array,
    attention: Attention,
    routing: Routing,
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
    if config.num_experts:
        return x + mixture(params, f"{block}.mlp", config, normed, routing)
    gate = jax.nn.silu(_linear(params, f"{block}.mlp.gate_proj", normed))
    return x + _linear(params, f"{block}.mlp.down_proj", gate * _linear(params, f"{block}.mlp.up_proj", normed))


def _stacked(params: Params, config: DecoderConfig) -> dict[str, jax.Array]:
    """The parameters of all blocks [layers, ...], under the names of the first block's parameters."""
    first, layers = "model.layers.0.", range(config.num_hidden_layers)
    names = [name.removeprefix(first) for name in params if name.startswith(first)]
    return {f"{first}{name}": jnp.stack([params[f"model.layers.{layer}.{name}"] for layer in layers]) for name in names}


def _embedded(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """`weight[tokens]` with a gradient summed in float32, because in bfloat16 a sum of ones stops at 256."""
    return weight.astype(jnp.float32)[tokens].astype(weight.dtype)


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """A projection, with its bias if the model has one."""
    projected = split_rows(x @ params[f"{name}.weight"].T, columns=name.rsplit(".", 1)[1] not in _ROW_SPLIT)
    if (down := params.get(name + ADAPTER_A)) is not None:
        # B already includes the factor alpha / rank.
        projected = projected + (x @ down.T) @ params[name + ADAPTER_B].T
    bias = params.get(f"{name}.bias")
    return projected if bias is None else projected + bias


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (arXiv:1910.07467), computed in float32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rope_frequencies(config: DecoderConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Radians per position of each of the head_dim / 2 pairs; low frequencies are stretched as in Llama 3.1."""
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

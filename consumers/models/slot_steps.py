"""Decoding in slots, compiled: prompts are put into slots of a cache, and all slots decode some steps together.

Each of D groups of devices holds the parameters and its own slots, and computes independently of other groups. Within a
group the compiler splits matrix products and the cache's heads over the axis `tensor`.

A token depends on its row's logits, seed and index only. Its log-probability is under the distribution it was drawn
from.
"""

from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.decoder import KeyValueCache, Params, decode_step, empty_cache, prefill

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


MOST_KEPT = 1024
"""Largest number of tokens that top_k, top_p and min_p keep: the likeliest, if they would keep more."""


class Choice(NamedTuple):
    """The token that was drawn for each of B rows."""

    tokens: jax.Array
    """int32 [B]."""
    logprobs: jax.Array
    """float32 [B]."""
    kept: jax.Array
    """int32 [B, MOST_KEPT, or fewer of a small vocabulary]: the tokens among which each row was drawn, the likeliest
    first; [B, 0] without `filtering`."""
    counts: jax.Array
    """int32 [B]: their number; 0 if it was drawn among all."""


def choose(
    logits: jax.Array,
    sampling: SamplingArrays[jax.Array],
    indices: jax.Array,
    *,
    filtering: bool,
    allowed: jax.Array | None = None,
) -> Choice:
    """Return a token and its log-probability for every row.

    `logits` are float32 [B, vocabulary]; `indices` int32 [B] count the tokens that a row sampled before. top_k, top_p
    and min_p are applied only with `filtering`, because they sort the vocabulary. `allowed` are bits of the tokens that
    may be chosen, uint32 [B, words]; None: all. Log-probabilities are at the sampling temperature, among the allowed
    tokens and after the filters; for greedy rows, at temperature 1 and without filters.
    """
    greedy = sampling.temperatures == 0.0
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperatures)[:, None]
    kept, counts = jnp.zeros((len(logits), 0), jnp.int32), jnp.zeros(len(logits), jnp.int32)
    if allowed is not None:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        scaled = jnp.where((allowed[:, ids // 32] >> (ids % 32)) & 1 == 1, scaled, -jnp.inf)
    if filtering:
        order, counts = _kept(scaled, sampling)
        counts = jnp.where(greedy, 0, counts)
        kept = order[:, :MOST_KEPT].astype(jnp.int32)
        ranks = jnp.arange(scaled.shape[-1])
        removed = (ranks >= counts[:, None]) & (counts > 0)[:, None]
        removed = jnp.zeros_like(removed).at[jnp.arange(len(scaled))[:, None], order].set(removed, unique_indices=True)
        scaled = jnp.where(removed, -jnp.inf, scaled)
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(sampling.seeds, impl="threefry2x32"), indices)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    tokens = jnp.argmax(jnp.where(greedy[:, None], scaled, scaled + noise), axis=-1).astype(jnp.int32)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(scaled), tokens[:, None], axis=-1)[:, 0]
    return Choice(tokens, logprobs, kept, counts)


def _kept(scaled: jax.Array, sampling: SamplingArrays[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, vocabulary] by rank, and the number of the first of them that the filters keep, [B]; 0 if a row has no
    filter. The filters apply in vLLM's order: min_p, then top_k, then top_p."""
    order = jnp.argsort(scaled, axis=-1, descending=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    ranks = jnp.arange(scaled.shape[-1])
    # The ratio of a probability to the highest is the exponential of the difference of their logits.
    allowed = (ranked - ranked[:, :1]) >= jnp.log(sampling.min_p)[:, None]
    allowed &= (sampling.top_k[:, None] <= 0) | (ranks < sampling.top_k[:, None])
    probabilities = jax.nn.softmax(jnp.where(allowed, ranked, -jnp.inf))
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    allowed &= (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1.0)
    # Each filter keeps the likeliest tokens; rounding in a sum may make an exception of a single one.
    first_removed = jnp.argmin(allowed, axis=-1)
    counts = jnp.where(jnp.all(allowed, axis=-1), scaled.shape[-1], jnp.maximum(first_removed, 1))
    filtered = (sampling.top_k > 0) | (sampling.top_p < 1.0) | (sampling.min_p > 0.0)
    return order, jnp.where(filtered, jnp.minimum(counts, MOST_KEPT), 0)


AXIS = "slots"
TENSOR = "tensor"
"""The axes of the mesh."""
REPLICATED = PartitionSpec()  # type: ignore[no-untyped-call]
SPLIT = PartitionSpec(AXIS)  # type: ignore[no-untyped-call]


class SlotTable(NamedTuple, Generic[Array]):
    """State of the rows in S slots; a slot whose `remaining` is 0 is free."""

    tokens: Array
    """int32 [S]: the last token, not yet in the cache."""
    positions: Array
    """int32 [S]: position of the last token."""
    indices: Array
    """int32 [S]: number of tokens sampled."""
    remaining: Array
    """int32 [S]: maximum number of tokens still to be sampled."""
    stop_ids: Array
    """int32 [S, ids], padded with -1: tokens that end the row."""
    sampling: SamplingArrays[Array]


class SlotTokens(NamedTuple):
    """Tokens sampled in S slots during some steps."""

    tokens: jax.Array
    """int32 [S, steps]; undefined after the end of a row."""
    logprobs: jax.Array
    """float32 [S, steps]; undefined after the end of a row."""
    counts: jax.Array
    """int32 [S]: number of tokens that belong to the row."""
    kept: jax.Array
    """int32 [S, steps, most]: the tokens among which each token was drawn; see Choice."""
    kept_counts: jax.Array
    """int32 [S, steps]: their number; 0 if it was drawn among all."""


@partial(jax.jit, static_argnames=("config", "mesh", "slots", "length", "dtype"))
def empty_slots(config: DecoderConfig, mesh: Mesh, slots: int, length: int, dtype: str) -> KeyValueCache:
    """A cache of `slots` slots on each group of devices, for `length` positions each."""

    def local() -> KeyValueCache:
        return _split_heads(empty_cache(config, slots, length, jnp.dtype(dtype)))

    # The cache has the sharding for which the other functions are compiled.
    split = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=SPLIT, axis_names={AXIS}, check_vma=False)
    empty: KeyValueCache = split()
    return empty


def _split_heads(cache: KeyValueCache) -> KeyValueCache:
    """Split the heads over `tensor`, in arguments and in results, because functions are compiled for each sharding."""
    heads, whole = PartitionSpec(None, None, TENSOR, None), PartitionSpec()  # type: ignore[no-untyped-call]
    specs: list[Any] = [len(part) * (spec,) for part, spec in zip(cache, (heads, heads, whole), strict=True)]
    split: KeyValueCache = jax.lax.with_sharding_constraint(cache, KeyValueCache(*specs))  # type: ignore[no-untyped-call]
    return split


@jax.jit
def experts_in_slot(cache: KeyValueCache, slot: jax.Array) -> jax.Array:
    """Numbers [length, layers, num_experts_per_tok] of the experts that computed each position in a slot."""
    return jnp.stack([layer[slot, :, 0] for layer in cache.experts], axis=1)


@partial(jax.jit, static_argnames=("config", "mesh"), donate_argnames=("cache",))
def fill_slots(
    params: Params,
    cache: KeyValueCache,
    tokens: jax.Array,
    sources: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
    *,
    config: DecoderConfig,
    mesh: Mesh,
) -> KeyValueCache:
    """Prefill prompts, and copy the keys and values of prompt `sources[i]` to slot `targets[i]` for i below `counts`.

    With D groups of devices, `tokens` are int32 [D * prompts, P], `sources` and `targets` int32 [D * slots], `counts`
    int32 [D].
    """

    def local(
        params: Params,
        cache: KeyValueCache,
        tokens: jax.Array,
        sources: jax.Array,
        targets: jax.Array,
        counts: jax.Array,
    ) -> KeyValueCache:
        _states, prompts = prefill(params, config, tokens)

        def copy(i: jax.Array, cache: KeyValueCache) -> KeyValueCache:
            def into_slot(slots: jax.Array, prompts: jax.Array) -> jax.Array:
                prompt = jax.lax.dynamic_slice_in_dim(prompts, sources[i], 1)
                return jax.lax.dynamic_update_slice(slots, prompt, (targets[i], 0, 0, 0))

            copied: KeyValueCache = jax.tree.map(into_slot, cache, prompts)
            return copied

        return _split_heads(jax.lax.fori_loop(0, counts[0], copy, cache))

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(REPLICATED, SPLIT, SPLIT, SPLIT, SPLIT, SPLIT),
        out_specs=SPLIT,
        axis_names={AXIS},
        check_vma=False,
    )
    filled: KeyValueCache = split(params, cache, tokens, sources, targets, counts)
    return filled


class _Decoding(NamedTuple):
    """State of the decoding loop for B rows."""

    step: jax.Array
    """int32: number of steps done."""
    active: jax.Array
    """bool [B]: rows that are not done."""
    last: jax.Array
    """int32 [B]: the last token."""
    sampled: SlotTokens


@partial(jax.jit, static_argnames=("config", "mesh", "context", "steps", "filtering"), donate_argnames=("cache",))
def decode_slots(
    params: Params,
    cache: KeyValueCache,
    table: SlotTable[jax.Array],
    allowed: jax.Array | None,
    *,
    config: DecoderConfig,
    mesh: Mesh,
    context: int,
    steps: int,
    filtering: bool,
) -> tuple[KeyValueCache, SlotTokens]:
    """Decode up to `steps` tokens of each row, all within the first `context` positions.

    `table` describes the first slots of each group of devices. `filtering` says whether any row has top_p, top_k or
    min_p. With `allowed`, the bits of `choose` for each slot, there is one step.
    """

    def local(
        params: Params, cache: KeyValueCache, table: SlotTable[jax.Array], allowed: jax.Array | None
    ) -> tuple[KeyValueCache, SlotTokens]:
        rows = table.tokens.shape[0]

        def unfinished(carry: tuple[_Decoding, KeyValueCache]) -> jax.Array:
            # Devices that exchange activations must never disagree on the end of the loop, so they run every step.
            every_step: bool = mesh.shape[TENSOR] > 1
            return (carry[0].step < steps) & (jnp.any(carry[0].active) | every_step)

        def advance(carry: tuple[_Decoding, KeyValueCache]) -> tuple[_Decoding, KeyValueCache]:
            state, window = carry
            step, sampled = state.step, state.sampled
            # A row that is done gets a position past the cache, so it changes nothing there.
            positions = jnp.where(state.active, table.positions + step, context)
            logits, window = decode_step(params, config, window, state.last, positions)
            indices = table.indices + step
            choice = choose(logits, table.sampling, indices, filtering=filtering, allowed=allowed)
            ended = jnp.any(choice.tokens[:, None] == table.stop_ids, axis=-1)
            decoding = _Decoding(
                step=step + 1,
                active=state.active & ~ended & (step + 1 < table.remaining),
                last=choice.tokens,
                sampled=SlotTokens(
                    tokens=sampled.tokens.at[:, step].set(choice.tokens),
                    logprobs=sampled.logprobs.at[:, step].set(choice.logprobs),
                    counts=sampled.counts + state.active,
                    kept=sampled.kept.at[:, step].set(choice.kept),
                    kept_counts=sampled.kept_counts.at[:, step].set(choice.counts),
                ),
            )
            return decoding, window

        start = _Decoding(
            step=jnp.zeros((), jnp.int32),
            active=table.remaining > 0,
            last=table.tokens,
            sampled=SlotTokens(
                tokens=jnp.zeros((rows, steps), jnp.int32),
                logprobs=jnp.zeros((rows, steps), jnp.float32),
                counts=jnp.zeros(rows, jnp.int32),
                kept=jnp.zeros((rows, steps, min(MOST_KEPT, config.vocab_size) if filtering else 0), jnp.int32),
                kept_counts=jnp.zeros((rows, steps), jnp.int32),
            ),
        )
        window = jax.tree.map(lambda slots: slots[:rows, :context], cache)
        final, window = jax.lax.while_loop(unfinished, advance, (start, window))
        written = jax.tree.map(lambda slots, part: slots.at[:rows, :context].set(part), cache, window)
        return _split_heads(written), final.sampled

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(REPLICATED, SPLIT, SPLIT, SPLIT),
        out_specs=(SPLIT, SPLIT),
        axis_names={AXIS},
        check_vma=False,
    )
    decoded: tuple[KeyValueCache, SlotTokens] = split(params, cache, table, allowed)
    return decoded

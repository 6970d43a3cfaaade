"""Log-probabilities by chunks of the vocabulary: the values and gradients of the whole, in a fraction of the memory."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rollstream.consumers.models import decoder, vocabulary
from rollstream.consumers.models.config import DecoderConfig

ENTRIES, WIDTH, SHAPE = 97, 16, (3, 5)
CHUNKS = (24, 96)
DRAW = np.random.default_rng(0)
STATES = DRAW.standard_normal((*SHAPE, WIDTH)).astype(np.float32)
WEIGHT = DRAW.standard_normal((ENTRIES, WIDTH)).astype(np.float32)
TARGETS = np.concatenate([[0, ENTRIES - 1], DRAW.integers(0, ENTRIES, 13)]).reshape(SHAPE).astype(np.int32)
TEMPERATURES = DRAW.uniform(0.5, 2.0, SHAPE).astype(np.float32)
KEPT = [DRAW.choice(ENTRIES, size, replace=False) for size in (0, 1, 5, 40, ENTRIES, 7, 2, 3, 0, 9, 0, 30, 1, 4, 6)]
"""Entries to which each position is limited; none: it is not limited. The target is among them or not."""
TO_CHOSEN, TO_ENTROPY = DRAW.standard_normal((2, *SHAPE)).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def chosen_entropy_gradients(
    function: Callable[..., tuple[jax.Array, jax.Array]], states: jax.Array, weight: jax.Array, temperatures: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Both results, and the gradients of their weighted sum with respect to states, weight and temperatures."""

    def total(*arguments: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        chosen, entropy = function(arguments[0], arguments[1], TARGETS, arguments[2])
        return jnp.sum(TO_CHOSEN * chosen + TO_ENTROPY * entropy), (chosen, entropy)

    (_, values), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(states, weight, temperatures)
    return values, gradients


def limits() -> vocabulary.Kept:
    """KEPT by row, in any order, with padding."""
    positions, entries = (np.full((SHAPE[0], 200), fill, np.int32) for fill in (2 * SHAPE[1], 3))
    for row in range(SHAPE[0]):
        pairs = [(at, int(entry)) for at in range(SHAPE[1]) for entry in KEPT[row * SHAPE[1] + at]]
        for number, (at, entry) in enumerate(reversed(pairs)):
            positions[row, 2 * number if number < 20 else number + 20] = at
            entries[row, 2 * number if number < 20 else number + 20] = entry
    return vocabulary.Kept(jnp.asarray(positions), jnp.asarray(entries))


def reference(
    states: np.ndarray, weight: np.ndarray, *, limited: bool = False
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """The same results and gradients in float64 numpy, by the derivatives of the softmax."""
    h, w, tau = (array.astype(np.float64) for array in (states, weight, TEMPERATURES))
    scaled = h @ w.T / tau[..., None]
    if limited:
        removed = np.array([len(kept) > 0 and entry not in kept for kept in KEPT for entry in range(ENTRIES)])
        removed = removed.reshape(*SHAPE, ENTRIES) & (np.arange(ENTRIES) != TARGETS[..., None])
        scaled = np.where(removed, -1e4, scaled)
    log_p = scaled - np.log(np.sum(np.exp(scaled), axis=-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -np.sum(p * log_p, axis=-1)
    target = np.eye(ENTRIES)[TARGETS]
    d_scaled = TO_CHOSEN[..., None] * (target - p) - TO_ENTROPY[..., None] * p * (log_p + entropy[..., None])
    d_logits = d_scaled / tau[..., None]
    gradients = d_logits @ w, np.einsum("btv,bth->vh", d_logits, h), -np.sum(d_scaled * scaled, axis=-1) / tau
    return (np.sum(target * log_p, axis=-1), entropy), gradients


@pytest.mark.parametrize("chunk", [0, *CHUNKS])
def test_chunks_give_the_values_and_gradients_of_the_whole(chunk: int) -> None:
    function = partial(vocabulary.chunked, kept=None, chunk=chunk) if chunk else vocabulary.whole
    actual = chosen_entropy_gradients(function, STATES, WEIGHT, TEMPERATURES)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), actual, reference(STATES, WEIGHT))


@pytest.mark.parametrize("chunk", [0, *CHUNKS])
def test_limited_distributions_have_the_values_and_gradients_of_a_direct_computation(chunk: int) -> None:
    kept = limits()
    function = partial(vocabulary.chunked, kept=kept, chunk=chunk) if chunk else partial(vocabulary.whole, kept=kept)
    actual = chosen_entropy_gradients(function, STATES, WEIGHT, TEMPERATURES)
    expected = reference(STATES, WEIGHT, limited=True)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), actual, expected)


def test_bfloat16_states_and_weights_still_have_float32_logits() -> None:
    states, weight = STATES.astype(ml_dtypes.bfloat16), WEIGHT.astype(ml_dtypes.bfloat16)
    function = partial(vocabulary.chunked, kept=None, chunk=24)
    values, gradients = chosen_entropy_gradients(function, states, weight, TEMPERATURES)
    wanted_values, wanted_gradients = reference(states, weight)
    assert [value.dtype for value in values] == [jnp.float32, jnp.float32]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), values, wanted_values)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for actual, wanted in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float32), wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


def test_logits_far_apart_do_not_overflow() -> None:
    values, gradients = chosen_entropy_gradients(
        partial(vocabulary.chunked, kept=None, chunk=24), 30 * STATES, 30 * WEIGHT, TEMPERATURES
    )
    assert all(np.isfinite(value).all() for value in (*values, *gradients))
    assert np.asarray(values[1]).min() > -1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_chunks_the_head_it_has(tied: bool) -> None:
    config = DecoderConfig(num_hidden_layers=0, hidden_size=WIDTH, vocab_size=ENTRIES, tie_word_embeddings=tied)
    params = {decoder.EMBEDDING if tied else decoder.HEAD: WEIGHT}
    whole = decoder.token_logprobs(params, config, STATES, TARGETS, TEMPERATURES)
    chunked = decoder.token_logprobs(params, config, STATES, TARGETS, TEMPERATURES, chunk=24)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), chunked, whole)


def test_memory_is_that_of_a_few_chunks() -> None:
    rows, length, entries, width, chunk = 4, 128, 32_768, 32, 1024

    def total(states: jax.Array, weight: jax.Array, chunk: int) -> jax.Array:
        targets, temperatures = jnp.zeros((rows, length), jnp.int32), jnp.ones((rows, length))
        function = partial(vocabulary.chunked, kept=None, chunk=chunk) if chunk else vocabulary.whole
        chosen, entropy = function(states, weight, targets, temperatures)
        return jnp.sum(chosen + entropy)

    def temporary_bytes(chunk: int) -> int:
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, length, width), (entries, width))]
        return (
            jax.jit(jax.grad(total, (0, 1)), static_argnums=2)
            .lower(*shapes, chunk)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    all_logits = rows * length * entries * 4
    assert temporary_bytes(chunk) < all_logits / 6
    assert temporary_bytes(0) > all_logits

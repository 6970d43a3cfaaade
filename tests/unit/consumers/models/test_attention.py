"""Attention of long rows gives what plain attention gives, without its scores in memory."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.models import attention
from rollstream.consumers.models.attention import causal_blocks

Attend = Callable[..., jax.Array]

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 3, 128, 4, 2, 16
TOLERANCE = 5e-5
"""Float32; splash's backward pass sums in another order than the others."""
DRAW = np.random.default_rng(0)
Q = DRAW.standard_normal((ROWS, LENGTH, HEADS, HEAD_DIM)).astype(np.float32)
K, V = DRAW.standard_normal((2, ROWS, LENGTH, KV_HEADS, HEAD_DIM)).astype(np.float32)
# A packed row, a row of one sequence, a row of padding only.
SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 1], [0, 0, 0]], [47, 70, 11], axis=1).astype(np.int32)
WEIGHTS = DRAW.standard_normal(Q.shape).astype(np.float32)

IMPLEMENTATIONS = {
    "blocks": partial(attention.attend, implementation="blocks"),
    "splash": partial(attention.splash_attention, interpret=True),
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that does not divide the row."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 48)


def output_and_gradients(function: Attend) -> tuple[jax.Array, ...]:
    """The output, and the gradients of its weighted sum with respect to queries, keys and values."""

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = function(q, k, v, SEGMENTS)
        return jnp.sum(WEIGHTS * output), output

    gradients, output = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(Q, K, V)
    return output, *gradients


@pytest.fixture(scope="module")
def plain() -> tuple[jax.Array, ...]:
    return output_and_gradients(partial(attention.attend, implementation="plain"))


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray, window: int = LENGTH) -> np.ndarray:
    """Attention in float64 numpy, one query at a time, over only the keys that the query may see."""
    output = np.zeros(q.shape)
    for row, t, head in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(segments[row, : t + 1] == segments[row, t])
        seen = seen[seen > t - window]
        key_head = head // (HEADS // KV_HEADS)
        scores = k[row, seen, key_head].astype(np.float64) @ q[row, t, head] / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        output[row, t, head] = weights @ v[row, seen, key_head] / weights.sum()
    return output


def test_a_token_sees_earlier_tokens_of_its_segment_only(plain: tuple[jax.Array, ...]) -> None:
    np.testing.assert_allclose(plain[0], reference(Q, K, V, SEGMENTS), atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [IMPLEMENTATIONS["blocks"], pytest.param(IMPLEMENTATIONS["splash"], marks=pytest.mark.long)],
    ids=IMPLEMENTATIONS,
)
def test_output_and_gradients_are_those_of_the_plain_one(function: Attend, plain: tuple[jax.Array, ...]) -> None:
    for actual, wanted in zip(output_and_gradients(function), plain, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "window", [pytest.param(1, marks=pytest.mark.long), 20, pytest.param(60, marks=pytest.mark.long)]
)
def test_with_a_window_a_token_sees_that_many_at_most(window: int) -> None:
    plain = output_and_gradients(partial(attention.attend, implementation="plain", window=window))
    np.testing.assert_allclose(plain[0], reference(Q, K, V, SEGMENTS, window), atol=1e-5)
    for function in IMPLEMENTATIONS.values():
        for actual, wanted in zip(output_and_gradients(partial(function, window=window)), plain, strict=True):
            np.testing.assert_allclose(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    last = np.full(1, LENGTH - 1)
    once = attention.attend_once(Q[1:2, -1], K[1:2], V[1:2], last, window)
    whole = reference(Q[1:2], K[1:2], V[1:2], np.ones((1, LENGTH), np.int32), window)
    np.testing.assert_allclose(once, whole[:, -1], atol=1e-5)


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.long), 20])
@pytest.mark.long
def test_queries_of_parts_of_rows_attend_as_those_of_whole_rows(window: int) -> None:
    """Parts begin within blocks of keys, as they may where devices share the tokens of rows."""

    def parts(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        each = [causal_blocks(q[:, at : at + 32], k, v, segments, at, 24, window) for at in range(0, LENGTH, 32)]
        return jnp.concatenate(each, axis=1)

    whole = output_and_gradients(partial(attention.attend, implementation="plain", window=window))
    for actual, wanted in zip(output_and_gradients(parts), whole, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_blocks_never_hold_the_scores_of_a_whole_row() -> None:
    rows, length, heads, head_dim = 1, 2048, 8, 8

    def temporary_bytes(implementation: str) -> int:
        def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attention.attend(q, k, v, jnp.ones((rows, length), jnp.int32), implementation))

        shape = jax.ShapeDtypeStruct((rows, length, heads, head_dim), jnp.float32)
        function = jax.jit(jax.grad(total, (0, 1, 2)))
        return function.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    scores = rows * heads * length * length * 4
    assert temporary_bytes("blocks") < scores / 6
    assert temporary_bytes("plain") >= scores


@pytest.mark.long
def test_blocks_look_at_no_keys_but_those_that_a_query_of_the_block_may_see() -> None:
    segments = np.repeat([[1, 2, 3]], [48, 48, 32], axis=1).astype(np.int32)
    values = np.where(segments[..., None, None] == 2, V[:1], np.nan)

    def total(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = attention.attend(Q[:1], K[:1], v, segments, "blocks")
        # The sum leaves out the other segments, whose outputs may be NaN.
        return jnp.sum(output[:, 48:96]), output[:, 48:96]

    gradient, output = jax.grad(total, has_aux=True)(values)
    assert np.isfinite(output).all()
    assert np.isfinite(gradient[:, 48:96]).all()


def test_auto_takes_the_plain_one_for_short_rows_and_blocks_for_long_ones_off_a_tpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert attention.choose_implementation(attention.PLAIN_TOKENS) == "plain"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert attention.choose_implementation(attention.PLAIN_TOKENS + 128) == "blocks"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert attention.choose_implementation(attention.PLAIN_TOKENS + 128) == "splash"
    assert attention.choose_implementation(attention.PLAIN_TOKENS + 1) == "blocks"


def test_a_row_that_splash_cannot_take_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="multiple of 128 tokens, not 100"):
        attention.attend(Q[:, :100], K[:, :100], V[:, :100], SEGMENTS[:, :100], "splash")
    with pytest.raises(ValueError, match="attention 'flash'"):
        attention.attend(Q, K, V, SEGMENTS, "flash")

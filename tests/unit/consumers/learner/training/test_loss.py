"""The loss through a real decoder, against an independent one in numpy and float64, and what it must not depend on.

The formulas themselves are in test_losses.py; here they meet the model's log-probabilities, temperatures and padding.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.objective import LossConfig, policy_metrics
from rollstream.consumers.learner.training.loss import log_probs, policy_loss, supervised_loss
from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig
from tests.support.microbatches import Sample, denominators, microbatch, row_by_row

MODEL = DecoderConfig(num_hidden_layers=1)
COMPUTE = ComputeSettings()
CONFIG = LossConfig()
RECIPE = CONFIG.recipe
POLICY_METRICS = policy_metrics(CONFIG)
ROWS, LENGTH = 4, 24
logits_of = jax.jit(decoder.logits, static_argnums=1)

Batch = Mapping[str, jax.Array]


@jax.jit
def loss_and_gradient(
    params: decoder.Params, batch: Batch, denominators: Batch
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]:
    def of(params: decoder.Params) -> tuple[jax.Array, dict[str, jax.Array]]:
        return policy_loss(params, MODEL, COMPUTE, CONFIG, batch, denominators)

    return jax.value_and_grad(of, has_aux=True)(params)


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    made = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), MODEL)
    return {**made, decoder.EMBEDDING: made[decoder.EMBEDDING] * 5}


def sample(
    tokens: Sequence[int], mask: np.ndarray, advantages: np.ndarray, generator: np.ndarray, temperature: float = 1.0
) -> Sample:
    nothing = np.zeros(len(mask))
    return Sample(
        mask=mask,
        advantages=advantages,
        generator=generator,
        learner=nothing,
        entropy=nothing,
        proximal=nothing,
        reference=nothing,
        tokens=np.asarray(tokens, np.int32),
        temperature=temperature,
    )


def some_samples(count: int = 20) -> list[Sample]:
    """Rollouts whose generator differs from the learner, far enough for every branch of the clipping."""
    draw = np.random.default_rng(7)
    collected = []
    for _ in range(count):
        length, prompt = int(draw.integers(4, 12)), int(draw.integers(1, 4))
        collected.append(
            sample(
                draw.integers(0, MODEL.vocab_size, length),
                np.arange(length) >= prompt,
                draw.normal(size=length).astype(np.float32),
                (-4.6 + draw.normal(size=length)).astype(np.float32),
                float(draw.choice([0.5, 1.0, 1.5])),
            )
        )
    return collected


def microbatches(samples: list[Sample], rubbish: float = 0.0) -> list[dict[str, np.ndarray]]:
    """Arrays of at most ROWS rows each, as the loss takes them."""
    layout = row_by_row(samples, LENGTH)
    collected = []
    for start in range(0, len(layout), ROWS):
        rows = layout[start : start + ROWS]
        arrays = microbatch(samples, [*rows, *[[]] * (ROWS - len(rows))], LENGTH, CONFIG, rubbish=rubbish)
        collected.append({name: arrays[name] for name in WANTED})
    return collected


WANTED = (
    *("tokens", "positions", "segment_ids", "loss_mask", "loss_weights"),
    *("advantages", "generator_log_probs", "temperatures"),
)


def trained_tokens(params: decoder.Params, samples: list[Sample]) -> Iterator[tuple[Sample, int, np.ndarray]]:
    """Every trained token as (sample, position, log-probabilities of the vocabulary in float64)."""
    for each in samples:
        length = len(each.tokens)
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, :length] = each.tokens
        positions = np.arange(LENGTH, dtype=np.int32)[None]
        logits = np.asarray(logits_of(params, MODEL, tokens, positions, np.ones_like(tokens))[0], np.float64)
        for t in range(1, length):
            if each.mask[t]:
                scaled = logits[t - 1] / each.temperature
                yield each, t, scaled - np.log(np.sum(np.exp(scaled)))


def reference(params: decoder.Params, samples: list[Sample]) -> dict[str, float]:
    """The default recipe's loss token by token in float64, each sequence on its own."""
    total, tokens = dict.fromkeys(POLICY_METRICS, 0.0), 0
    for each, t, logprobs in trained_tokens(params, samples):
        log_ratio = logprobs[each.tokens[t]] - float(each.generator[t])
        ratio, advantage = np.exp(log_ratio), float(each.advantages[t])
        if advantage >= 0:
            objective = min(ratio, 1 + RECIPE.clip_high) * advantage
        else:
            objective = min(max(ratio, 1 - RECIPE.clip_low), RECIPE.ratio_cap) * advantage
        entropy = -np.sum(np.exp(logprobs) * logprobs)
        tokens += 1
        total["loss"] -= objective + RECIPE.entropy_coefficient * entropy
        total["entropy/mean"] += entropy
        total["mismatch_kl/mean"] += ratio - 1 - log_ratio
        total["mismatch_log_ratio/mean"] += log_ratio
        total["clip_ratio/low_mean"] += advantage < 0 and ratio < 1 - RECIPE.clip_low
        total["clip_ratio/high_mean"] += advantage > 0 and ratio > 1 + RECIPE.clip_high
        total["clip_ratio/cap_mean"] += advantage < 0 and ratio > RECIPE.ratio_cap
    return {name: value / tokens for name, value in total.items()}


def summed(params: decoder.Params, *parts: list[Sample]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics and gradients added over the microbatches of one update, which may be laid out in several parts."""
    divisors = denominators([each for part in parts for each in part])
    actual = [loss_and_gradient(params, arrays, divisors) for part in parts for arrays in microbatches(part)]
    metrics = {name: sum(float(result[0][1][name]) for result in actual) for name in POLICY_METRICS}
    return metrics, {name: sum(np.asarray(result[1][name], np.float64) for result in actual) for name in params}


def test_the_loss_and_its_metrics_match_the_float64_reference(params: dict[str, jax.Array]) -> None:
    samples = some_samples()
    expected = reference(params, samples)
    assert all(expected[name] > 0.01 for name in POLICY_METRICS if name.startswith("clip_ratio"))
    actual, _ = summed(params, samples)
    for name in POLICY_METRICS:
        assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_the_gradient_is_that_of_the_reference(params: dict[str, jax.Array]) -> None:
    """Central differences of the float64 reference along random directions of the embedding and of a projection."""
    samples = some_samples(4)
    _, gradient = summed(params, samples)
    draw = np.random.default_rng(3)
    for name in (decoder.EMBEDDING, "model.layers.0.mlp.up_proj.weight"):
        direction = draw.normal(size=params[name].shape)
        direction /= np.linalg.norm(direction)
        h = 3e-3
        up, down = (
            reference({**params, name: params[name] + sign * h * direction}, samples)["loss"] for sign in (1, -1)
        )
        assert np.sum(gradient[name] * direction) == pytest.approx((up - down) / (2 * h), rel=0.05, abs=1e-4)


def test_padding_and_masked_tokens_have_no_effect_whatever_they_hold(params: dict[str, jax.Array]) -> None:
    samples = some_samples(5)
    [arrays], [dirty_arrays] = microbatches(samples), microbatches(samples, np.nan)
    assert not np.array_equal(arrays["advantages"], dirty_arrays["advantages"])
    (clean, _), clean_gradient = loss_and_gradient(params, arrays, denominators(samples))
    (dirty, _), dirty_gradient = loss_and_gradient(params, dirty_arrays, denominators(samples))
    assert float(clean) == float(dirty)
    for name in params:
        np.testing.assert_array_equal(clean_gradient[name], dirty_gradient[name])


def test_a_microbatch_of_padding_gives_zero_and_no_nan(params: dict[str, jax.Array]) -> None:
    (loss, metrics), gradient = loss_and_gradient(params, microbatches([], np.nan)[0], denominators([]))
    assert float(loss) == 0.0
    assert all(float(value) == 0.0 for value in metrics.values())
    assert all(not np.asarray(value).any() for value in gradient.values())


def test_the_supervised_loss_is_the_mean_negative_log_probability(params: dict[str, jax.Array]) -> None:
    samples = some_samples()
    divisors = denominators(samples)
    supervised = jax.jit(lambda batch: supervised_loss(params, MODEL, COMPUTE, batch, divisors)[0])
    actual = sum(float(supervised(arrays)) for arrays in microbatches(samples))
    expected = [-logprobs[each.tokens[t]] for each, t, logprobs in trained_tokens(params, samples)]
    assert actual == pytest.approx(np.mean(expected), rel=1e-5)


def test_in_bfloat16_a_token_of_every_position_has_the_gradient_it_has_in_float32() -> None:
    model = DecoderConfig(num_hidden_layers=0)
    tokens, ones = np.full((4, 512), 7, np.int32), np.ones((4, 512), np.int32)
    draw = np.random.default_rng(0)
    wanted = draw.normal(size=model.hidden_size).astype(np.float32)
    params = {
        decoder.EMBEDDING: jnp.asarray(draw.normal(size=(model.vocab_size, model.hidden_size)), jnp.float32),
        "model.norm.weight": jnp.ones(model.hidden_size),
    }

    @partial(jax.jit, static_argnums=0)
    def gradient(dtype: str) -> jax.Array:
        def of(embedding: jax.Array) -> jax.Array:
            cast = {name: value.astype(dtype) for name, value in {**params, decoder.EMBEDDING: embedding}.items()}
            return jnp.sum(decoder.hidden(cast, model, tokens, ones, ones).astype(jnp.float32) * wanted)

        return jax.grad(of)(params[decoder.EMBEDDING])[7]

    exact, rounded = np.asarray(gradient("float32")), np.asarray(gradient("bfloat16"))
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)


def test_log_probs_stand_where_their_tokens_do(params: dict[str, jax.Array]) -> None:
    samples = some_samples()
    log_probs_of = jax.jit(lambda batch: log_probs(params, MODEL, COMPUTE, batch))
    actual = np.concatenate(
        [np.asarray(log_probs_of(arrays))[arrays["loss_mask"] > 0] for arrays in microbatches(samples)]
    )
    expected = [logprobs[each.tokens[t]] for each, t, logprobs in trained_tokens(params, samples)]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not np.asarray(log_probs_of(microbatches(samples)[0]))[:, 0].any()

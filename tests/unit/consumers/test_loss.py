"""The loss against an independent one in numpy and float64, and what it must not depend on."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from consumers.learner.loss import policy_loss, supervised_loss
from consumers.learner.objective import LossConfig, policy_metrics
from consumers.learner.packing import PackedStep, TrainingSequence, pack, padding
from consumers.models import decoder
from consumers.models.config import Compute, DecoderConfig

MODEL = DecoderConfig(num_hidden_layers=1)
COMPUTE = Compute()
CONFIG = LossConfig()
POLICY_METRICS = policy_metrics(CONFIG)
ROWS, LENGTH = 4, 24
logits_of = jax.jit(decoder.logits, static_argnums=1)


@jax.jit
def loss_and_gradient(
    params: decoder.Params, batch: Mapping[str, jax.Array], denominators: Mapping[str, jax.Array]
) -> tuple[tuple[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]:
    return jax.value_and_grad(lambda p: policy_loss(p, MODEL, COMPUTE, CONFIG, batch, denominators), has_aux=True)(
        params
    )


@jax.jit
def gradient_without_bonus(params: decoder.Params, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    config, ones = LossConfig(entropy_coefficient=0.0), {"tokens": jnp.float32(1), "sequences": jnp.float32(1)}
    return jax.grad(lambda p: policy_loss(p, MODEL, COMPUTE, config, batch, ones)[0])(params)


def denominators_of(*steps: PackedStep) -> dict[str, np.float32]:
    return {
        "tokens": np.float32(max(1, sum(step.trained_tokens for step in steps))),
        "sequences": np.float32(max(1, sum(step.trained_sequences for step in steps))),
    }


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    made = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), MODEL)
    return {**made, decoder.EMBEDDING: made[decoder.EMBEDDING] * 5}


def some_sequences(count: int = 20, off_policy: float = 1.0) -> list[TrainingSequence]:
    """Rollouts whose generator differs from the learner, far enough for every branch of the clipping."""
    draw = np.random.default_rng(7)
    found = []
    for _ in range(count):
        length, prompt = int(draw.integers(4, 12)), int(draw.integers(1, 4))
        found.append(
            TrainingSequence(
                tokens=draw.integers(0, MODEL.vocab_size, length).astype(np.int32),
                loss_mask=np.arange(length) >= prompt,
                advantages=draw.normal(size=length).astype(np.float32),
                generator_log_probs=(-4.6 + off_policy * draw.normal(size=length)).astype(np.float32),
                temperature=float(draw.choice([0.5, 1.0, 1.5])),
            )
        )
    return found


def packed(sequences: list[TrainingSequence]) -> PackedStep:
    return pack(sequences, rows=ROWS, sequence_length=LENGTH)


def trained_tokens(
    params: decoder.Params, sequences: list[TrainingSequence]
) -> Iterator[tuple[TrainingSequence, int, np.ndarray]]:
    """Every trained token as (sequence, position, log-probabilities of the vocabulary in float64)."""
    for sequence in sequences:
        length = len(sequence.tokens)
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, :length] = sequence.tokens
        positions = np.arange(LENGTH, dtype=np.int32)[None]
        logits = np.asarray(logits_of(params, MODEL, tokens, positions, np.ones_like(tokens))[0], np.float64)
        for t in range(1, length):
            if sequence.loss_mask[t]:
                scaled = logits[t - 1] / sequence.temperature
                yield sequence, t, scaled - np.log(np.sum(np.exp(scaled)))


def reference(params: decoder.Params, sequences: list[TrainingSequence], config: LossConfig) -> dict[str, float]:
    """The recipe's loss token by token in float64, each sequence on its own."""
    total, tokens = dict.fromkeys(POLICY_METRICS, 0.0), 0
    for sequence, t, logprobs in trained_tokens(params, sequences):
        log_ratio = logprobs[sequence.tokens[t]] - float(sequence.generator_log_probs[t])
        ratio, advantage = np.exp(log_ratio), float(sequence.advantages[t])
        if advantage >= 0:
            objective = min(ratio, 1 + config.clip_high) * advantage
        else:
            objective = min(max(ratio, 1 - config.clip_low), config.ratio_cap) * advantage
        entropy = -np.sum(np.exp(logprobs) * logprobs)
        tokens += 1
        total["loss"] -= objective + config.entropy_coefficient * entropy
        total["entropy/mean"] += entropy
        total["mismatch_kl/mean"] += ratio - 1 - log_ratio
        total["clip_ratio/low_mean"] += advantage < 0 and ratio < 1 - config.clip_low
        total["clip_ratio/high_mean"] += advantage > 0 and ratio > 1 + config.clip_high
        total["clip_ratio/cap_mean"] += advantage < 0 and ratio > config.ratio_cap
    return {name: value / tokens for name, value in total.items()}


def summed(params: decoder.Params, *steps: PackedStep) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics and gradients added over the microbatches of one step, which may have been packed in several parts."""
    denominators = denominators_of(*steps)
    parts = [loss_and_gradient(params, m.arrays(), denominators) for step in steps for m in step.microbatches]
    metrics = {name: sum(float(part[0][1][name]) for part in parts) for name in POLICY_METRICS}
    return metrics, {name: sum(np.asarray(part[1][name], np.float64) for part in parts) for name in params}


def test_the_loss_and_its_metrics_match_the_float64_reference(params: dict[str, jax.Array]) -> None:
    sequences = some_sequences()
    expected = reference(params, sequences, CONFIG)
    assert all(expected[name] > 0.01 for name in POLICY_METRICS if name.startswith("clip_ratio"))
    found, _ = summed(params, packed(sequences))
    for name in POLICY_METRICS:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_the_gradient_is_that_of_the_reference(params: dict[str, jax.Array]) -> None:
    """Central differences of the float64 reference along random directions of the embedding and of a projection."""
    sequences = some_sequences(4)
    _, gradient = summed(params, packed(sequences))
    draw = np.random.default_rng(3)
    for name in (decoder.EMBEDDING, "model.layers.0.mlp.up_proj.weight"):
        direction = draw.normal(size=params[name].shape)
        direction /= np.linalg.norm(direction)
        h = 3e-3
        up, down = (
            reference({**params, name: params[name] + sign * h * direction}, sequences, CONFIG)["loss"]
            for sign in (1, -1)
        )
        assert np.sum(gradient[name] * direction) == pytest.approx((up - down) / (2 * h), rel=0.05, abs=1e-4)


def test_splitting_a_step_into_microbatches_changes_nothing(params: dict[str, jax.Array]) -> None:
    sequences = some_sequences()
    metrics, gradient = summed(params, packed(sequences))
    split_metrics, split_gradient = summed(params, *(packed(sequences[i : i + 6]) for i in range(0, len(sequences), 6)))
    for name in POLICY_METRICS:
        assert split_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7)
    for name in params:
        np.testing.assert_allclose(split_gradient[name], gradient[name], atol=2e-6)


def test_padding_and_masked_tokens_have_no_effect_whatever_they_hold(params: dict[str, jax.Array]) -> None:
    step = packed(some_sequences(5))
    (microbatch,) = step.microbatches
    arrays = microbatch.arrays()
    untrained = microbatch.loss_mask == 0
    rubbish = {
        **arrays,
        "generator_log_probs": np.where(untrained, np.float32(-1e30), microbatch.generator_log_probs),
        "advantages": np.where(untrained, np.float32(1e30), microbatch.advantages),
    }
    denominator = denominators_of(step)
    (clean, _), clean_gradient = loss_and_gradient(params, arrays, denominator)
    (dirty, _), dirty_gradient = loss_and_gradient(params, rubbish, denominator)
    assert float(clean) == float(dirty)
    for name in params:
        np.testing.assert_array_equal(clean_gradient[name], dirty_gradient[name])


def test_a_fully_masked_microbatch_gives_zero_and_no_nan(params: dict[str, jax.Array]) -> None:
    step = pack([], rows=ROWS, sequence_length=LENGTH)
    (loss, metrics), gradient = loss_and_gradient(params, padding(ROWS, LENGTH).arrays(), denominators_of(step))
    assert float(loss) == 0.0
    assert all(float(value) == 0.0 for value in metrics.values())
    assert all(not np.asarray(value).any() for value in gradient.values())


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [(1.0, 1.2, True), (1.0, 1.4, False), (-1.0, 0.9, True), (-1.0, 0.7, False), (-1.0, 1.9, True), (-1.0, 2.1, False)],
)
def test_a_token_beyond_its_bound_has_no_gradient(
    params: dict[str, jax.Array], advantage: float, ratio: float, moves: bool
) -> None:
    tokens = np.array([5, 9], np.int32)
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, :2] = tokens
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    logits = logits_of(params, MODEL, padded, positions, np.ones_like(padded))[0, 0]
    logprob = float(jax.nn.log_softmax(logits)[9])
    sequence = TrainingSequence(
        tokens=tokens,
        loss_mask=np.array([False, True]),
        advantages=np.full(2, advantage, np.float32),
        generator_log_probs=np.full(2, logprob - np.log(ratio), np.float32),
    )
    gradient = gradient_without_bonus(params, packed([sequence]).microbatches[0].arrays())
    assert any(np.asarray(value).any() for value in gradient.values()) is moves


def test_the_supervised_loss_is_the_mean_negative_log_probability(params: dict[str, jax.Array]) -> None:
    sequences = some_sequences()
    step = packed(sequences)
    supervised = jax.jit(lambda batch: supervised_loss(params, MODEL, COMPUTE, batch, denominators_of(step))[0])
    found = sum(float(supervised(microbatch.arrays())) for microbatch in step.microbatches)
    expected = [-logprobs[sequence.tokens[t]] for sequence, t, logprobs in trained_tokens(params, sequences)]
    assert found == pytest.approx(np.mean(expected), rel=1e-5)

"""Speed is counted from the shapes of the model, and related to the peak of devices that state one."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.objective import LossConfig
from rollstream.consumers.learner.training import step_figures
from rollstream.consumers.learner.training.loss import policy_loss
from rollstream.consumers.learner.training.packing import sequences_of
from rollstream.consumers.learner.training.step_figures import flops_per_token, mismatch_warning, throughput_metrics
from rollstream.consumers.models import decoder
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig, LoraConfig
from rollstream.topics.records import TrainingBatch
from tests.support.batches import random_batch
from tests.support.microbatches import Sample, denominators, microbatch

QWEN_7B = DecoderConfig(
    vocab_size=152064,
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=18944,
    num_hidden_layers=28,
    qk_norm=False,
    tie_word_embeddings=False,
)
BLOCK = 3584 * (3584 + 512 + 512 + 3584) + 3 * 3584 * 18944
"""Values of the matrices of one block, by hand."""


def test_operations_are_six_for_each_value_of_a_matrix_that_tokens_are_multiplied_with() -> None:
    assert flops_per_token(QWEN_7B) == 6 * (28 * BLOCK + 152064 * 3584)
    tied = replace(QWEN_7B, tie_word_embeddings=True)
    assert flops_per_token(tied) == flops_per_token(QWEN_7B)


def test_frozen_matrices_have_no_gradient_of_their_own() -> None:
    adapted = replace(QWEN_7B, lora=LoraConfig(rank=8))
    whole = 28 * BLOCK + 152064 * 3584
    assert 4 * whole < flops_per_token(adapted) < 4.1 * whole


def test_a_device_with_a_stated_peak_has_a_share_of_it_and_others_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LearnerConfig(model=QWEN_7B, epochs=2)
    figures = throughput_metrics(config, 1000.0, 2.0)
    devices = jax.device_count()
    assert figures["perf/throughput"] == 500.0
    assert figures["perf/device_throughput"] == 500.0 / devices
    assert figures["perf/device_flops"] == pytest.approx(1000.0 / devices * flops_per_token(QWEN_7B))
    assert "perf/mfu" not in figures
    monkeypatch.setitem(step_figures.PEAK_FLOPS, jax.devices()[0].device_kind, 1e15)
    assert throughput_metrics(config, 1000.0, 2.0)["perf/mfu"] == pytest.approx(figures["perf/device_flops"] / 1e15)


MODEL = DecoderConfig(num_hidden_layers=1)
CONFIG = LossConfig()
ROWS, PROMPT, LENGTH = 128, 2, 12
TEMPERATURE = 0.7

logits_of = jax.jit(decoder.logits, static_argnums=1)
metrics_of = jax.jit(
    lambda params, batch, divisors: policy_loss(params, MODEL, ComputeSettings(), CONFIG, batch, divisors)[1]
)


def made(seed: int) -> dict[str, jax.Array]:
    """Random parameters, scaled to an entropy of about two nats a token."""
    params = decoder.init(jax.random.key(seed), MODEL)
    return {**params, decoder.EMBEDDING: params[decoder.EMBEDDING] * 12}


@pytest.fixture(scope="module")
def params() -> dict[str, jax.Array]:
    return made(0)


@pytest.fixture(scope="module")
def tokens(params: dict[str, jax.Array]) -> np.ndarray:
    """Token ids [ROWS, LENGTH]; those after the prompt are sampled at TEMPERATURE."""
    draw = np.random.default_rng(4)
    actual = draw.integers(2, MODEL.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    for t in range(PROMPT, LENGTH):
        scaled = np.asarray(logits(params, actual)[:, t - 1], np.float64) / TEMPERATURE
        actual[:, t] = np.argmax(scaled + draw.gumbel(size=scaled.shape), axis=1)
    return actual


def logits(params: dict[str, jax.Array], tokens: np.ndarray) -> jax.Array:
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    return logits_of(params, MODEL, tokens, positions, np.ones_like(tokens))


def recorded(params: dict[str, jax.Array], tokens: np.ndarray, temperature: float, declared: str) -> TrainingBatch:
    """A batch with log-probabilities taken at `temperature`, whatever is `declared`."""
    logprobs = jax.nn.log_softmax(logits(params, tokens)[:, :-1] / temperature)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    mask = np.broadcast_to(np.arange(LENGTH) >= PROMPT, tokens.shape)
    return replace(
        random_batch(0, rows=ROWS),
        splits=np.arange(ROWS + 1, dtype="<i8") * LENGTH,
        tokens=tokens.reshape(-1),
        loss_mask=mask.reshape(-1),
        logprobs=np.where(mask, np.pad(chosen, ((0, 0), (1, 0))), 0).astype("<f4").reshape(-1),
        advantages=np.zeros(ROWS * LENGTH, "<f4"),
        temperatures=np.full(ROWS, TEMPERATURE),
        logprobs_processed=np.full(ROWS, declared == "processed"),
    )


def step_metrics(params: dict[str, jax.Array], batch: TrainingBatch, staleness: float = 0.0) -> dict[str, float]:
    nothing = np.zeros(LENGTH)
    samples = [
        Sample(
            mask=sequence.loss_mask,
            advantages=sequence.advantages,
            generator=sequence.generator_log_probs,
            learner=nothing,
            entropy=nothing,
            proximal=nothing,
            reference=nothing,
            tokens=sequence.tokens,
            temperature=sequence.temperature,
        )
        for sequence in sequences_of(batch)
    ]
    arrays: Any = microbatch(samples, [[row] for row in range(ROWS)], LENGTH, CONFIG)
    wanted = {name: value for name, value in arrays.items() if name not in ("learner", "entropy")}
    del wanted["proximal_log_probs"], wanted["reference_log_probs"]
    actual = {name: float(value) for name, value in metrics_of(params, wanted, denominators(samples)).items()}
    return {**actual, "off_policy/staleness": staleness}


@pytest.mark.parametrize(("temperature", "declared"), [(TEMPERATURE, "processed"), (1.0, "raw")])
def test_a_correct_declaration_passes(
    params: dict[str, jax.Array], tokens: np.ndarray, temperature: float, declared: str
) -> None:
    metrics = step_metrics(params, recorded(params, tokens, temperature, declared))
    assert abs(metrics["mismatch_kl/mean"]) < 1e-5
    assert abs(metrics["mismatch_log_ratio/mean"]) < 1e-5
    assert mismatch_warning(metrics, CONFIG) is None


def test_raw_log_probabilities_declared_processed_are_caught(params: dict[str, jax.Array], tokens: np.ndarray) -> None:
    batch = recorded(params, tokens, 1.0, "processed")
    warning = mismatch_warning(step_metrics(params, batch), CONFIG)
    assert warning is not None
    assert "(raw) declared as processed" in warning
    assert "is above the limit 0.02: learner.loss.mismatch_limit 0.02" in warning


def test_processed_log_probabilities_declared_raw_are_caught(params: dict[str, jax.Array], tokens: np.ndarray) -> None:
    batch = recorded(params, tokens, TEMPERATURE, "raw")
    warning = mismatch_warning(step_metrics(params, batch), CONFIG)
    assert warning is not None
    assert "(processed) declared as raw" in warning


def test_the_divergence_measured_is_that_of_the_distributions(params: dict[str, jax.Array], tokens: np.ndarray) -> None:
    """KL(generator || learner) over the vocabulary, which k3 estimates from 1,280 sampled tokens."""
    at = logits(params, tokens)[:, PROMPT - 1 : -1]
    generator, learner = jax.nn.log_softmax(at / TEMPERATURE), jax.nn.log_softmax(at)
    expected = float(jnp.mean(jnp.sum(jnp.exp(generator) * (generator - learner), axis=-1)))
    metrics = step_metrics(params, recorded(params, tokens, TEMPERATURE, "raw"))
    assert metrics["mismatch_kl/mean"] == pytest.approx(expected, rel=0.3)


def test_older_policies_may_differ_more_and_get_another_cause() -> None:
    metrics = {"mismatch_kl/mean": 0.09, "mismatch_log_ratio/mean": -0.1, "off_policy/staleness": 1.5}
    assert mismatch_warning(metrics, CONFIG) is None
    warning = mismatch_warning({**metrics, "mismatch_kl/mean": 0.1}, CONFIG)
    assert warning is not None
    assert "too old" in warning
    assert "is above the limit 0.095:" in warning
    assert mismatch_warning({**metrics, "mismatch_kl/mean": 0.3}, LossConfig(stale_mismatch_limit=1.0)) is None


def test_one_old_rollout_among_fresh_ones_does_not_hide_a_wrong_declaration() -> None:
    """A wrong temperature gives 0.05 to 0.1, which a lag of a hundredth of a step does not explain."""
    metrics = {"mismatch_kl/mean": 0.05, "mismatch_log_ratio/mean": -0.05, "off_policy/staleness": 0.01}
    assert mismatch_warning(metrics, CONFIG) is not None


@pytest.mark.parametrize("divergence", [float("nan"), float("inf")])
def test_a_divergence_that_is_no_number_is_a_warning(divergence: float) -> None:
    warning = mismatch_warning({"mismatch_kl/mean": divergence}, CONFIG)
    assert warning is not None
    assert "not numbers" in warning

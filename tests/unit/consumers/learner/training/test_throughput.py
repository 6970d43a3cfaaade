"""Speed is counted from the shapes of the model, and related to the peak of devices that state one."""

from dataclasses import replace

import jax
import pytest

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.training import throughput
from rollstream.consumers.learner.training.throughput import flops_per_token, throughput_metrics
from rollstream.consumers.models.config import DecoderConfig, LoraConfig

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
    monkeypatch.setitem(throughput.PEAK_FLOPS, jax.devices()[0].device_kind, 1e15)
    assert throughput_metrics(config, 1000.0, 2.0)["perf/mfu"] == pytest.approx(figures["perf/device_flops"] / 1e15)

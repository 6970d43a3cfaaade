"""Experts: each token is computed by those that the router chose, as a plain loop over tokens computes it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.training.throughput import flops_per_token
from rollstream.consumers.models.adapters import without_adapters
from rollstream.consumers.models.config import DecoderConfig, LoraConfig, decoder_config, manifest_model
from rollstream.consumers.models.experts import mixture
from rollstream.consumers.models.parameters import adapter_shapes, base_shapes, is_expert
from rollstream.topics.errors import ConfigurationError

CONFIG = DecoderConfig(
    hidden_size=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=6, norm_topk_prob=True
)
MLP = "model.layers.0.mlp"


def drawn() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    return {
        name: jnp.asarray(draw.normal(size=shape), jnp.float32)
        for name, shape in base_shapes(CONFIG).items()
        if name.startswith(MLP)
    }


def by_token(params: dict[str, jax.Array], config: DecoderConfig, x: np.ndarray) -> np.ndarray:
    """The mixture in float64, one token after the other."""
    own = {name.removeprefix(f"{MLP}."): np.asarray(value, np.float64) for name, value in params.items()}
    actual = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        token = x[place].astype(np.float64)
        scores = np.exp(own["gate.weight"] @ token)
        shares = scores / scores.sum()
        chosen = np.argsort(-shares)[: config.num_experts_per_tok]
        scale = shares[chosen].sum() if config.norm_topk_prob else 1.0
        for expert in chosen:
            gate, up, down = (own[f"experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            inner = gate @ token
            actual[place] += shares[expert] / scale * (down @ (inner / (1 + np.exp(-inner)) * (up @ token)))
    return actual


@pytest.mark.parametrize("scaled", [True, False])
def test_a_token_is_the_weighed_sum_of_its_experts(scaled: bool) -> None:
    config, params = replace(CONFIG, norm_topk_prob=scaled), drawn()
    x = np.random.default_rng(1).normal(size=(3, 7, 8)).astype(np.float32)
    actual = jax.jit(mixture, static_argnums=(1, 2))(params, MLP, config, x)
    np.testing.assert_allclose(actual, by_token(params, config, x), rtol=2e-4, atol=2e-4)


def test_an_expert_that_no_token_chose_has_no_gradient_and_the_router_has_one() -> None:
    params, x = drawn(), jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, 8)), jnp.float32)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(mixture(p, MLP, CONFIG, x)))))(params)
    shares = np.asarray(x[0] @ params[f"{MLP}.gate.weight"].T)
    chosen = set(np.argsort(-shares, axis=1)[:, :2].ravel().tolist())
    assert 2 <= len(chosen) < 5
    for name, value in gradient.items():
        expert = int(name.split(".")[5]) if is_expert(name) else None
        assert bool(np.abs(value).max() > 0) == (expert is None or expert in chosen), name


def test_experts_have_no_adapters_and_only_those_of_a_token_count_as_its_operations() -> None:
    dense = DecoderConfig(hidden_size=8, num_hidden_layers=1, intermediate_size=12)
    sparse = replace(CONFIG, num_hidden_layers=1)
    router = 6 * 5 * 8
    assert flops_per_token(sparse) == pytest.approx(flops_per_token(dense) + router)
    names = adapter_shapes(replace(sparse, lora=LoraConfig(rank=2)))
    assert names
    assert not any(".mlp." in name for name in names)


def test_a_manifest_names_the_experts() -> None:
    assert decoder_config(manifest_model(CONFIG)) == without_adapters(CONFIG)
    with pytest.raises(ConfigurationError, match="num_experts 4 with num_experts_per_tok 5"):
        replace(CONFIG, num_experts=4, num_experts_per_tok=5)

"""The decoder's promises: packing changes nothing, the cache changes nothing, the future is never seen."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.learner.training.step_figures import flops_per_token
from rollstream.consumers.models import decoder
from rollstream.consumers.models.adapters import without_adapters
from rollstream.consumers.models.config import DecoderConfig, LoraConfig, decoder_config, manifest_model
from rollstream.consumers.models.decoder import mixture
from rollstream.consumers.models.parameters import adapter_shapes, base_shapes, is_expert
from rollstream.topics.errors import ConfigurationError

VARIANTS = {
    "demo, as Qwen3": DecoderConfig(),
    "with all biases, untied, stretched": DecoderConfig(
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=500_000.0,
        qk_norm=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        rope_scaling_factor=8.0,
        rope_original_positions=64,
        tie_word_embeddings=False,
    ),
    "with experts": DecoderConfig(
        num_hidden_layers=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    ),
}
WIDTH = 32
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def random_params(config: DecoderConfig) -> dict[str, np.ndarray]:
    """Parameters in which no part is silent: biases and norms are random too."""
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(
            float(name.endswith("norm.weight")), 0.02 if name in (decoder.EMBEDDING, decoder.HEAD) else 0.1, shape
        ).astype(np.float32)
        for name, shape in decoder.shapes(config).items()
    }


logits_of = jax.jit(decoder.logits, static_argnums=1)
prefill = jax.jit(decoder.prefill, static_argnums=1)
final_logits = jax.jit(decoder.final_logits, static_argnums=1)
decode_step = jax.jit(decoder.decode_step, static_argnums=1)


def logits_alone(params: decoder.Params, config: DecoderConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits [len(tokens), vocab] of a sequence that shares its row with padding only, in one compiled shape."""
    length = len(tokens)
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, :length] = tokens
    positions = np.arange(WIDTH, dtype=np.int32)[None]
    return np.asarray(logits_of(params, config, padded, positions, (positions < length).astype(np.int32))[0, :length])


@variants
def test_packed_logits_equal_unpacked(config: DecoderConfig) -> None:
    params = random_params(config)
    draw = np.random.default_rng(1)
    sequences = [draw.integers(0, config.vocab_size, length).astype(np.int32) for length in (7, 3, 12, 1)]
    tokens = np.concatenate([*sequences, np.zeros(9, np.int32)])[None]
    positions = np.concatenate([*(np.arange(len(s)) for s in sequences), np.zeros(9)]).astype(np.int32)[None]
    segments = np.repeat([1, 2, 3, 4, 0], [7, 3, 12, 1, 9]).astype(np.int32)[None]

    packed = np.asarray(logits_of(params, config, tokens, positions, segments)[0])

    start = 0
    for sequence in sequences:
        alone = logits_alone(params, config, sequence)
        np.testing.assert_allclose(packed[start : start + len(sequence)], alone, atol=1e-6, rtol=1e-6)
        start += len(sequence)


@variants
def test_decoding_with_the_cache_gives_the_logits_of_the_whole_sequence(config: DecoderConfig) -> None:
    params = random_params(config)
    draw = np.random.default_rng(2)
    lengths = np.array([5, 2, 4], np.int32)
    full = draw.integers(0, config.vocab_size, (3, 9)).astype(np.int32)

    prompts = np.where(np.arange(9) < lengths[:, None], full, 1)
    states, cache = prefill(params, config, prompts)
    logits = final_logits(params, config, states[np.arange(3), lengths - 1])
    seen = [[np.asarray(logits[row])] for row in range(3)]
    for step in range(4):
        positions = lengths + step
        logits, cache = decode_step(params, config, cache, full[np.arange(3), positions], positions)
        for row in range(3):
            seen[row].append(np.asarray(logits[row]))

    for row, length in enumerate(lengths):
        whole = logits_alone(params, config, full[row, : length + 4])
        np.testing.assert_allclose(np.stack(seen[row]), whole[length - 1 :], atol=2e-6, rtol=1e-5)


@variants
def test_every_parameter_has_a_shape_a_split_and_an_effect(config: DecoderConfig) -> None:
    params = random_params(config)
    assert {name: value.shape for name, value in params.items()} == decoder.shapes(config)
    specs = decoder.pspecs(params)
    assert all(len(specs[name]) <= value.ndim for name, value in params.items())

    def total(params: decoder.Params) -> jax.Array:
        tokens = jnp.arange(config.vocab_size)[None] % config.vocab_size
        positions = jnp.arange(config.vocab_size)[None]
        return jnp.sum(jnp.square(decoder.logits(params, config, tokens, positions, jnp.ones_like(tokens))))

    gradients = jax.jit(jax.grad(total))(params)
    silent = [name for name, gradient in gradients.items() if not np.abs(gradient).max() > 0]
    assert silent == []


def test_a_parameter_is_split_only_where_the_mesh_divides_it() -> None:
    config = DecoderConfig(num_hidden_layers=1, hidden_size=64, num_key_value_heads=1, head_dim=6, vocab_size=100)
    split = {
        name: tuple(spec)
        for name, spec in decoder.pspecs(
            {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in decoder.shapes(config).items()},
            {"data": 2, "fsdp": 2, "tensor": 4},
        ).items()
    }
    assert split["model.embed_tokens.weight"] == ("tensor", "fsdp")
    assert split["model.layers.0.self_attn.k_proj.weight"] == (None, "fsdp")
    assert split["model.layers.0.mlp.down_proj.weight"] == ("fsdp", "tensor")
    assert split["model.norm.weight"] == ()
    without_tensor = decoder.pspecs({"model.embed_tokens.weight": np.zeros((100, 64))}, {"fsdp": 2})
    assert tuple(without_tensor["model.embed_tokens.weight"]) == (None, "fsdp")


def test_heads_that_cannot_share_keys_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_key_value_heads 2"):
        DecoderConfig(num_attention_heads=3, num_key_value_heads=2)


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

"""Adapters against numpy in float64: what they add, what merging makes of them, and PEFT's files."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models import decoder, huggingface, parameters
from rollstream.consumers.models.adapters import (
    PEFT_CONFIG,
    PEFT_MODEL,
    merged,
    save_merged,
    save_peft,
    without_adapters,
)
from rollstream.consumers.models.config import PROJECTIONS, DecoderConfig, LoraConfig, decoder_config, manifest_model
from rollstream.consumers.models.slots import Row, SlotDecoder
from rollstream.topics.errors import ConfigurationError
from tests.support import peft_logits
from tests.support.checkpoints import random_parameters
from tests.support.checkpoints import tokens_of as tokens_of_checkpoint

MODEL = DecoderConfig(lora=LoraConfig(rank=4, alpha=12.0))


hidden = jax.jit(decoder.hidden, static_argnums=1, static_argnames="scanned")


def tokens_of(rows: int = 2, length: int = 12) -> tuple[jax.Array, jax.Array, jax.Array]:
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(2, 90, (rows, length)), jnp.int32)
    return tokens, jnp.broadcast_to(jnp.arange(length), tokens.shape), jnp.ones_like(tokens)


@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_model_with_adapters_computes_what_it_does_once_they_are_merged(scanned: bool) -> None:
    params = random_parameters(MODEL)
    given = {name: jnp.asarray(value) for name, value in params.items()}
    whole = {name: jnp.asarray(value) for name, value in merged(MODEL, params).items()}
    adapted = hidden(given, MODEL, *tokens_of(), scanned=scanned)
    at_once = hidden(whole, without_adapters(MODEL), *tokens_of(), scanned=scanned)
    np.testing.assert_allclose(adapted, at_once, atol=2e-5)
    bare = {name: value for name, value in given.items() if not parameters.is_adapter(name)}
    assert np.abs(at_once - hidden(bare, without_adapters(MODEL), *tokens_of(), scanned=scanned)).max() > 0.1


def test_merging_adds_alpha_over_rank_times_the_product() -> None:
    params = random_parameters(MODEL)
    whole = merged(MODEL, params)
    assert whole.keys() == parameters.base_shapes(MODEL).keys()
    for name, array in whole.items():
        expected = params[name].astype(np.float64)
        projection = name.removesuffix(".weight")
        if projection.rsplit(".", 1)[-1] in PROJECTIONS:
            up, down = params[f"{projection}.lora_B.weight"], params[f"{projection}.lora_A.weight"]
            expected = expected + 12.0 / 4 * up.astype(np.float64) @ down.astype(np.float64)
        np.testing.assert_allclose(array, expected, atol=1e-6)
    stored = {name: array.astype(safetensors_files.DTYPES["BF16"]) for name, array in params.items()}
    assert {array.dtype.name for array in merged(MODEL, stored).values()} == {"bfloat16"}


@pytest.mark.parametrize("companions", [True, False])
def test_a_merged_checkpoint_is_the_model_without_adapters_with_the_tokenizer_and_the_context_of_another(
    companions: bool, tmp_path: Path
) -> None:
    other, saved = tmp_path / "other", tmp_path / "saved"
    other.mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (other / name).write_text("another checkpoint's")
    (other / "config.json").write_text('{"max_position_embeddings": 131072, "vocab_size": 3}')
    params = random_parameters(MODEL)
    save_merged(saved, MODEL, params, companions=other if companions else "")
    assert {path.name for path in saved.iterdir()} == {"config.json", "model.safetensors"} | (
        {"tokenizer.json"} if companions else set()
    )
    assert huggingface.max_positions_of(saved) == (131072 if companions else 0)
    stored = huggingface.load(saved)
    assert stored.keys() == parameters.base_shapes(MODEL).keys()
    for name, array in merged(MODEL, params).items():
        np.testing.assert_array_equal(stored[name], array)


def test_fresh_adapters_change_nothing_and_leave_the_model_as_it_would_be() -> None:
    with_them, without = (decoder.init(jax.random.key(3), config) for config in (MODEL, without_adapters(MODEL)))
    for name, value in merged(MODEL, with_them).items():
        np.testing.assert_array_equal(value, without[name])
    down = np.asarray(with_them["model.layers.0.mlp.down_proj.lora_A.weight"])
    assert 0.9 / np.sqrt(192) < np.abs(down).max() <= 1 / np.sqrt(192)


def test_only_the_targets_have_adapters_whose_names_and_shapes_are_pefts() -> None:
    model = replace(MODEL, lora=LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    assert list(parameters.adapter_shapes(model).items())[:4] == [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (2, 64)),
        ("model.layers.0.self_attn.q_proj.lora_B.weight", (64, 2)),
        ("model.layers.0.mlp.down_proj.lora_A.weight", (2, 192)),
        ("model.layers.0.mlp.down_proj.lora_B.weight", (64, 2)),
    ]
    assert len(parameters.adapter_shapes(model)) == 8


def test_a_manifest_names_the_adapters() -> None:
    assert decoder_config(manifest_model(MODEL)) == MODEL
    plain = without_adapters(MODEL)
    assert decoder_config(manifest_model(plain)) == plain
    with pytest.raises(ConfigurationError, match="does not describe a supported model"):
        decoder_config(json.dumps({"lora": {"rank": 4, "of": "another kind"}}))


@pytest.mark.parametrize("settings", [{"rank": -1}, {"alpha": 0.0}, {"targets": ()}, {"targets": ("embed_tokens",)}])
def test_adapters_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"learner\.model\.lora"):
        LoraConfig(**settings)  # type: ignore[arg-type]


def test_pefts_files_hold_the_adapters_alone(tmp_path: Path) -> None:
    params = random_parameters(MODEL)
    save_peft(tmp_path, MODEL, params, base="models/base")
    stored = safetensors_files.read(tmp_path / PEFT_MODEL)
    assert stored.keys() == {f"base_model.model.{name}" for name in parameters.adapter_shapes(MODEL)}
    for name, array in stored.items():
        np.testing.assert_array_equal(array, params[name.removeprefix("base_model.model.")])
    settings = json.loads((tmp_path / PEFT_CONFIG).read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 12.0)
    assert settings["base_model_name_or_path"] == "models/base"
    assert settings["target_modules"] == list(PROJECTIONS)
    with pytest.raises(ConfigurationError, match="has no adapters"):
        save_peft(tmp_path / "none", without_adapters(MODEL), params)


def test_the_server_samples_with_merged_weights() -> None:
    params = random_parameters(MODEL)
    server = SlotDecoder(MODEL, slots=2, max_model_len=16)
    placed, expected = server.place(params), merged(MODEL, params)
    assert placed.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(placed[name], array)
    (completion,) = server.sample(placed, [Row(prompt=[5], seed=1, max_tokens=1)])
    assert len(completion.tokens) == 1


def our_logits() -> NDArray[np.float32]:
    """Logits [T, vocab_size] of the model whose PEFT logits are recorded, with unmerged adapters."""
    params = {name: jnp.asarray(value) for name, value in random_parameters(peft_logits.MODEL).items()}
    tokens = tokens_of_checkpoint(peft_logits.MODEL)
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    states = hidden(params, peft_logits.MODEL, tokens, positions, np.ones_like(tokens))
    return np.asarray(decoder.head(params, peft_logits.MODEL, states)[0])


def test_logits_are_those_recorded_from_peft_for_the_files_we_export() -> None:
    with np.load(peft_logits.RECORDED) as recorded:
        np.testing.assert_allclose(our_logits()[::5], recorded["logits"], atol=3e-5, rtol=3e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT uses that name in transformers.
def test_peft_loads_the_files_we_export_and_gives_our_logits(tmp_path: Path) -> None:
    peft_logits.write(tmp_path)
    theirs = peft_logits.logits_of_peft(tmp_path, tokens_of_checkpoint(peft_logits.MODEL))
    np.testing.assert_allclose(our_logits(), theirs, atol=3e-5, rtol=3e-5)

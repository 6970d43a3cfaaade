"""Checkpoints in Hugging Face's format: the model that was saved is the model that loads, to the last bit and logit."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from rollstream.consumers.files.safetensors_files import CheckpointRefused
from rollstream.consumers.models import decoder, huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import StoreError
from tests.support.checkpoints import (
    CHECKPOINTS,
    RECORDED,
    logits_of_transformers,
    random_parameters,
    tokens_of,
    write_checkpoint,
)

TOLERANCE = 3e-5
"""Difference of logits of magnitude 5 in float32: torch takes sums in another order."""
SMALL = DecoderConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, head_dim=4, intermediate_size=12)


def logits_of(directory: Path) -> np.ndarray:
    """Our logits [T, vocab_size] of a checkpoint's row of tokens."""
    config = huggingface.load_config(directory)
    params = {name: jax.numpy.asarray(array) for name, array in huggingface.load(directory, config).items()}
    tokens = tokens_of(config)
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    compiled = jax.jit(decoder.logits, static_argnums=1)
    return np.asarray(compiled(params, config, tokens, positions, np.ones_like(tokens))[0])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_recorded_from_transformers(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name)
    with np.load(RECORDED) as recorded:
        np.testing.assert_allclose(logits_of(tmp_path)[::5], recorded[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_transformers_for_what_was_written_and_for_what_we_save(name: str, tmp_path: Path) -> None:
    given, saved = tmp_path / "given", tmp_path / "saved"
    given.mkdir()
    config = write_checkpoint(given, name)
    huggingface.save(saved, config, huggingface.load(given), max_shard_bytes=60_000)
    assert (saved / huggingface.INDEX).exists()
    for directory in (given, saved):
        theirs = logits_of_transformers(directory, tokens_of(config))
        np.testing.assert_allclose(logits_of(directory), theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_configuration_survives_being_saved(name: str, tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, name)
    huggingface.write_json(tmp_path / huggingface.CONFIG, huggingface.config_json(config))
    assert huggingface.load_config(tmp_path) == config


@pytest.mark.parametrize("max_shard_bytes", [10**9, 300], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [None, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_parameters_survive_being_saved_bit_for_bit(max_shard_bytes: int, dtype: Any, tmp_path: Path) -> None:
    params = random_parameters(SMALL)
    huggingface.save(tmp_path / "model", SMALL, params, dtype=dtype, max_shard_bytes=max_shard_bytes)
    loaded = huggingface.load(tmp_path / "model")
    assert list(loaded) == list(params)
    for name, array in params.items():
        np.testing.assert_array_equal(loaded[name], array.astype(dtype or np.float32), strict=True)
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) == 1 if max_shard_bytes > 300 else len(files) > 3
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == str(np.dtype(dtype or "f4"))


def test_the_safetensors_library_reads_what_we_save(tmp_path: Path) -> None:
    params = random_parameters(SMALL)
    huggingface.save(tmp_path, SMALL, params)
    with safe_open(tmp_path / huggingface.SINGLE, "numpy") as file:
        assert set(file.keys()) == set(params)
        for name, array in params.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_a_model_saved_half_does_not_load_and_a_whole_one_is_not_overwritten(tmp_path: Path) -> None:
    params = random_parameters(SMALL)

    class Dying:
        """A parameter whose device is lost before it reaches the host."""

        shape, dtype = params["model.norm.weight"].shape, np.dtype(np.float32)

        def __array__(self, *_: Any) -> np.ndarray:
            raise ConnectionError("the device is gone")

    with pytest.raises(StoreError, match="the device is gone"):
        huggingface.save(tmp_path, SMALL, {**params, "model.norm.weight": Dying()}, max_shard_bytes=300)
    with pytest.raises(CheckpointRefused, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        huggingface.load(tmp_path)
    with pytest.raises(CheckpointRefused, match="already holds a model"):
        huggingface.save(tmp_path, SMALL, params)
    assert list(tmp_path.glob("*.unfinished")) == []


def test_who_has_a_file_open_keeps_what_it_read_when_another_takes_its_name(tmp_path: Path) -> None:
    path = tmp_path / huggingface.SINGLE
    huggingface.safetensors_files.write(path, {"a": np.zeros(3, np.float32)})
    before = huggingface.safetensors_files.read(path)["a"]
    huggingface.safetensors_files.write(path, {"a": np.ones(3, np.float32)})
    np.testing.assert_array_equal(before, np.zeros(3))
    np.testing.assert_array_equal(huggingface.safetensors_files.read(path)["a"], np.ones(3))


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    params = random_parameters(SMALL)
    params["model.layers.1.mlp.up_proj.weight"] = params.pop("model.layers.0.mlp.up_proj.weight")
    params["model.norm.weight"] = np.ones(9, np.float32)
    huggingface.write_json(tmp_path / huggingface.CONFIG, huggingface.config_json(SMALL))
    huggingface.safetensors_files.write(tmp_path / huggingface.SINGLE, params)
    with pytest.raises(CheckpointRefused) as refusal:
        huggingface.load(tmp_path)
    assert "model.layers.0.mlp.up_proj.weight is missing" in str(refusal.value)
    assert "model.layers.1.mlp.up_proj.weight is not a tensor of the model" in str(refusal.value)
    assert "model.norm.weight has shape [9], not [8]" in str(refusal.value)


def test_a_head_beside_a_tied_embedding_is_ignored_if_it_is_equal_and_else_refused(tmp_path: Path) -> None:
    params = random_parameters(SMALL)
    huggingface.write_json(tmp_path / huggingface.CONFIG, huggingface.config_json(SMALL))
    stored = {**params, "lm_head.weight": params["model.embed_tokens.weight"]}
    huggingface.safetensors_files.write(tmp_path / huggingface.SINGLE, stored)
    assert list(huggingface.load(tmp_path)) == list(params)

    stored["lm_head.weight"] = stored["lm_head.weight"] + np.eye(11, 8, dtype=np.float32)
    huggingface.safetensors_files.write(tmp_path / huggingface.SINGLE, stored)
    with pytest.raises(CheckpointRefused, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*to false"):
        huggingface.load(tmp_path)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    huggingface.save(tmp_path, SMALL, random_parameters(SMALL))
    path = tmp_path / huggingface.SINGLE
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointRefused, match=r"model\.safetensors is not an intact safetensors file"):
            huggingface.load(tmp_path)


BASE = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"num_experts": 8}, "num_experts 8"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "has no num_experts_per_tok"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_setting_the_decoder_does_not_have_is_refused_by_name(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    actual = {key: value for key, value in {**BASE, **change}.items() if value is not None}
    huggingface.write_json(tmp_path / huggingface.CONFIG, actual)
    with pytest.raises(ConfigurationError, match=named):
        huggingface.load_config(tmp_path)


def test_what_a_configuration_leaves_out_is_what_its_family_means_by_it(tmp_path: Path) -> None:
    huggingface.write_json(tmp_path / huggingface.CONFIG, BASE)
    config = huggingface.load_config(tmp_path)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (4, 2, 10_000.0)
    assert not config.tie_word_embeddings

    published = {"sliding_window": 32_768, "use_sliding_window": False, "rope_theta": 1e6, "num_key_value_heads": 1}
    huggingface.write_json(tmp_path / huggingface.CONFIG, {**BASE, **published, "model_type": "qwen2"})
    config = huggingface.load_config(tmp_path)
    assert (config.qkv_bias, config.o_bias, config.num_key_value_heads, config.rope_theta) == (True, False, 1, 1e6)


@pytest.mark.parametrize(("written", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 7}, 7)])
def test_a_mistral_that_names_no_window_has_that_of_its_family_and_one_that_names_null_has_none(
    written: dict[str, Any], window: int, tmp_path: Path
) -> None:
    huggingface.write_json(tmp_path / huggingface.CONFIG, {**BASE, **written, "model_type": "mistral"})
    assert huggingface.load_config(tmp_path).sliding_window == window


def test_a_directory_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="give the directory of a Hugging Face checkpoint"):
        huggingface.load_config(tmp_path)
    with pytest.raises(ConfigurationError, match="together"):
        huggingface.config_json(DecoderConfig(qk_norm=True, qkv_bias=True))


def test_a_checkpoint_like_one_of_a_newer_release_names_its_dtype_in_both_ways(tmp_path: Path) -> None:
    huggingface.save(tmp_path / "template", SMALL, random_parameters(SMALL))
    settings = json.loads((tmp_path / "template" / "config.json").read_text())
    huggingface.write_json(tmp_path / "template" / "config.json", {**settings, "dtype": "float32"})

    params = random_parameters(SMALL)
    huggingface.save_like(tmp_path / "template", tmp_path / "model", params, dtype=ml_dtypes.bfloat16)

    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (settings["dtype"], settings["torch_dtype"]) == ("bfloat16", "bfloat16")

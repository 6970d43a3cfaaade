"""Hugging Face checkpoints, without torch: config.json and safetensors of Qwen2, Qwen3, Qwen3-MoE, Llama and
Mistral.

Unsupported settings that would change the computation are refused, each by an error that names it, and so are missing,
unknown and misshapen tensors: a model that loads is the model that was saved.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.files.safetensors_files import CheckpointRefused
from rollstream.consumers.models.config import DecoderConfig, manifest_model
from rollstream.consumers.models.parameters import EMBEDDING, HEAD, base_shapes
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.files.atomic_files import write_bytes

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of a checkpoint that belong to its model whatever its parameters are."""
_MAX_POSITIONS = "max_position_embeddings"
_QKV_BIAS = {"qwen2": True, "qwen3": False, "qwen3_moe": False, "llama": False, "mistral": False}
"""Whether a family has biases on queries, keys and values if config.json has no attention_bias."""
_MISTRAL_WINDOW = 4096
"""Window of a Mistral whose config.json does not mention sliding_window, as in transformers; null means no window."""
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
"""Settings of a mixture of experts; DecoderConfig has the same names."""
_NEVER_USED = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that old checkpoints contain and no model reads."""


def checkpoint_model(directory: Path | str) -> str:
    """Return the model of a checkpoint in JSON, for `model` of a `StepWriter`. Raises as `load_config` does."""
    return manifest_model(load_config(directory))


def load_config(directory: Path | str) -> DecoderConfig:
    """Read the decoder's shape from config.json. Raises ConfigurationError for a missing or unsupported setting."""
    path = Path(directory) / CONFIG
    settings = read_json(path)
    family = settings.get("model_type")
    if family not in _QKV_BIAS:
        raise ConfigurationError(f"{path}: model_type {family!r} is not supported; use one of {', '.join(_QKV_BIAS)}")
    _refuse_unsupported(path, settings)
    if family == "qwen3_moe" and "num_local_experts" in settings:
        # transformers 5 writes the number of experts under this name.
        settings = {"num_experts": settings["num_local_experts"], **settings}
    try:
        heads, width = settings["num_attention_heads"], settings["hidden_size"]
        # transformers 5 merges the earlier settings rope_theta and rope_scaling.
        rope = {**(settings.get("rope_scaling") or {}), **(settings.get("rope_parameters") or {})}
        biased = settings.get("attention_bias", False) and family not in ("qwen2", "mistral")
        return DecoderConfig(
            vocab_size=settings["vocab_size"],
            hidden_size=width,
            num_hidden_layers=settings["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or (128 if family == "qwen3" else width // heads),
            intermediate_size=settings["intermediate_size"],
            rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10_000.0))),
            **_stretch(path, rope),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=biased or _QKV_BIAS[family],
            o_bias=biased,
            mlp_bias=settings.get("mlp_bias", False) and family != "mistral",
            tie_word_embeddings=settings.get("tie_word_embeddings", False),
            # The other families have the key, and use it only with use_sliding_window, which is refused.
            sliding_window=(settings.get("sliding_window", _MISTRAL_WINDOW) or 0) if family == "mistral" else 0,
            **({name: settings[name] for name in _EXPERTS} if family == "qwen3_moe" else {}),
        )
    except KeyError as error:
        raise ConfigurationError(f"{path} has no {error.args[0]}") from error


def load_dtype(directory: Path | str) -> str:
    """Read the dtype of the parameters from config.json; float32 if it has none. Raises ConfigurationError."""
    path = Path(directory) / CONFIG
    settings = read_json(path)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigurationError(
            f'{path}: dtype {dtype!r} cannot be published; set learner.weights.dtype to "bfloat16" or "float32"'
        )
    return dtype


def _refuse_unsupported(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a setting that would change what the decoder computes."""
    full_attention = {"full_attention"}
    refused = {
        "hidden_act": settings.get("hidden_act", "silu") != "silu",
        "use_sliding_window": settings.get("use_sliding_window", False),
        "layer_types": not set(settings.get("layer_types") or full_attention) <= full_attention,
        "quantization_config": settings.get("quantization_config") is not None,
        "num_experts": settings.get("num_experts") and settings.get("model_type") != "qwen3_moe",
        "num_local_experts": settings.get("num_local_experts") and settings.get("model_type") != "qwen3_moe",
        "decoder_sparse_step": settings.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": settings.get("mlp_only_layers"),
        "partial_rotary_factor": settings.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, unsupported in refused.items():
        if unsupported:
            raise ConfigurationError(f"{path}: {key} {settings.get(key)!r} is not supported; choose a model without it")


def _stretch(path: Path, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary frequencies."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind != "llama3":
        raise ConfigurationError(f"{path}: rope_scaling of rope_type {kind!r} is not supported; only llama3 is")
    return {
        "rope_scaling_factor": float(rope["factor"]),
        "rope_low_freq_factor": float(rope["low_freq_factor"]),
        "rope_high_freq_factor": float(rope["high_freq_factor"]),
        "rope_original_positions": int(rope["original_max_position_embeddings"]),
    }


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder. Raises ConfigurationError if no family has this combination of parts."""
    all_biased = config.qkv_bias and config.o_bias
    some_biased = config.qkv_bias or config.o_bias
    plain = not (config.qk_norm or some_biased or config.mlp_bias)
    if config.num_experts:
        family = "qwen3_moe" if config.qk_norm and some_biased == all_biased and not config.mlp_bias else ""
    elif config.sliding_window:
        family = "mistral" if plain else ""
    elif config.qk_norm and some_biased == all_biased and not config.mlp_bias:
        family = "qwen3"
    elif not config.qk_norm and config.qkv_bias and not config.o_bias and not config.mlp_bias:
        family = "qwen2"
    elif not config.qk_norm and some_biased == all_biased:
        family = "llama"
    else:
        family = ""
    if not family:
        raise ConfigurationError(
            f"none of Qwen2, Qwen3, Qwen3-MoE, Llama and Mistral has num_experts={config.num_experts}, "
            f"sliding_window={config.sliding_window}, "
            f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, o_bias={config.o_bias} and "
            f"mlp_bias={config.mlp_bias} together; change one of them"
        )
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_positions,
    }
    stretched = config.rope_scaling_factor != 1.0
    document = {
        "architectures": [f"{''.join(map(str.capitalize, family.split('_')))}ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if stretched else None,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if family == "mistral":
        document["sliding_window"] = config.sliding_window
    elif family != "qwen2":
        document["attention_bias"] = all_biased
    if family == "qwen3_moe":
        document |= {**{name: getattr(config, name) for name in _EXPERTS}, "decoder_sparse_step": 1}
    if family == "llama":
        document["mlp_bias"] = config.mlp_bias
    return document


def load(directory: Path | str, config: DecoderConfig | None = None) -> dict[str, NDArray[Any]]:
    """Load the parameters of a checkpoint by name, in their stored dtype: read-only views of its files.

    `config` defaults to the config.json of the directory. Raises CheckpointRefused, which names missing, unknown and
    misshapen tensors, unless the tensors are exactly the decoder's; beside a tied embedding, an equal head is ignored.
    """
    directory = Path(directory)
    expected_shapes = base_shapes(config or load_config(directory))
    stored: dict[str, NDArray[Any]] = {}
    for path in checkpoint_files(directory):
        stored |= safetensors_files.read(path)
    ignored = {name for name in stored if name.endswith(_NEVER_USED)}
    head = None if HEAD in expected_shapes else stored.pop(HEAD, None)
    stored = {name: array for name, array in stored.items() if name not in ignored}
    problems = [f"{name} is missing" for name in expected_shapes if name not in stored]
    if head is not None and EMBEDDING in stored and not np.array_equal(head, stored[EMBEDDING]):
        problems.append(
            f"{HEAD} differs from {EMBEDDING}, although tie_word_embeddings is true; set it to false in {CONFIG}, or "
            "save the model without the head"
        )
    problems += [f"{name} is not a tensor of the model" for name in sorted(set(stored) - set(expected_shapes))]
    problems += [
        f"{name} has shape {list(array.shape)}, not {list(expected_shapes[name])}"
        for name, array in stored.items()
        if name in expected_shapes and array.shape != expected_shapes[name]
    ]
    _refuse(problems, f"{directory} does not hold the model that its {CONFIG} describes")
    return {name: stored[name] for name in expected_shapes}


def _refuse(problems: list[str], what: str) -> None:
    """Raise CheckpointRefused if there are problems."""
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointRefused(f"{what}: {'; '.join(problems[:5])}{more}")


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the files in its index, or the single file.

    Raises CheckpointRefused if there is neither.
    """
    if (directory / INDEX).exists():
        return [directory / name for name in sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    raise CheckpointRefused(f"{directory} holds neither {SINGLE} nor {INDEX}; fetch the model's safetensors files")


def save(
    directory: Path | str,
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    max_positions: int = 0,
) -> None:
    """Write a checkpoint that `load` and other libraries read, in shards if it exceeds `max_shard_bytes`.

    `params` are arrays of any kind, copied to the host one at a time; `dtype` is the stored dtype, by default their
    own. `max_positions` is the longest context of the model; with 0 other libraries assume that of its family, 2048
    for Llama. The single file, or the index, marks the checkpoint complete and is written last. Raises
    ConfigurationError if no family has the model's combination of parts, and CheckpointRefused unless `params` are
    exactly the model's, or if the directory already holds a model.
    """
    document = config_json(config) | ({_MAX_POSITIONS: max_positions} if max_positions else {})
    _write(Path(directory), document, base_shapes(config), params, dtype, max_shard_bytes)


def save_like(
    template: Path | str, directory: Path | str, params: Mapping[str, Any], *, dtype: DTypeLike | None = None
) -> None:
    """Write a checkpoint with the model and the tokenizer of the checkpoint `template`, of any architecture.

    Raises CheckpointRefused unless `params` have exactly the names and shapes of the template's tensors, or if the
    directory already holds a model.
    """
    template = Path(template)
    template_shapes: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(template):
        template_shapes |= {name: array.shape for name, array in safetensors_files.read(path).items()}
    _write(Path(directory), read_json(template / CONFIG), template_shapes, params, dtype, MAX_SHARD_BYTES)
    copy_companions(template, directory)


def max_positions_of(directory: Path | str) -> int:
    """Return the longest context that the config.json of a checkpoint names; 0 if it names none."""
    path = Path(directory) / CONFIG
    named = read_json(path).get(_MAX_POSITIONS) if path.exists() else None
    return named if isinstance(named, int) else 0


def copy_companions(source: Path | str, directory: Path | str) -> None:
    """Copy the files of a checkpoint that are named in COMPANIONS: tokenizer, generation settings."""
    for name in COMPANIONS:
        if (Path(source) / name).exists():
            (Path(directory) / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(source) / name, Path(directory) / name)


def _write(
    directory: Path,
    settings: Mapping[str, Any],
    template_shapes: Mapping[str, tuple[int, ...]],
    params: Mapping[str, Any],
    dtype: DTypeLike | None,
    max_shard_bytes: int,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / INDEX).exists() or any(directory.glob("*.safetensors")):
        raise CheckpointRefused(f"{directory} already holds a model; give a directory without one")
    problems = [f"{name} is missing" for name in template_shapes if name not in params]
    problems += [f"{name} is not one of its tensors" for name in params if name not in template_shapes]
    problems += [
        f"{name} has shape {list(params[name].shape)}, not {list(shape)}"
        for name, shape in template_shapes.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    _refuse(problems, "the parameters do not match the model")
    tensors = {name: _LazyArray(params[name], dtype) for name in template_shapes}
    shards: list[dict[str, _LazyArray]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    stored = {str(tensor.dtype) for tensor in tensors.values()}
    # Newer releases of transformers write and prefer `dtype`, older ones know `torch_dtype` alone.
    names = {"torch_dtype", *({"dtype"} & settings.keys())}
    write_json(directory / CONFIG, {**settings, **dict.fromkeys(sorted(names), stored.pop())})
    if len(shards) == 1:
        safetensors_files.write(directory / SINGLE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        safetensors_files.write(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


class _LazyArray:
    """An array that is converted to numpy in the given dtype only when it is written."""

    def __init__(self, array: Any, dtype: DTypeLike | None) -> None:
        self._array = array
        self.dtype = np.dtype(dtype or array.dtype)
        self.shape = tuple(array.shape)

    @property
    def nbytes(self) -> int:
        """Size of the numpy array."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self._array).astype(dtype or self.dtype, copy=False)


def converted_lazily(array: Any, dtype: DTypeLike | None) -> safetensors_files.Storable:
    """Return an array that is copied to the host, and converted to `dtype` if one is given, only when it is written."""
    return _LazyArray(array, dtype)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigurationError if there is none."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no {path}; give the directory of a Hugging Face checkpoint") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return stored


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    encoded = json.dumps(value, indent=2).encode() + b"\n"
    write_bytes(path, encoded)

"""Low-rank adapters (LoRA, arXiv:2106.09685): their names, merging them into the projections, and PEFT's files; no JAX.

A projection W [out, in] is computed as W + alpha / rank B A, with A [rank, in] and B [out, rank]. A full
version holds all parameters and the adapters; between full versions, only changes are sent, so only the adapters.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig, LoraConfig
from rollstream.consumers.models.parameters import ADAPTER_A, ADAPTER_B, adapter_shapes, is_adapter
from rollstream.topics.errors import ConfigurationError

PEFT_CONFIG = "adapter_config.json"
PEFT_MODEL = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def without_adapters(config: DecoderConfig) -> DecoderConfig:
    """Return the same model without adapters, which is the shape of the merged model and of its checkpoint."""
    return replace(config, lora=LoraConfig())


def merged(config: DecoderConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the adapters into the projections, and return the parameters of the model without adapters.

    Arrays are numpy's or JAX's; sums are float32, and results have the dtype of the projection. If the model
    has no adapters, the parameters are returned as they are.
    """
    whole = {name: array for name, array in params.items() if not is_adapter(name)}
    if not config.lora.rank:
        return whole
    for name in params:
        if not name.endswith(ADAPTER_A):
            continue
        projection = name.removesuffix(ADAPTER_A)
        down, up = (params[projection + part].astype(np.float32) for part in (ADAPTER_A, ADAPTER_B))
        base = whole[f"{projection}.weight"]
        whole[f"{projection}.weight"] = (base.astype(np.float32) + config.lora.scale * (up @ down)).astype(base.dtype)
    return whole


def save_merged(
    directory: Path | str,
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    companions: Path | str = "",
    dtype: DTypeLike | None = None,
) -> None:
    """Write a checkpoint with the adapters merged, and with the tokenizer and further files of another checkpoint.

    `companions` is the directory of the other checkpoint, of which huggingface.COMPANIONS are copied, and whose longest
    context the model has; empty: no further files. Raises as `huggingface.save` does.
    """
    max_positions = huggingface.max_positions_of(companions) if companions else 0
    huggingface.save(directory, config, merged(config, params), dtype=dtype, max_positions=max_positions)
    if companions:
        huggingface.copy_companions(companions, directory)


def save_peft(
    directory: Path | str,
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    base: str = "",
    dtype: DTypeLike | None = None,
) -> None:
    """Write the adapters alone as PEFT's files, which PeftModel.from_pretrained and vLLM read.

    `base` names the checkpoint that the adapters belong to. adapter_config.json is written last. Raises
    ConfigurationError for a model without adapters.
    """
    if not config.lora.rank:
        raise ConfigurationError("this version has no adapters; set learner.model.lora.rank, or export the whole model")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        _PEFT_PREFIX + name: huggingface.converted_lazily(params[name], dtype) for name in adapter_shapes(config)
    }
    safetensors_files.write(directory / PEFT_MODEL, tensors)
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": list(config.lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    huggingface.write_json(directory / PEFT_CONFIG, document)

"""A small model with adapters, and the logits that PEFT gives for its exported files.

`python -m tests.support.peft_logits DIRECTORY` writes the files and, with torch, transformers and peft, records the
logits.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.adapters import save_peft, without_adapters
from rollstream.consumers.models.config import DecoderConfig, LoraConfig
from rollstream.consumers.models.parameters import base_shapes
from tests.support.checkpoints import random_parameters, tokens_of
from tests.support.paths import ROOT

RECORDED = ROOT / "tests" / "fixtures" / "peft-logits.npz"
MODEL = DecoderConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    lora=LoraConfig(rank=4, alpha=2.0, targets=("q_proj", "v_proj", "o_proj", "down_proj")),
)


def write(directory: Path) -> dict[str, NDArray[np.float32]]:
    """Write the model and its adapters below a directory, as we export them; returns its parameters."""
    params = random_parameters(MODEL)
    base = {name: params[name] for name in base_shapes(MODEL)}
    huggingface.save(directory / "base", without_adapters(MODEL), base)
    save_peft(directory / "adapters", MODEL, params, base=str(directory / "base"))
    return params


def logits_of_peft(directory: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits [T, vocab_size] that PEFT gives for a row of tokens, in float32."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, directory / "adapters")
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.from_numpy(tokens.astype(np.int64))).logits[0].numpy()
    return logits


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if not (where / "base").exists():
        write(where)
    if importlib.util.find_spec("peft"):
        np.savez_compressed(RECORDED, logits=logits_of_peft(where, tokens_of(MODEL))[::5])
        print(RECORDED)

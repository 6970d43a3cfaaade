"""Small checkpoints of the families we load, the same on every machine: written as any library would write them.

`python -m tests.support.checkpoints` records the logits transformers gives for them (it needs the extra `peers`).
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.files import safetensors_files
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.huggingface import CONFIG, SINGLE, load_config
from rollstream.consumers.models.parameters import shapes
from tests.support.paths import ROOT

LARGE = DecoderConfig(
    vocab_size=8192,
    hidden_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=4096,
    tie_word_embeddings=True,
)
"""A model whose parameters take 302 MB, the largest tensor of 34 MB: enough to see who holds them all."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TOKENS = [
    *SPECIAL_TOKENS, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"
]  # fmt: skip
"""Special tokens of Qwen3's chats."""
RECORDED = ROOT / "tests" / "fixtures" / "transformers-logits.npz"

_SIZE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    "qwen3-untied": {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": False, "head_dim": 16},
    "qwen3-biased": {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True, "head_dim": 20},
    "llama-stretched": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": _LLAMA3, "rms_norm_eps": 1e-5},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "qwen3-moe-unscaled": {
        "model_type": "qwen3_moe",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}
"""config.json of each, by name."""


def write_checkpoint(directory: Path, name: str) -> DecoderConfig:
    """Write the checkpoint of that name; returns its configuration."""
    (directory / CONFIG).write_text(json.dumps({**_SIZE, **CHECKPOINTS[name]}))
    config = load_config(directory)
    safetensors_files.write(directory / SINGLE, random_parameters(config))
    return config


def random_parameters(config: DecoderConfig) -> dict[str, NDArray[np.float32]]:
    """Parameters that all have an effect, even biases and norms, and are so large that logits differ by units."""
    draw = np.random.Generator(np.random.Philox(key=7))
    collected = {}
    for name, shape in shapes(config).items():
        scale = 1.5 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        collected[name] = (scale * draw.standard_normal(shape) + name.endswith("norm.weight")).astype(np.float32)
    return collected


def write_tokenizer(
    directory: Path, corpus: Iterable[str], size: int = 320, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> None:
    """Write a tokenizer.json of Qwen's kind with merges of bytes from `corpus`; special tokens come last."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - len(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(directory / "tokenizer.json"))
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def tokens_of(config: DecoderConfig) -> NDArray[np.int32]:
    """One row of 160 tokens [1, 160]: beyond the positions at which the stretched frequencies begin to differ."""
    draw = np.random.Generator(np.random.Philox(key=8))
    return draw.integers(0, config.vocab_size, (1, 160)).astype(np.int32)


def logits_of_transformers(directory: Path, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits [T, vocab_size] that transformers gives for a row of tokens, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        actual: NDArray[np.float32] = model(torch.from_numpy(tokens.astype(np.int64))).logits[0].numpy()
    return actual


def main() -> int:
    """Record the logits of all checkpoints, every fifth position of them."""
    recorded = {}
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as directory:
            config = write_checkpoint(Path(directory), name)
            recorded[name] = logits_of_transformers(Path(directory), tokens_of(config))[::5]
    np.savez_compressed(RECORDED, **recorded)  # type: ignore[arg-type]
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

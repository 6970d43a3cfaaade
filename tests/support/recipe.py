"""The GSM8K recipe at a size for tests: Qwen2.5-0.5B cut down, with random weights, a tokenizer and problems."""

import json
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes

from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig
from tests.support.checkpoints import random_parameters, write_tokenizer

PUBLISHED = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""config.json of Qwen2.5-0.5B-Instruct."""


def write_problems(path: Path, answers: Sequence[int]) -> None:
    """A file of GSM8K's format with a problem for each answer."""
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            problem = {"question": f"Which number is {answer}?", "answer": f"It is {answer}.\n#### {answer}"}
            file.write(json.dumps(problem) + "\n")


def write_model(directory: Path, **changes: object) -> DecoderConfig:
    """A checkpoint of the published configuration with a vocabulary of 384 and `changes`, and a tokenizer.

    Its weights are random, in bfloat16. Like the published one it has more rows in the embedding than the tokenizer has
    tokens.
    """
    directory.mkdir()
    corpus = [f"Which number is {number}? It is {number}.\n#### {number}" for number in range(100)]
    write_tokenizer(directory, corpus)
    (directory / huggingface.CONFIG).write_text(json.dumps({**PUBLISHED, "vocab_size": 384, **changes}))
    config = huggingface.load_config(directory)
    # Large weights would make a random model sure of itself.
    params = {name: 0.3 * array if array.ndim == 2 else array for name, array in random_parameters(config).items()}
    stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in params.items()}
    huggingface.safetensors_files.write(directory / huggingface.SINGLE, stored)
    return config

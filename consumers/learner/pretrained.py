"""The Hugging Face checkpoint that a run starts from: shape of the model, tokenizer, parameters.

Without `learner.pretrained` all three belong to the small model. Imports JAX only within `initial_params`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollstream.consumers.files.safetensors_files import release
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.models import huggingface
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.tokenizer import CharacterTokenizer, Tokenizer
from rollstream.consumers.models.tokenizer_file import load_tokenizer

if TYPE_CHECKING:
    import jax


def model_of(config: LearnerConfig) -> DecoderConfig:
    """Shape of the policy: from the config.json of `pretrained`, or else `model`. Raises ConfigurationError."""
    if not config.pretrained:
        return config.model
    return replace(huggingface.load_config(config.pretrained), lora=config.model.lora)


def resolved(config: LearnerConfig) -> LearnerConfig:
    """Return the settings with `model` set to `model_of(config)`."""
    return replace(config, model=model_of(config))


def published_dtype(config: LearnerConfig) -> str:
    """Dtype in which parameters are published. Raises ConfigurationError if it is not a supported dtype."""
    if config.weights.dtype != "model":
        return config.weights.dtype
    return huggingface.load_dtype(config.pretrained) if config.pretrained else "float32"


def tokenizer_of(config: LearnerConfig) -> Tokenizer:
    """The tokenizer of `pretrained`, or else a character tokenizer. Raises ConfigurationError."""
    return load_tokenizer(config.pretrained) if config.pretrained else CharacterTokenizer()


def initial_params(
    directory: str, model: DecoderConfig, shardings: Mapping[str, "jax.sharding.Sharding"] | None = None
) -> dict[str, "jax.Array"]:
    """Load the parameters of a checkpoint as float32, on the device or split by `shardings`, by parameter name.

    Adapters are not included. Reads only the parts that this process's devices hold; besides these, memory holds one
    tensor at a time. Raises ConfigurationError or CheckpointRefused.
    """
    import jax
    import jax.numpy as jnp

    def place(name: str, stored: np.ndarray[Any, Any]) -> jax.Array:
        if shardings is None:
            return jnp.asarray(stored, jnp.float32)
        placed = jax.make_array_from_callback(
            stored.shape, shardings[name], lambda index: stored[index].astype(np.float32)
        )
        # Wait, because copies run in the background, and several at once would hold several tensors in memory.
        jax.block_until_ready(placed)  # type: ignore[no-untyped-call]
        release(stored)
        return placed

    return {name: place(name, stored) for name, stored in huggingface.load(directory, model).items()}

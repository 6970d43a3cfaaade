"""What a run takes from the Hugging Face checkpoint it starts from: the model's shape, its tokenizer, its parameters.

Without `learner.pretrained` all three are the small model's. Imports JAX only within `initial_params`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from consumers.learner.config import LearnerConfig
from consumers.models import huggingface
from consumers.models.config import DecoderConfig
from consumers.models.tokenizer import CharacterTokenizer, Tokenizer
from consumers.models.tokenizer_file import load_tokenizer

if TYPE_CHECKING:
    import jax


def model_of(config: LearnerConfig) -> DecoderConfig:
    """Shape of the policy: that of `pretrained`'s config.json, else `model`. Raises ConfigurationError."""
    return huggingface.load_config(config.pretrained) if config.pretrained else config.model


def resolved(config: LearnerConfig) -> LearnerConfig:
    """The settings with `model` as `model_of` gives it: what a learner works with."""
    return replace(config, model=model_of(config))


def tokenizer_of(config: LearnerConfig) -> Tokenizer:
    """The tokenizer of `pretrained`, else one of characters. Raises ConfigurationError."""
    return load_tokenizer(config.pretrained) if config.pretrained else CharacterTokenizer()


def initial_params(
    directory: str, model: DecoderConfig, shardings: Mapping[str, "jax.sharding.Sharding"] | None = None
) -> dict[str, "jax.Array"]:
    """The parameters of a checkpoint as float32 on the device, or split as `shardings` says by parameter name.

    Only what this process's devices hold is read. Raises ConfigurationError or CheckpointRefused.
    """
    import jax
    import jax.numpy as jnp

    def place(name: str, stored: np.ndarray[Any, Any]) -> jax.Array:
        if shardings is None:
            return jnp.asarray(stored, jnp.float32)
        return jax.make_array_from_callback(
            stored.shape, shardings[name], lambda index: stored[index].astype(np.float32)
        )

    return {name: place(name, stored) for name, stored in huggingface.load(directory, model).items()}

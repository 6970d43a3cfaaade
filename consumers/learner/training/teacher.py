"""The teacher of on-policy distillation: its parameters on the mesh, and its log-probabilities of a microbatch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.parallel import mesh as layout
from rollstream.consumers.models import parameters
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.huggingface import load_config

LogProbsOf = Callable[[DecoderConfig, Any], Any]
"""Compiles the log-probabilities of a model whose parameters have the given shardings."""


class Teacher:
    """The teacher of a learner, without its parameters: they are given to `TrainStep.train`."""

    def __init__(self, directory: str, mesh: Mesh, dtype: str, log_probs_of: LogProbsOf) -> None:
        """Read the shape of the model in `directory`; its parameters are held in `dtype`."""
        self.model = load_config(directory)
        shapes: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
            for name, shape in parameters.shapes(self.model).items()
        }
        self.shardings = layout.of_params(mesh, shapes)
        self.log_probs = log_probs_of(self.model, self.shardings)
        """Function of parameters and a microbatch, which returns log-probabilities."""
        self.abstract_params: Mapping[str, jax.ShapeDtypeStruct] = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.shardings[name])  # type: ignore[no-untyped-call]
            for name, leaf in shapes.items()
        }
        """Shapes, dtypes and shardings of the teacher's parameters."""


def teacher_of(config: LearnerConfig, mesh: Mesh, log_probs_of: LogProbsOf) -> Teacher | None:
    """Return the teacher of a learner, if it has one."""
    return Teacher(config.teacher, mesh, config.compute_dtype, log_probs_of) if config.teacher else None
